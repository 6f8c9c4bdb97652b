# SPDX-License-Identifier: Apache-2.0
"""The benchmark of what a step takes: both schedulers do the same work in it."""

from __future__ import annotations

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from pd_bench.scheduler.live_overhead import step_times
from scheduler_plugins.vllm.scheduler import PrefixAwareScheduler


@pytest.mark.parametrize("scheduler", [Scheduler, PrefixAwareScheduler])
def test_one_request_starts_in_every_step(scheduler: type, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    schedule = scheduler.schedule

    def noted(self: Scheduler):
        output = schedule(self)
        started.append(len(output.scheduled_new_reqs))
        return output

    monkeypatch.setattr(scheduler, "schedule", noted)
    (times,) = step_times([scheduler], 20, 6)
    assert len(times) == 6
    assert min(one.waited_s for one in times) > 0
    assert min(one.behind_s for one in times) > 0
    assert started == [1] * 6
