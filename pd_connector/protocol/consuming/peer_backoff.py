# SPDX-License-Identifier: Apache-2.0
"""Pauses for producers that do not answer.

A request that waits until its deadline without an answer has lost that time. If a producer's answers never come (a
firewall drops the data port, a switch loses large packets), every request would lose it. During a pause requests do not
wait.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from pd_connector.pauses import doubled_s

LONGEST_PAUSE_S = 30.0
_IN_A_ROW = 2
"""Unanswered waits in a row until a pause begins. A single one may be an accident."""
_REMEMBERED = 1024


@dataclass(slots=True)
class _Backoff:
    unanswered: int  # waits since the last answer
    last: float  # when the last of them ended
    until: float  # when the pause ends


class PeerBackoff:
    """Unanswered waits, by producer. Used by one thread.

    Args:
        timeout_s: duration of a wait and of the first pause. Each further pause is twice as long.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._backoffs: dict[Hashable, _Backoff] = {}

    def waited(self, producer: Hashable, began: float, now: float) -> None:
        """A wait that began at `began` has ended now without an answer."""
        backoff = self._backoffs.pop(producer, None) or _Backoff(0, float("-inf"), float("-inf"))
        self._backoffs[producer] = backoff  # at the end: the oldest are forgotten first
        if began < backoff.last or now <= backoff.last:
            # It waited at the same time as a transfer that was counted, or began as that transfer's session ended.
            return
        backoff.unanswered += 1
        backoff.last = now
        if backoff.unanswered >= _IN_A_ROW:
            doublings = backoff.unanswered - _IN_A_ROW
            backoff.until = now + doubled_s(self._timeout_s, doublings, LONGEST_PAUSE_S)
        if len(self._backoffs) > _REMEMBERED:
            self._backoffs.pop(next(iter(self._backoffs)))

    def answered(self, producer: Hashable) -> None:
        """An answer has come."""
        self._backoffs.pop(producer, None)

    def pause(self, producer: Hashable, now: float) -> str:
        """Why this producer is not asked now; empty if it can be asked."""
        backoff = self._backoffs.get(producer)
        if backoff is None or backoff.until <= now:
            return ""
        seconds = max(1, round(backoff.until - now))
        return f"nothing came {backoff.unanswered} times in a row; it is asked again in {seconds} s"

    def tries(self, producer: Hashable, now: float) -> None:
        """A request asks this producer. After a pause the first request tests the producer for all: other requests
        pause until its wait is over."""
        backoff = self._backoffs.get(producer)
        if backoff is not None and backoff.unanswered >= _IN_A_ROW:
            backoff.until = now + self._timeout_s
