# SPDX-License-Identifier: Apache-2.0
"""The durations of SGLang's steps, and the work that they computed."""

from __future__ import annotations

from typing import Any

from scheduler_plugins.cost.model import StepLoad
from scheduler_plugins.cost.online import OnlineFit


def load_of(batch: Any) -> StepLoad:
    """The work of a `ScheduleBatch`. A mixed batch holds decodes as prompts of one new token."""
    if batch.forward_mode.is_extend():
        chunks = zip(batch.prefix_lens, batch.extend_lens, strict=True)
        return StepLoad.of((before, before + new) for before, new in chunks)
    if batch.forward_mode.is_decode():
        return StepLoad(0, 0, len(batch.reqs), int(batch.seq_lens_cpu.sum()))
    return StepLoad(0, 0, 0, 0)


class StepTimer:
    """Measures steps from their launch to their result, and teaches the cost model.

    SGLang may launch a step while the previous step runs. Its time is counted from the end of the previous step, so no
    time is counted twice.
    """

    def __init__(self, fit: OnlineFit) -> None:
        self.fit = fit
        self._ended_s = 0.0

    def ended(self, batch: Any, now_s: float) -> None:
        """Called when the result of a step has been processed. `now_s` is `time.monotonic()`, as `launch_ts` is."""
        begun_s = max(batch.launch_ts or now_s, self._ended_s)
        self.fit.note(load_of(batch), now_s - begun_s)
        self._ended_s = now_s
        self.fit.catch_up()
