# SPDX-License-Identifier: Apache-2.0
"""The durations of the engine's steps, and the work that they computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from scheduler_plugins.cost.model import StepLoad
from scheduler_plugins.cost.online import OnlineFit

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


_NOTHING = StepLoad(0, 0, 0, 0)
_Step = tuple["SchedulerOutput", StepLoad, float]
"""A scheduled step, with its work and the time when it was scheduled."""


def load_of(output: SchedulerOutput, requests: Mapping[str, Request]) -> StepLoad:
    """The work of a step. Call this after `schedule`, which has counted the step's tokens as computed.

    A request decodes if its whole prompt was computed before the step. Its first token need not exist yet, because
    async scheduling goes on without it. A request that was preempted after its first token also prefills its generated
    tokens.
    """
    fresh = pairs = batch = context = 0
    for request_id, tokens in output.num_scheduled_tokens.items():
        request = requests[request_id]
        after = request.num_computed_tokens
        before = after - tokens
        if before >= request.num_prompt_tokens:
            batch += 1
            context += after
        else:
            fresh += tokens
            pairs += tokens * (before + after)
    return StepLoad(fresh, pairs, batch, context)


class StepTimer:
    """Measures steps from `schedule` to `update_from_output`, and teaches the cost model.

    With async scheduling, a step is scheduled while the previous step runs. Its time is counted from the end of the
    previous step, so no time is counted twice. With pipeline parallelism, the measured time is the time between the
    ends of two steps, on which the queue's rate depends.
    """

    def __init__(self, fit: OnlineFit) -> None:
        self.fit = fit
        self._open: deque[_Step] = deque()
        self._ended_s = 0.0

    @property
    def under_way_s(self) -> float:
        """Predicted duration of the scheduled steps that have not ended."""
        return sum(self.fit.model.step_s(load) for _, load, _ in self._open)

    @property
    def prefilling_s(self) -> float:
        """Predicted duration of the scheduled steps with prefill that have not ended."""
        return sum(self.fit.model.step_s(load) for _, load, _ in self._open if load.tokens)

    def scheduled(
        self, output: SchedulerOutput, requests: Mapping[str, Request], now_s: float
    ) -> None:
        """Note a scheduled step. `now_s` is `time.monotonic()`."""
        if output.total_num_scheduled_tokens:
            self._open.append((output, load_of(output, requests), now_s))

    def ended(self, output: SchedulerOutput, now_s: float) -> StepLoad:
        """Note a step's result. Returns the step's work. Steps end in the order of their start."""
        load = _NOTHING
        if not output.total_num_scheduled_tokens:
            return load
        while self._open:
            scheduled, load, scheduled_s = self._open.popleft()
            if scheduled is output:
                self.fit.note(load, now_s - max(scheduled_s, self._ended_s))
                break
        self._ended_s = now_s
        return load
