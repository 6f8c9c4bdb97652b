# SPDX-License-Identifier: Apache-2.0
"""The kinds of faults, and how long recovery may take."""

from collections.abc import Mapping
from enum import StrEnum

from pd_connector.control import liveness

PAGES = 256
"""In the cache of each rank."""
SETTINGS = {
    "slots": 16,
    "slot_mib": 1,
    "heartbeat_s": 0.1,
    "lease_s": 1.5,
    "session_timeout_s": 0.6,
    "connect_timeout_s": 0.6,
    "stall_timeout_s": 0.3,
    "wait_timeout_s": 1.5,
}
"""Settings of every agent. Timeouts are short, so that ten thousand faults pass in hours and not in weeks."""

_BUSY_S = 5.0
DEADLINE_S = SETTINGS["connect_timeout_s"] + SETTINGS["wait_timeout_s"] + _BUSY_S
"""A load that has no outcome after this is lost. No config value lets it wait longer than the first two
together; the rest is for a busy machine."""
RECOVERY_S = SETTINGS["session_timeout_s"] + SETTINGS["connect_timeout_s"] + DEADLINE_S
"""When the cause of a fault is over, a transfer must succeed within this: silence is noticed, a session
is opened anew, and one more load may fail meanwhile."""
HELD_S = SETTINGS["lease_s"] + SETTINGS["session_timeout_s"] + DEADLINE_S
"""When nobody wants anything any more, every slot and page must be free within this."""
SETTLE_S = liveness.IDLE_S + liveness.INTERVAL_S * liveness.PROBES + _BUSY_S
"""Connections that fell silent must have ended within this: the system asks whether the other end is there."""


class Fault(StrEnum):
    """What is done. Those up to `LIE_HEADER` are done to one chunk that has arrived."""

    DROP = "drop"
    DELAY = "delay"
    DUPLICATE = "duplicate"
    TRUNCATE = "truncate"
    CORRUPT = "corrupt"
    REORDER = "reorder"
    LIE_HEADER = "lying header"
    LIE_MESSAGE = "lying peer"
    RESET = "reset"
    HALF_OPEN = "half-open"
    SLOW_READER = "slow reader"
    STOP = "SIGSTOP"
    KILL = "SIGKILL"
    DESCRIPTORS = "descriptors"
    CLOCK = "clock jump"
    PARTITION = "partition"

    @property
    def on_chunks(self) -> bool:
        """Whether a chunk is hit on its way, by `tampering`."""
        return self in CHUNK_FAULTS


CHUNK_FAULTS = (
    Fault.DROP,
    Fault.DELAY,
    Fault.DUPLICATE,
    Fault.TRUNCATE,
    Fault.CORRUPT,
    Fault.REORDER,
    Fault.LIE_HEADER,
)

AT_ONCE: Mapping[Fault, int] = {Fault.RESET: 4, Fault.CLOCK: 3}
"""How many of a kind hit one round of transfers; one of every other kind."""
