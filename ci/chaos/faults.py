# SPDX-License-Identifier: Apache-2.0
"""The kinds of faults, and how long recovery may take."""

from collections.abc import Mapping
from enum import StrEnum

from pd_connector.control import liveness

PAGES = 256
"""Pages in the cache of each rank that transfers are drawn from."""
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
_PAUSE_S = 16 * SETTINGS["stall_timeout_s"]
"""Of a producer that kept requests waiting in vain nothing is asked for as long (`protocol/silences.py`), after six
times in a row: on a busy machine a chunk may take longer than `stall_timeout_s`."""
RECOVERY_S = SETTINGS["session_timeout_s"] + SETTINGS["connect_timeout_s"] + DEADLINE_S + _PAUSE_S
"""When the cause of a fault is over, a transfer must succeed within this: silence is noticed, a session
is opened anew, and one more load may fail meanwhile."""
HELD_S = SETTINGS["lease_s"] + SETTINGS["session_timeout_s"] + DEADLINE_S
"""When nobody wants anything any more, every slot and page must be free within this."""
SETTLE_S = liveness.IDLE_S + liveness.INTERVAL_S * liveness.PROBES + _BUSY_S
"""Connections that fell silent must have ended within this: the system asks whether the other end is there."""


class Fault(StrEnum):
    """What is done, and where: to a chunk that has arrived, to pages, to a record below its seal, to a
    process or to its connections."""

    DROP = "drop"
    DELAY = "delay"
    DUPLICATE = "duplicate"
    TRUNCATE = "truncate"
    CORRUPT = "corrupt"
    REORDER = "reorder"
    LIE_HEADER = "lying header"
    TAKE_BACK = "pages taken back"
    FLIP_RECORD = "flipped record"
    CUT_RECORD = "cut record"
    REPLAY_RECORD = "replayed record"
    SWAP_RECORDS = "swapped records"
    LOSE_RECORD = "lost record"
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
    def armed(self) -> bool:
        """Whether agents do it themselves while transfers pass, by `tampering` or `wire`."""
        return self in (*CHUNK_FAULTS, *RECORD_FAULTS, Fault.TAKE_BACK)

    @property
    def on_wire(self) -> bool:
        """Whether it is done to records below their seal. A bit of a chunk's bytes is flipped there, too: what a
        seal has vouched for is believed, and memory that changes later is no fault of a network."""
        return self in (*RECORD_FAULTS, Fault.CORRUPT)


CHUNK_FAULTS = (
    Fault.DROP,
    Fault.DELAY,
    Fault.DUPLICATE,
    Fault.TRUNCATE,
    Fault.CORRUPT,
    Fault.REORDER,
    Fault.LIE_HEADER,
)

RECORD_FAULTS = (
    Fault.FLIP_RECORD,
    Fault.CUT_RECORD,
    Fault.REPLAY_RECORD,
    Fault.SWAP_RECORDS,
    Fault.LOSE_RECORD,
)

AT_ONCE: Mapping[Fault, int] = {Fault.RESET: 4, Fault.CLOCK: 3}
"""How many of a kind hit one round of transfers; one of every other kind."""
