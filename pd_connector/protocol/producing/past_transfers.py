# SPDX-License-Identifier: Apache-2.0
"""A producer's memory of transfers that have ended, or that their consumer has cancelled."""

from typing import NamedTuple

from pd_connector.errors import Cause
from pd_connector.protocol.deadlines import Deadlines

_REMEMBERED = 1024
_MOST_UNWANTED = 1 << 16
"""Most cancelled transfers that are remembered. If one is forgotten, its KV stays until its lease ends."""
_LATE_DETAIL = {
    Cause.LEASE_EVICTED: "its pages were needed for others while it waited",
    Cause.PREFILL_ENDED: "the prefill request ended early",
    Cause.INTERNAL: "an unexpected error ended it, see the log of the producer",
}
"""By cause of a transfer's end: the detail for a consumer that asks for it afterwards."""


class _End(NamedTuple):
    """The end of a transfer."""

    cause: Cause | None
    request_ended: bool  # no further offer of it can come


class PastTransfers:
    """Used by one thread."""

    def __init__(self) -> None:
        # A consumer that opens one of these is refused at once: no prefill of it will come.
        self._ended: dict[str, _End] = {}
        # Transfers that were cancelled before their prefill ended: the cause, and how long it is
        # remembered. Their final offer is freed at once.
        self._unwanted: dict[str, tuple[Cause, float]] = {}
        self._deadlines: Deadlines[str] = Deadlines()

    def is_over(self, transfer: str) -> bool:
        """Whether the transfer has ended, or was cancelled: no KV of it will come."""
        return transfer in self._ended or transfer in self._unwanted

    def why_not(self, transfer: str) -> tuple[Cause, str]:
        """Cause and detail for a consumer that asks for a transfer that is not here."""
        end = self._ended.get(transfer)
        if (
            end is not None and end.cause in _LATE_DETAIL
        ):  # it ended while the question was on its way
            return end.cause, _LATE_DETAIL[end.cause]
        if transfer in self._unwanted:
            return self._unwanted[transfer][0], "it was cancelled before its prefill ended"
        return Cause.UNKNOWN_TRANSFER, "no such KV here (any more)"

    def is_unwanted(self, transfer: str) -> bool:
        return transfer in self._unwanted

    def why_unwanted(self, transfer: str) -> Cause:
        """Why its consumer has cancelled it. Call it only if `is_unwanted`."""
        return self._unwanted[transfer][0]

    def remember(self, transfer: str, cause: Cause | None, *, request_ended: bool) -> None:
        """The transfer has ended. The last thousand ended transfers are remembered. If a transfer ends several times,
        its first cause counts."""
        earlier = self._ended.get(transfer)
        self._ended[transfer] = _End(earlier.cause if earlier else cause, request_ended)
        if len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def begin_again(self, transfer: str) -> None:
        """A new request has the same transfer."""
        self._ended.pop(transfer, None)

    def unwant(self, transfer: str, cause: Cause, until: float) -> None:
        """The transfer was cancelled; remember that until this time. If it is remembered already, the first cause and
        the later time count: after a client has left, vLLM announces the request once more, and aborts it again.

        Nothing is remembered if the transfer's request has ended: no KV of it will come, and a new request can have
        its name."""
        end = self._ended.get(transfer)
        if end is not None and end.request_ended:
            return
        cause, until_now = self._unwanted.get(transfer, (cause, until))
        self._unwanted[transfer] = cause, max(until, until_now)
        self._deadlines.set(transfer, until)
        if len(self._unwanted) > _MOST_UNWANTED:
            self.forget_unwanted(next(iter(self._unwanted)))

    def forget_unwanted(self, transfer: str) -> None:
        """The request of a cancelled transfer has ended."""
        self._unwanted.pop(transfer, None)
        self._deadlines.discard(transfer)

    def tick(self, now: float) -> None:
        """Forget the cancelled transfers whose time is over."""
        for transfer in self._deadlines.due(now):
            if transfer not in self._unwanted:
                continue
            _, until = self._unwanted[transfer]
            if until <= now:
                del self._unwanted[transfer]
            else:
                self._deadlines.set(transfer, until)
