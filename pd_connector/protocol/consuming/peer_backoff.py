# SPDX-License-Identifier: Apache-2.0
"""Producers that do not answer waiting requests, and how long nothing is asked of them then.

A request that waits until a deadline and then is computed here has lost that time. If a producer's answers never
come (a firewall drops its data port, a switch loses large packets), every request would lose it.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from pd_connector.pauses import doubled_s

LONGEST_PAUSE_S = 30.0
_IN_A_ROW = 2
"""A pause begins after this many unanswered waits in a row. One may be an accident."""
_REMEMBERED = 1024


@dataclass(slots=True)
class _Backoff:
    in_vain: int  # waits, since the last answer
    last: float  # when the last of them ended
    until: float  # the pause ends


class PeerBackoff:
    """Unanswered waits, by producer. Used by one thread.

    Args:
        timeout_s: how long one wait takes, and the first pause; each further one is twice as long.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._known: dict[Hashable, _Backoff] = {}

    def waited(self, producer: Hashable, began: float, now: float) -> None:
        """What was asked at `began` has not come until now."""
        silence = self._known.pop(producer, None) or _Backoff(0, float("-inf"), float("-inf"))
        self._known[producer] = silence  # at the end: those that were silent longest ago go first
        if began < silence.last or now <= silence.last:
            # It waited beside a transfer that was counted, or had only just begun when that transfer's session ended.
            return
        silence.in_vain += 1
        silence.last = now
        if silence.in_vain >= _IN_A_ROW:
            doublings = silence.in_vain - _IN_A_ROW
            silence.until = now + doubled_s(self._timeout_s, doublings, LONGEST_PAUSE_S)
        if len(self._known) > _REMEMBERED:
            self._known.pop(next(iter(self._known)))

    def answered(self, producer: Hashable) -> None:
        """What was asked has come."""
        self._known.pop(producer, None)

    def pause(self, producer: Hashable, now: float) -> str:
        """Why nothing is asked of this producer now; empty if it may be asked."""
        silence = self._known.get(producer)
        if silence is None or silence.until <= now:
            return ""
        seconds = max(1, round(silence.until - now))
        return f"nothing came {silence.in_vain} times in a row; it is asked again in {seconds} s"

    def tries(self, producer: Hashable, now: float) -> None:
        """Something is asked of this producer. The first request after a pause tries for all others: nothing
        else is asked of the producer until the request has had its time."""
        silence = self._known.get(producer)
        if silence is not None and silence.in_vain >= _IN_A_ROW:
            silence.until = now + self._timeout_s
