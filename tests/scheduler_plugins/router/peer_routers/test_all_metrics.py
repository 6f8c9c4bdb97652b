# SPDX-License-Identifier: Apache-2.0
"""One `/metrics` for all workers: counts are added up, what each has found out is not."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.peer_routers.all_metrics import AllMetrics, note_end
from scheduler_plugins.router.peer_routers.counts import new_table
from scheduler_plugins.router.peer_routers.worker_place import WorkerPlace
from scheduler_plugins.router.recent_history import BEAT_S


def worker(folder: Path, number: int, *, again: bool = False) -> tuple[Metrics, AllMetrics]:
    metrics = Metrics()
    return metrics, AllMetrics(metrics, WorkerPlace("r", folder, number, 2, new_table(2), again))


def write(one: AllMetrics) -> None:
    async def scenario() -> None:
        async with one.writing():
            pass

    asyncio.run(scenario())


def shown(one: AllMetrics, name: str) -> float:
    families = text_string_to_metric_families(one.render().decode())
    return sum(s.value for family in families for s in family.samples if s.name == name)


def test_counts_are_added_up_and_what_each_finds_out_is_shown_once(tmp_path: Path) -> None:
    both = [worker(tmp_path, number) for number in (0, 1)]
    for n, (metrics, _) in enumerate(both, 1):
        metrics.requests.labels("/v1/completions", "ok").inc(n)
        metrics.first_token_s.labels("disaggregated").observe(0.1)
        metrics.engine_up.labels("http://e", "decode").set(1)
        metrics.promise_margin.labels("premium").set(n)
        metrics.in_flight.set(n)
    write(both[0][1])
    write(both[1][1])
    for _, one in both:
        assert shown(one, "pd_router:requests_total") == 3
        assert shown(one, "pd_router:requests_in_flight") == 3
        assert shown(one, "pd_router:time_to_first_token_seconds_count") == 2
        assert shown(one, "pd_router:engine_up") == 1
        assert shown(one, "pd_router:promise_margin") == 2
        assert shown(one, "pd_router:workers") == 2


def test_counters_of_a_worker_that_has_ended_stay_and_its_successor_goes_on(
    tmp_path: Path,
) -> None:
    (ended, its), (_, other) = worker(tmp_path, 0), worker(tmp_path, 1)
    ended.requests.labels("/v1/completions", "ok").inc(5)
    ended.in_flight.set(5)
    write(its)
    write(other)
    note_end(tmp_path, 0)
    assert shown(other, "pd_router:requests_total") == 5
    assert shown(other, "pd_router:requests_in_flight") == 0
    assert shown(other, "pd_router:workers") == 1
    metrics, successor = worker(tmp_path, 0, again=True)
    metrics.requests.labels("/v1/completions", "ok").inc(2)
    write(successor)
    for one in (successor, other):
        assert shown(one, "pd_router:requests_total") == 7
        assert shown(one, "pd_router:worker_restarts_total") == 1


def test_the_live_page_of_a_successor_goes_on(tmp_path: Path) -> None:
    ended, its = worker(tmp_path, 0)
    now_s = time.monotonic()
    ended.pulse.note(now_s - 2 * BEAT_S, "arrived", (10, 1.0, 1.0))
    write(its)
    note_end(tmp_path, 0)
    metrics, _ = worker(tmp_path, 0, again=True)
    assert [beat.arrivals for beat in metrics.pulse.beats(now_s)] == [1]


def test_a_worker_that_ends_leaves_what_it_has_counted_last(tmp_path: Path) -> None:
    (ending, its), (_, other) = worker(tmp_path, 0), worker(tmp_path, 1)

    async def scenario() -> None:
        async with its.writing():
            ending.requests.labels("/v1/completions", "ok").inc(5)

    asyncio.run(scenario())
    note_end(tmp_path, 0)
    assert shown(other, "pd_router:requests_total") == 5
