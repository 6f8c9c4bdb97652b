# SPDX-License-Identifier: Apache-2.0
"""A worker's place is never left empty for good."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest
from router_fakes import sockets

from scheduler_plugins.router.settings.config import RouterConfig
from scheduler_plugins.router.workers import supervisor as supervising
from scheduler_plugins.router.workers.supervisor import LONGEST_PAUSE_S, STEADY_S, Supervisor

CONFIG = RouterConfig(prefill=("http://p:1",), decode=("http://d:1",), workers=2)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(supervising, "time", made)
    return made


def test_a_worker_that_cannot_be_started_now_is_started_later(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tried, before = list[float](), sockets()

    def no_process() -> int:
        tried.append(clock.now_s)
        raise BlockingIOError("no process is left")

    monkeypatch.setattr(os, "fork", no_process)
    supervisor = Supervisor(CONFIG, None, tmp_path)
    supervisor.start()
    assert len(tried) == 2
    for _ in range(200):
        clock.now_s += 0.5
        supervisor._look()
    times = sorted({*tried})
    pauses = [later - earlier for earlier, later in pairwise(times)]
    assert pauses[:4] == [0.5, 0.5, 1.0, 2.0], "each pause is twice the one before"
    assert max(pauses) <= LONGEST_PAUSE_S
    supervisor.close()
    assert sockets() <= before


def test_a_worker_that_has_served_is_restarted_at_once(clock: Clock, tmp_path: Path) -> None:
    supervisor = Supervisor(CONFIG, None, tmp_path)
    one = supervisor.workers[0]
    one.begun_s, one.pause_s = clock.now_s, 8.0
    clock.now_s += STEADY_S / 2
    supervisor._plan(one)
    assert one.due_s == clock.now_s + 8.0, "it ended soon: wait"
    clock.now_s += STEADY_S
    supervisor._plan(one)
    assert one.due_s == clock.now_s
    supervisor.close()
