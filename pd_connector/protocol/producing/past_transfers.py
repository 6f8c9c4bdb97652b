# SPDX-License-Identifier: Apache-2.0
"""What a producer remembers of transfers that it no longer has, or that no consumer wants."""

from typing import NamedTuple

from pd_connector.errors import Cause
from pd_connector.protocol.deadlines import Deadlines

_REMEMBERED = 1024
_MOST_UNWANTED = 1 << 16
"""The most unwanted transfers that are remembered. KV of a forgotten one waits for the end of its lease."""
_TOLD_LATER = {
    Cause.LEASE_EVICTED: "its pages were needed for others while it waited",
    Cause.PREFILL_ENDED: "the prefill request ended early",
    Cause.INTERNAL: "an unexpected error ended it, see the log of the producer",
}
"""What a consumer is told that asks for a transfer that has ended by this cause."""


class _End(NamedTuple):
    """How a transfer has ended."""

    cause: Cause | None
    request_ended: bool  # no offer of its prefill can come any more


class PastTransfers:
    """Used by one thread."""

    def __init__(self) -> None:
        # A consumer that opens one of them need not wait for a prefill that will not come.
        self._ended: dict[str, _End] = {}
        # Cancelled before their prefill ended: why, and until when that is remembered. The last
        # offer, when it comes, is freed at once.
        self._unwanted: dict[str, tuple[Cause, float]] = {}
        self._deadlines: Deadlines[str] = Deadlines()

    def is_over(self, transfer: str) -> bool:
        """Whether nothing comes of it: it has ended, or it is not wanted."""
        return transfer in self._ended or transfer in self._unwanted

    def why_not(self, transfer: str) -> tuple[Cause, str]:
        """What to tell a consumer that asks for a transfer that is not here."""
        end = self._ended.get(transfer)
        if end is not None and end.cause in _TOLD_LATER:  # its end has overtaken the question
            return end.cause, _TOLD_LATER[end.cause]
        if transfer in self._unwanted:
            return self._unwanted[transfer][0], "it was cancelled before its prefill ended"
        return Cause.UNKNOWN_TRANSFER, "no such KV here (any more)"

    def is_unwanted(self, transfer: str) -> bool:
        return transfer in self._unwanted

    def why_unwanted(self, transfer: str) -> Cause:
        """Why its consumer has cancelled it. Called where `is_unwanted`."""
        return self._unwanted[transfer][0]

    def remember(self, transfer: str, cause: Cause | None, *, request_ended: bool) -> None:
        """It has ended. The last thousand are remembered, each with the first cause."""
        known = self._ended.get(transfer)
        self._ended[transfer] = _End(known.cause if known else cause, request_ended)
        if len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def begin_again(self, transfer: str) -> None:
        """A new request has the same transfer."""
        self._ended.pop(transfer, None)

    def unwant(self, transfer: str, cause: Cause, until: float) -> None:
        """It is not wanted; this is remembered until this time, unless its request has ended: nothing of
        it comes any more, and a new request may have its name. Where it was known, the first cause and
        the later time stand: vLLM announces a request whose client has left once more, and aborts it
        again, so that nothing is kept for it."""
        end = self._ended.get(transfer)
        if end is not None and end.request_ended:
            return
        cause, until_now = self._unwanted.get(transfer, (cause, until))
        self._unwanted[transfer] = cause, max(until, until_now)
        self._deadlines.set(transfer, until)
        if len(self._unwanted) > _MOST_UNWANTED:
            self.forget_unwanted(next(iter(self._unwanted)))

    def forget_unwanted(self, transfer: str) -> None:
        """Its request has ended."""
        self._unwanted.pop(transfer, None)
        self._deadlines.discard(transfer)

    def tick(self, now: float) -> None:
        """Forget what was to be remembered until now."""
        for transfer in self._deadlines.due(now):
            if transfer not in self._unwanted:
                continue
            _, until = self._unwanted[transfer]
            if until <= now:
                del self._unwanted[transfer]
            else:
                self._deadlines.set(transfer, until)
