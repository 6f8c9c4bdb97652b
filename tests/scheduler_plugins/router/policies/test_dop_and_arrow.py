# SPDX-License-Identifier: Apache-2.0
"""Route policies that choose on both sides at once: `dop` and `arrow`; and `length` with promises."""

from __future__ import annotations

from itertools import combinations_with_replacement
from math import isclose
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_engines import FixedView, Known

from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.router.policies.base import Defer, Reject, Request, Role, Route
from scheduler_plugins.router.policies.dop import AHEAD, Dop, divide
from scheduler_plugins.router.policies.registry import BOTH_SIDES, create

FAST = CostModel(a=0.25e-3, d0=0.01, d1=1e-3, d2=1e-6)
SLOW = CostModel(a=1e-3, d0=0.01, d1=1e-3, d2=1e-6)


def weighed(chosen, costs_s, queued_s, weights) -> float:  # type: ignore[no-untyped-def]
    total = 0.0
    for engine, own_s in enumerate(costs_s):
        run = [n for n, its in enumerate(chosen) if its == engine]
        time_s = queued_s[engine] + sum(own_s[n] for n in run)
        total += time_s * sum(weights[n] for n in run)
    return total


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.randoms(use_true_random=False))
def test_the_division_is_as_good_as_every_division_tried(
    requests: int, engines: int, random: Random
) -> None:
    costs_s = [[random.uniform(0, 5) for _ in range(requests)] for _ in range(engines)]
    queued_s = [random.choice([0.0, random.uniform(0, 5)]) for _ in range(engines)]
    weights = [random.uniform(0.01, 2) for _ in range(requests)]
    chosen = divide(costs_s, queued_s, weights)
    assert chosen == sorted(chosen)  # neighbours stay together
    best = min(
        weighed(every, costs_s, queued_s, weights)
        for every in combinations_with_replacement(range(engines), requests)
    )
    assert isclose(weighed(chosen, costs_s, queued_s, weights), best, abs_tol=1e-9)


def prompts(view: FixedView, policy: Dop, *lengths: int) -> list[Route | Reject | Defer]:
    return [
        policy.decide(Request(str(n), tokens), view, 0.0, Random(0))
        for n, tokens in enumerate(lengths)
    ]


def test_a_long_prompt_goes_to_the_engine_with_more_gpus() -> None:
    view = FixedView(
        [Known("tp4", costs=FAST), Known("tp1", costs=SLOW)], [Known("d", Role.DECODE)]
    )
    (decision,) = prompts(view, Dop(), 8000)
    assert decision == Route("tp4", "d")


def test_a_short_prompt_does_not_wait_behind_the_long_one() -> None:
    fast = Known("tp4", costs=FAST, queued=2.0, prefills=1)
    view = FixedView([fast, Known("tp1", costs=SLOW)], [Known("d", Role.DECODE)])
    (decision,) = prompts(view, Dop(), 100)
    assert decision == Route("tp1", "d")


def test_prompts_wait_in_the_router_until_their_engine_has_room() -> None:
    full = Known("p", costs=SLOW, queued=1.0, prefills=AHEAD)
    view, policy = FixedView([full], [Known("d", Role.DECODE)]), Dop()
    assert isinstance(prompts(view, policy, 100)[0], Defer)
    full.prefills = AHEAD - 1
    assert prompts(view, policy, 100)[0] == Route("p", "d")


def test_a_prompt_that_can_only_be_late_is_refused() -> None:
    view = FixedView([Known("p", costs=SLOW, queued=9.0)], [Known("d", Role.DECODE)])
    found = Dop().decide(Request("r", 100, ttft_slo_s=1.0), view, 0.0, Random(0))
    assert isinstance(found, Reject)
    assert found.cause == "ttft"


def test_decode_fills_the_fullest_engine_that_keeps_the_promise() -> None:
    engines = [
        Known("empty", Role.DECODE),
        Known("half", Role.DECODE, batch=20, context=20_000),
        Known("slow", Role.DECODE, batch=90, context=90_000),
        Known("full", Role.DECODE, batch=30, context=30_000, free_kv=50),
    ]
    view = FixedView([Known("p")], engines)
    (decision,) = prompts(view, Dop(), 100)
    assert decision == Route("p", "half")


def test_arrow_lets_an_idle_decode_engine_compute_a_late_prompt() -> None:
    late = Known("p", costs=SLOW, queued=9.0)
    request = Request("r", 400, ttft_slo_s=1.0, tpot_slo_s=0.1)
    idle, busy = Known("idle", Role.DECODE), Known("busy", Role.DECODE, batch=9, context=9000)
    assert create("arrow").decide(
        request, FixedView([late], [busy, idle]), 0.0, Random(0)
    ) == Route(None, "idle")
    # A prompt of 0.4 s in one step would stretch nine sequences' tokens beyond 0.1 s.
    refused = create("arrow").decide(request, FixedView([late], [busy]), 0.0, Random(0))
    assert isinstance(refused, Reject)


@pytest.mark.parametrize("name", BOTH_SIDES)
def test_without_prefill_engines_decode_engines_serve_alone(name: str) -> None:
    view = FixedView([], [Known("d", Role.DECODE)])
    assert create(name).decide(Request("r", 100), view, 0.0, Random(0)) == Route(None, "d")


@pytest.mark.parametrize("name", BOTH_SIDES)
def test_a_decode_rule_can_be_named(name: str) -> None:
    view = FixedView([Known("p")], [Known("a", Role.DECODE, batch=9), Known("b", Role.DECODE)])
    assert create(name, "jsq").decide(Request("r", 100), view, 0.0, Random(0)) in (
        Route("p", "a"),
        Route("p", "b"),
    )


def test_an_engine_without_a_gpu_takes_what_all_others_would_be_late_with() -> None:
    late, cpu = Known("p", costs=SLOW, queued=9.0), Known("cpu", costs=SLOW, queued=0.3)
    view = FixedView([late], [Known("d", Role.DECODE)], [cpu])
    request = Request("r", 400, ttft_slo_s=1.0)
    policy = create("length:conductor")
    assert policy.decide(request, view, 0.0, Random(0)) == Route("cpu", "d")
    cpu.queued = 0.9  # 1.3 s with the prompt
    assert isinstance(policy.decide(request, view, 0.0, Random(0)), Reject)
    late.queued = 0.1  # a prefill engine keeps the promise
    assert policy.decide(request, view, 0.0, Random(0)) == Route("p", "d")
