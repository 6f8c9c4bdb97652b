# SPDX-License-Identifier: Apache-2.0
"""Workers see each other's load at once."""

from __future__ import annotations

import os
import signal
import time

import pytest

from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.others import Count
from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.peer_routers import counts
from scheduler_plugins.router.peer_routers.counts import SenderCounts, clear_row, new_table
from scheduler_plugins.router.policies.base import Role

METRICS = Metrics()


def engines(*names: str) -> list[BackendEngine]:
    return [BackendEngine(f"http://{name}", Role.PREFILL, METRICS) for name in names]


def test_what_one_worker_sends_the_other_sees_at_once() -> None:
    table = new_table(2)
    (a, b), (y, x) = engines("a", "b"), engines("b", "a")  # in another order
    one, other = SenderCounts(table, 0), SenderCounts(table, 1)
    one.follow([a, b])
    other.follow([y, x])
    one.follow([a, b])  # it looks for others from time to time
    a.load.prefill_sent("1", 100, 2.0, 10.0)
    a.load.decode_sent("1", 300, 1000)
    a.load.opened(1)
    assert (x.prefills, x.queued_tokens, x.batch, x.context) == (1, 100, 1, 300)
    assert (x.heavy, x.open_requests, x.in_flight) == (1, 2, 1)
    assert (x.load.own_open, y.open_requests) == (0, 0)
    assert x.queued_s(10.5) == pytest.approx(1.5)
    x.load.prefill_sent("2", 50, 1.0, 11.0)
    assert a.queued_s(11.0) == x.queued_s(11.0) == pytest.approx(2.0), "one queue, not two"
    a.load.prefill_ended("1", 12.0)
    a.load.decode_ended("1")
    a.load.opened(-1)
    assert a.queued_s(12.5) == x.queued_s(12.5) == pytest.approx(0.5)
    x.load.prefill_ended("2", 13.0)
    assert (a.open_requests, x.open_requests, a.in_flight) == (0, 0, 0)


def test_two_workers_that_share_nothing_see_half_of_the_work() -> None:
    (a,), (x,) = engines("a"), engines("a")
    SenderCounts(None).follow([a])
    SenderCounts(None).follow([x])
    a.load.prefill_sent("1", 100, 2.0, 10.0)
    assert x.queued_s(10.0) == 0.0


def test_counts_of_a_worker_that_died_are_gone_and_its_successor_is_found() -> None:
    table = new_table(2)
    (a,), (x,) = engines("a"), engines("a")
    one, other = SenderCounts(table, 0), SenderCounts(table, 1)
    one.follow([a])
    other.follow([x])
    a.load.prefill_sent("1", 100, 2.0, 10.0)
    assert x.prefills == 1
    clear_row(table, 0)
    assert (x.prefills, x.queued_s(10.0)) == (0, 0.0), "before it looks again"
    other.follow([x])
    z, again = engines("z", "a")
    successor = SenderCounts(table, 0)
    successor.follow([z, again])
    other.follow([x])
    again.load.prefill_sent("2", 7, 1.0, 11.0)
    assert x.queued_tokens == 7


def test_an_engine_that_leaves_and_comes_back_has_the_load_that_others_send_it() -> None:
    table = new_table(2)
    (a, b), (x,) = engines("a", "b"), engines("a")
    one, other = SenderCounts(table, 0), SenderCounts(table, 1)
    one.follow([a, b])
    other.follow([x])
    a.load.decode_sent("1", 30, 5)
    assert x.context == 30
    one.follow([b])
    (c,) = engines("c")
    one.follow([b, c])
    c.load.decode_sent("2", 99, 5)
    other.follow([x])
    assert x.context == 0, "its place in the table is another engine's now"
    (back,) = engines("a")
    one.follow([b, c, back])
    back.load.decode_sent("3", 8, 5)
    other.follow([x])
    assert x.context == 8


def test_more_engines_than_places_are_counted_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(counts, "MOST_ENGINES", 1)
    table = new_table(2)
    ours, theirs = engines("a", "b"), engines("a", "b")
    SenderCounts(table, 0).follow(ours)
    SenderCounts(table, 1).follow(theirs)
    assert "more than 1 engines" in caplog.text
    for one in ours:
        one.load.decode_sent("1", 30, 5)
    assert sorted(one.context for one in theirs) == [0, 30]


def test_no_worker_sees_half_of_a_change_of_another() -> None:
    table = new_table(2)
    (a,), (x,) = engines("a"), engines("a")
    one, other = SenderCounts(table, 0), SenderCounts(table, 1)
    one.follow([a])
    other.follow([x])
    sent = [(1.0,) * len(Count), (1.0 + 2.0**-30,) * len(Count)]
    one.of(a).tell(sent[0])
    if not (writer := os.fork()):
        while True:
            for counts_of_a in sent:
                one.of(a).tell(counts_of_a)
    try:
        seen, begun_s = set[float](), time.monotonic()
        while (took_s := time.monotonic() - begun_s) < 0.5 or (len(seen) < 2 and took_s < 60):
            seen |= {other.of(x).of_workers(count) for count in Count}
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
    assert seen == {counts_of_a[0] for counts_of_a in sent}
