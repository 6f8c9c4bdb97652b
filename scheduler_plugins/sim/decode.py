# SPDX-License-Identifier: Apache-2.0
"""The decode stage of a simulated engine."""

from __future__ import annotations

import heapq

from scheduler_plugins.cost.model import CostModel


class DecodeStage:
    """Sequences that decode together, one token each per step, on a machine of their own.

    Between two events the batch does not change, so that all steps in between are one formula:
    the cost is O(log n) per request, not per token. Who comes in the middle of a step joins it
    at its end.
    """

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._now_s = 0.0
        self._step = 0
        self._context = 0
        self._ends: list[tuple[int, int, str, float]] = []

    @property
    def batch(self) -> int:
        return len(self._ends)

    def decoding(self) -> list[tuple[float, int]]:
        """For each sequence: when it joined, and the tokens it has."""
        return [(since_s, end - (step - self._step)) for step, end, _, since_s in self._ends]

    def add(self, request_id: str, tokens: int, more: int, now_s: float) -> None:
        """A sequence of `tokens` tokens joins at `now_s`, up to which was advanced, for `more`."""
        self._now_s = max(self._now_s, now_s)
        heapq.heappush(self._ends, (self._step + more, tokens + more, request_id, now_s))
        self._context += tokens

    def advance(self, until_s: float) -> list[tuple[str, float]]:
        """Decode up to the end of the step that is running at `until_s`.

        Returns:
            The sequences that ended, with the time at which they did.
        """
        done: list[tuple[str, float]] = []
        while self._ends and self._now_s < until_s:
            to_end = self._ends[0][0] - self._step
            steps = min(to_end, self._steps_within(until_s - self._now_s, to_end))
            self._now_s += self._duration_s(steps)
            self._step += steps
            self._context += steps * self.batch
            while self._ends and self._ends[0][0] == self._step:
                _, tokens, request_id, _ = heapq.heappop(self._ends)
                self._context -= tokens
                done.append((request_id, self._now_s))
        return done

    def _duration_s(self, steps: int) -> float:
        model, batch = self._costs, self.batch
        contexts = steps * self._context + batch * steps * (steps - 1) // 2
        return steps * (model.d0 + model.d1 * batch) + model.d2 * contexts

    def _steps_within(self, time_s: float, most: int) -> int:
        """Steps that begin within `time_s`, at least 1 and at most `most`."""
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            if self._duration_s(middle) >= time_s:
                high = middle
            else:
                low = middle + 1
        return low
