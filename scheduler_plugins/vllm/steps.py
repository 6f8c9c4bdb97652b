# SPDX-License-Identifier: Apache-2.0
"""How long the engine's steps take, and what they computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from scheduler_plugins.cost.model import StepLoad
from scheduler_plugins.cost.online import OnlineFit

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class _Step(NamedTuple):
    output: SchedulerOutput
    load: StepLoad
    scheduled_s: float


def load_of(output: SchedulerOutput, requests: Mapping[str, Request]) -> StepLoad:
    """What a step computes. Call after `schedule`, which has counted its tokens as computed.

    A request decodes when all of its prompt was computed before the step; one that was preempted
    after its first token prefills what it had generated as well.
    """
    chunks, contexts = [], []
    for request_id, tokens in output.num_scheduled_tokens.items():
        request = requests[request_id]
        after = request.num_computed_tokens
        before = after - tokens
        if before >= request.num_prompt_tokens and request.num_output_tokens:
            contexts.append(after)
        else:
            chunks.append((before, after))
    return StepLoad.of(chunks, contexts)


class StepTimer:
    """Times steps from `schedule` to `update_from_output`, and teaches the cost model.

    With async scheduling a step is scheduled while the one before it runs. It begins when that one
    has ended, so that the time of two steps together is counted once; with pipeline parallelism
    what is measured is the time between two steps' ends, which is what the queue's rate depends on.
    """

    def __init__(self, fit: OnlineFit) -> None:
        self.fit = fit
        self._open: deque[_Step] = deque()
        self._ended_s = 0.0

    @property
    def under_way_s(self) -> float:
        """Predicted duration of the steps that were scheduled and have not ended."""
        return sum(self.fit.model.step_s(step.load) for step in self._open)

    @property
    def prefilling_s(self) -> float:
        """The same of those that prefill."""
        return sum(self.fit.model.step_s(step.load) for step in self._open if step.load.tokens)

    def scheduled(
        self, output: SchedulerOutput, requests: Mapping[str, Request], now_s: float
    ) -> None:
        """A step was put together, by a monotonic clock."""
        if output.total_num_scheduled_tokens:
            self._open.append(_Step(output, load_of(output, requests), now_s))

    def ended(self, output: SchedulerOutput, now_s: float) -> None:
        """Its result is there. Steps end in the order in which they were scheduled."""
        if not output.total_num_scheduled_tokens:
            return
        while self._open:
            step = self._open.popleft()
            if step.output is output:
                self.fit.observe(step.load, now_s - max(step.scheduled_s, self._ended_s))
                break
        self._ended_s = now_s
