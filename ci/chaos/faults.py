# SPDX-License-Identifier: Apache-2.0
"""The kinds of faults, and how long recovery may take."""

from collections.abc import Mapping
from enum import StrEnum

from pd_connector.control import liveness

PAGES = 256
"""Pages in the cache of each rank, from which transfers are drawn."""
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
"""A load without an outcome after this time is lost. By the config it waits at most for the first two terms. The rest
is for a busy machine."""
_PAUSE_S = 16 * SETTINGS["stall_timeout_s"]
"""A producer that did not answer waiting requests gets no requests for this time (`protocol/consuming/peer_backoff.py`), after six
times in a row. On a busy machine a chunk can take longer than `stall_timeout_s`."""
RECOVERY_S = SETTINGS["session_timeout_s"] + SETTINGS["connect_timeout_s"] + DEADLINE_S + _PAUSE_S
"""After the cause of a fault is gone, a transfer must succeed within this time. The silence is noticed, a session is
opened again, and one more load may fail."""
HELD_S = SETTINGS["lease_s"] + SETTINGS["session_timeout_s"] + DEADLINE_S
"""When no request is left, every slot and page must be free within this time."""
SETTLE_S = liveness.IDLE_S + liveness.INTERVAL_S * liveness.PROBES + _BUSY_S
"""Silent connections must have ended within this time, because the system probes the other end."""


class Fault(StrEnum):
    """The faults. They hit an arrived chunk, pages, a record below its seal, a process, or its connections."""

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
        """Whether agents cause the fault themselves during transfers, through `tampering` or `wire`."""
        return self in (*CHUNK_FAULTS, *RECORD_FAULTS, Fault.TAKE_BACK)

    @property
    def on_wire(self) -> bool:
        """Whether the fault hits records below their seal. A flipped bit of a chunk's bytes is such a fault too: sealed
        bytes are trusted, and memory that changes later is not a network's fault."""
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
"""The number of faults of a kind in one round of transfers; 1 for every other kind."""
