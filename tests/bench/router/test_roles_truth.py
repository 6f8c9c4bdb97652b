# SPDX-License-Identifier: Apache-2.0
"""The simulator is compared with live engines by figures that both sides make in the same way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import NamedTuple

import pytest

from pd_bench.roles import truth, truth_engines
from pd_bench.roles.fleets import OPT_13B
from pd_bench.roles.truth import (
    Figures,
    Plan,
    busy,
    compared,
    plan,
    simulated,
    swapped,
)
from scheduler_plugins.order.request import Waiting

THREE = replace(OPT_13B, engines=3)


class Took(NamedTuple):
    ttft_s: float
    tpot_s: float


def requests(prompt: int, answer: int, count: int = 60) -> list[Waiting]:
    return [
        Waiting(id=f"{n}", tokens=prompt, block_hashes=(), arrival_s=n * 1.0, max_tokens=answer)
        for n in range(count)
    ]


def kept(share: float) -> Figures:
    return Figures(1.0, 0.05, share, 0)


def test_a_request_without_an_answer_is_not_in_time_and_has_no_part_in_means() -> None:
    took = [Took(1.0, 0.05), Took(3.0, 0.05), Took(1.0, 0.2), None]
    found = Figures.of(OPT_13B, took, 2)
    assert found == Figures(pytest.approx(5 / 3), pytest.approx(0.1), 0.25, 2)


def test_policies_are_in_another_order_only_if_both_sides_tell_them_apart() -> None:
    live = {"pressure": kept(0.95), "ratio": kept(0.90), "fixed": kept(0.895)}
    same = {"pressure": kept(0.92), "ratio": kept(0.85), "fixed": kept(0.88)}
    assert swapped(live, same) == [], "half a point is not an order"
    assert swapped(live, {**same, "pressure": kept(0.80)}) == [
        ("pressure", "ratio"),
        ("pressure", "fixed"),
    ]


def test_errors_beyond_the_allowed_ones_miss_their_bars() -> None:
    live = {"fixed": Figures(2.0, 0.050, 0.90, 0)}
    near = compared(live, {"fixed": Figures(2.2, 0.055, 0.92, 0)}, 3.0)
    assert all(row.ok for row in near)
    far = compared(live, {"fixed": Figures(2.4, 0.060, 0.86, 0)}, 3.0)
    assert [row.ok for row in far] == [False, False, False, True]


def test_three_phases_at_a_part_of_what_the_best_ratio_sustains() -> None:
    code, conv = requests(2000, 10, 200), requests(500, 200, 200)
    given = plan(THREE, code, conv, 10.0, 0.5, 1, lambda text: None)
    assert given.prefill == 2
    assert given.per_s[0] == given.per_s[2] != given.per_s[1]
    counts = [round(per_s * 10.0) for per_s in given.per_s]
    assert len(given.requests) == sum(counts)
    assert [one.tokens for one in given.requests] == [
        tokens
        for tokens, count in zip((2000, 500, 2000), counts, strict=True)
        for _ in range(count)
    ]
    assert len({one.id for one in given.requests}) == len(given.requests)


def test_a_simulated_run_counts_moves_and_every_request() -> None:
    given = Plan(requests(1000, 50), 2, (1.0,))
    found = simulated(THREE, given, "fixed")
    assert found.moves == 0
    assert found.kept == 1.0
    assert 0 < found.tpot_s < THREE.tpot_s


def test_engines_are_measured_while_the_others_are_as_busy_as_in_the_run() -> None:
    """Three engines on two cores: one decodes nearly all the time, two compute a prompt now and then."""
    given = Plan(requests(500, 200, 300), 2, (1.0,))
    costs = replace(OPT_13B.costs, a=2e-4, b=0.0, c=0.0, d0=4e-3, d1=0.0, d2=0.0)  # 0.1 s, 0.8 s
    found = busy(replace(THREE, costs=costs), given, "fixed")
    assert found.beside_decode == pytest.approx(0.1, abs=0.03), "two prompt engines, 0.05 each"
    assert found.beside_prefill == pytest.approx(0.85, abs=0.05)


def test_the_others_serve_for_a_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    served_s, enough = list[float](), asyncio.Event()

    class Client:
        async def pool(self) -> list[int]:
            return [1, 2, 3]

        async def complete(self, prompt: list[int], max_tokens: int) -> None:
            begun_s = time.perf_counter()
            await asyncio.sleep(0.02)
            served_s.append(time.perf_counter() - begun_s)
            if len(served_s) == 10:
                enough.set()

    @asynccontextmanager
    async def connect(url: str) -> AsyncIterator[Client]:
        yield Client()

    monkeypatch.setattr(truth_engines, "connect", connect)

    async def scenario() -> float:
        begun_s = time.perf_counter()
        async with truth_engines._serving(["a"], requests(10, 5), 0.25):
            await enough.wait()
        return time.perf_counter() - begun_s

    assert asyncio.run(scenario()) >= 2.5 * sum(served_s), "it rests three times as long"


def test_answers_keep_two_tokens_so_that_each_has_a_time_per_token() -> None:
    (one,) = truth.scaled(requests(10, 3, 1), 4.0, 4.0)
    assert (one.tokens, one.max_tokens) == (2, 2)
