# SPDX-License-Identifier: Apache-2.0
"""The decode stage of a simulated engine."""

from __future__ import annotations

import heapq
from math import inf, sqrt
from typing import NamedTuple

from scheduler_plugins.cost.model import CostModel


class Preempted(NamedTuple):
    """A sequence taken out before its end."""

    request_id: str
    tokens: int  # its tokens, generated tokens included
    more: int  # tokens still to generate


class DecodeStage:
    """Sequences that decode together, one token each per step.

    Between two events the batch does not change, so one formula gives all steps in between. The cost is O(log n) per
    request, not per token. A sequence that comes in the middle of a step joins at the step's end.
    """

    def __init__(
        self, costs: CostModel, *, capacity_tokens: float = inf, slack_s: float = 0.0
    ) -> None:
        """An empty batch.

        Args:
            capacity_tokens: room for the KV of all sequences. If it is full, the sequence that joined last is
                preempted. A single sequence always goes on.
            slack_s: a step does not begin within this time before the time of `advance`.
        """
        self._costs = costs
        self._capacity = capacity_tokens
        self._slack_s = slack_s
        self._instant = slack_s > 0.0 and not (costs.d0 or costs.d1 or costs.d2)
        self.now_s = 0.0
        """The end of the last step."""
        self.busy_s = 0.0
        """Time spent in steps."""
        self._step = 0
        self.context = 0
        """Tokens in the caches of all sequences."""
        self._ends: list[tuple[int, int, str, float]] = []
        self._fresh: list[str] = []
        self.first_tokens: list[tuple[str, float]] = []
        """Sequences that joined without a token and now have their first, with the time. The caller empties the
        list."""
        self.preempted: list[Preempted] = []
        """Sequences that lost their room. The caller empties the list."""

    @property
    def batch(self) -> int:
        return len(self._ends)

    def decoding(self) -> list[tuple[float, int]]:
        """For each sequence: the time when it joined, and its tokens."""
        return [(since_s, end - (step - self._step)) for step, end, _, since_s in self._ends]

    def left(self) -> list[tuple[str, int]]:
        """Every sequence, with the tokens still to generate."""
        return [(request_id, step - self._step) for step, _, request_id, _ in self._ends]

    def add(
        self, request_id: str, tokens: int, more: int, now_s: float, *, fresh: bool = False
    ) -> None:
        """Add a sequence of `tokens` tokens that generates `more` tokens. `advance` must have reached `now_s`. `fresh`:
        its first step gives its first token; see `first_tokens`.
        """
        self.now_s = max(self.now_s, now_s)
        heapq.heappush(self._ends, (self._step + more, tokens + more, request_id, now_s))
        self.context += tokens
        if fresh:
            self._fresh.append(request_id)

    def cancel(self, request_id: str) -> Preempted | None:
        """Take a sequence out. Returns None if it is not here."""
        for n, (step, tokens, name, _) in enumerate(self._ends):
            if name == request_id:
                return self._take(n, step - self._step, tokens)
        return None

    @property
    def next_end_s(self) -> float:
        """The time when the first sequence ends or the room is full, if nothing comes before; infinite without
        sequences."""
        if not self._ends:
            return inf
        steps = self._ends[0][0] - self._step
        if self._capacity < inf:
            steps = min(steps, self._steps_of_room())
        return self.now_s + self._duration_s(steps)

    def advance(self, until_s: float) -> list[tuple[str, float]]:
        """Decode up to the end of the step that is running at `until_s`.

        Returns:
            The sequences that ended, with their end times.
        """
        done: list[tuple[str, float]] = []
        ends, until_s = self._ends, until_s - self._slack_s
        self._make_room()
        while ends and (self.now_s < until_s or self._instant):
            most = 1 if self._fresh else ends[0][0] - self._step
            if self._capacity < inf:
                most = min(most, self._steps_of_room())
            steps = self._steps_within(until_s - self.now_s, most)
            duration_s = self._duration_s(steps)
            self.busy_s += duration_s
            self._pass(steps, self.now_s + duration_s, done)
            self._make_room()
        return done

    def mixed_step(self, end_s: float) -> list[tuple[str, float]]:
        """Run one step that also prefills and ends at `end_s`. Each sequence gets a token."""
        done: list[tuple[str, float]] = []
        self._make_room()
        self._pass(1, end_s, done)
        return done

    def _pass(self, steps: int, end_s: float, done: list[tuple[str, float]]) -> None:
        ends = self._ends
        self.now_s = end_s
        self._step += steps
        self.context += steps * len(ends)
        if self._fresh:
            self.first_tokens += [(name, end_s) for name in self._fresh]
            self._fresh = []
        while ends and ends[0][0] == self._step:
            _, tokens, request_id, _ = heapq.heappop(ends)
            self.context -= tokens
            done.append((request_id, end_s))

    def _steps_of_room(self) -> int:
        """Steps for which there is room; a single sequence always has it."""
        if len(self._ends) == 1:
            return self._ends[0][0] - self._step
        return max(0, int(self._capacity - self.context) // len(self._ends))

    def _make_room(self) -> None:
        """Preempt the sequences that joined last, until there is room for a step."""
        while self._capacity < inf and self._ends and not self._steps_of_room():
            last = max(range(len(self._ends)), key=lambda n: self._ends[n][3])
            step, tokens, _, _ = self._ends[last]
            self.preempted.append(self._take(last, step - self._step, tokens))

    def _take(self, n: int, more: int, end_tokens: int) -> Preempted:
        request_id = self._ends.pop(n)[2]
        heapq.heapify(self._ends)
        if request_id in self._fresh:
            self._fresh.remove(request_id)
        self.context -= end_tokens - more
        return Preempted(request_id, end_tokens - more, more)

    def _duration_s(self, steps: int) -> float:
        model, batch = self._costs, len(self._ends)
        contexts = steps * self.context + batch * steps * (steps - 1) // 2
        return steps * (model.d0 + model.d1 * batch) + model.d2 * contexts

    def _steps_within(self, time_s: float, most: int) -> int:
        """The fewest steps that last `time_s`, at least 1 and at most `most`."""
        if most == 1 or time_s == inf:
            return most
        model, batch = self._costs, len(self._ends)
        grows = model.d2 * batch / 2
        first = model.d0 + model.d1 * batch + model.d2 * self.context - grows
        if grows > 0.0:
            guess = (sqrt(first * first + 4.0 * grows * time_s) - first) / (2.0 * grows)
        else:
            guess = time_s / first if first > 0.0 else most
        steps = min(most, max(1, int(guess)))
        while steps > 1 and self._duration_s(steps - 1) >= time_s:
            steps -= 1
        while steps < most and self._duration_s(steps) < time_s:
            steps += 1
        return steps
