# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the queue, small: what it reports, and that its figures can fail."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from pd_bench.scheduler import app as command
from pd_bench.scheduler import classes, order, overhead
from pd_bench.scheduler.order import Workload
from pd_bench.scheduler.plot import svg
from pd_bench.scheduler.replay import Setup
from pd_bench.scheduler.workload import merged

SMALL = Workload(users=8, posts=12, cached_profiles=5)


def test_ours_beats_first_come_first_served_when_the_engine_is_nearly_full() -> None:
    ours = SMALL.run(SMALL.setup("srjf_calibrated"), 1.0, 1)
    fcfs = SMALL.run(SMALL.setup("fcfs"), 1.0, 1)
    assert ours.mean_s < fcfs.mean_s
    assert ours.hit >= fcfs.hit


def test_every_policy_is_compared_at_every_load() -> None:
    found = order.compare(SMALL, range(2))
    assert len(found) == 3 * len(order.LOADS) * len(order.BASELINES)
    judged = Counter(one.name for one in found if one.bar is not None)
    assert judged == {"mean": 2, "p99": 3, "prefix hit": 3}


def test_the_sweep_is_drawn_as_a_document_with_a_line_for_each_load() -> None:
    points = order.sweep(SMALL, range(1))
    assert len(points) == len(order.LOADS) * len(order.LAMBDAS)
    drawn = ElementTree.fromstring(svg(points))
    lines = drawn.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 2 * len(order.LOADS)


def overload(duration_s: float) -> list:  # type: ignore[type-arg]
    return merged(
        *(classes.stream(one.name, 1.5, duration_s, n) for n, one in enumerate(classes.CLASSES))
    )


def test_shares_are_kept_when_all_classes_overload_the_engine() -> None:
    setup = Setup(classes=classes.CLASSES, cache_tokens=classes.CACHE_TOKENS)
    assert classes.share_error(setup, overload(100.0), 100.0) <= classes.SHARE_POINTS


def test_first_come_first_served_keeps_no_shares() -> None:
    setup = Setup("fcfs", cache_tokens=classes.CACHE_TOKENS)
    assert classes.share_error(setup, overload(100.0), 100.0) > 3 * classes.SHARE_POINTS


@pytest.mark.parametrize("policy", ["fcfs", "srjf_calibrated"])
def test_a_step_is_timed_once_for_each_request_that_comes(policy: str) -> None:
    times = overhead.step_times(waiting=60, steps=40, policy=policy)
    assert len(times) == 40
    assert min(times) > 0


def test_the_command_writes_what_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command.order, "Workload", lambda cached_profiles: SMALL)
    monkeypatch.setattr(command.classes, "compare", lambda seeds, duration_s: [])
    monkeypatch.setattr(command.overload, "compare", lambda seeds, duration_s: [])
    monkeypatch.setattr(command.overhead, "compare", list)
    picture, figures = tmp_path / "sweep.svg", tmp_path / "figures.json"
    ran = CliRunner().invoke(
        command.app, ["queue", "--seeds", "1", "--svg", str(picture), "--json", str(figures)]
    )
    assert ran.exit_code in (0, 1), ran.output
    assert ("missed" in ran.output) == (ran.exit_code == 1)
    assert picture.read_text().startswith("<svg")
    assert '"against": "fcfs"' in figures.read_text()
