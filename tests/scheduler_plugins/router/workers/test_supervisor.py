# SPDX-License-Identifier: Apache-2.0
"""A worker's place is never left empty for good."""

from __future__ import annotations

import os
import signal
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
from router_fakes import sockets

from scheduler_plugins.router.settings.config import RouterConfig
from scheduler_plugins.router.settings.settings_file import SettingsFile
from scheduler_plugins.router.workers import supervisor as supervising
from scheduler_plugins.router.workers import worker as working
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


def test_a_worker_that_fails_at_its_first_start_ends_the_router_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*given: object) -> None:
        raise RuntimeError("what nobody thought of")

    monkeypatch.setattr(working, "RouterServer", broken)
    supervisor = Supervisor(CONFIG, None, tmp_path)
    supervisor.start()
    until_s = time.monotonic() + 30.0
    while not supervisor.workers[0].reason and time.monotonic() < until_s:
        supervisor._look()
        time.sleep(0.02)
    supervisor.close()
    assert "what nobody thought of" in supervisor.workers[0].reason


def test_a_restarted_worker_has_the_limits_of_the_routers_start(tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    engines = "engines: [{url: 'http://p:1', role: prefill}, {url: 'http://d:1', role: decode}]"
    path.write_text(engines + "\nlimits: {shutdown_timeout_s: 7}")
    settings = SettingsFile(path, {})
    first = settings.current
    path.write_text(engines + "\nlimits: {shutdown_timeout_s: 70, idle_timeout_s: 71}")
    current = working._current(first, settings)
    assert (current.shutdown_timeout_s, current.idle_timeout_s) == (7, 71)


def test_another_interrupt_while_the_router_ends_is_ignored() -> None:
    with supervising._awaited_signals() as ends:
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        assert supervising._signal(ends, 10.0)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
