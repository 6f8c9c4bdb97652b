# SPDX-License-Identifier: Apache-2.0
"""What each policy promises, on engines that are what the test says."""

import tracemalloc
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_engines import FixedView, Known

from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.router.policies.base import Decision, Defer, Reject, Request, Role, Route
from scheduler_plugins.router.policies.conductor import Conductor
from scheduler_plugins.router.policies.kv_cost import KvCostPrefill
from scheduler_plugins.router.policies.length import Length
from scheduler_plugins.router.policies.on_demand import PATIENCE_S, OnDemand
from scheduler_plugins.router.policies.registry import DECODE, PREFILL, create
from scheduler_plugins.router.policies.sides import Sides

REQUEST = Request("r", 160, tuple(range(10)), max_tokens=100)
D = [Known("d0"), Known("d1", open_requests=1, batch=1)]


def prefill_of(policy: str, engines: list[Known], request: Request = REQUEST, **view) -> str | None:
    decision = create(policy).decide(request, FixedView(engines, D, **view), 0.0, Random(0))
    assert isinstance(decision, Route)
    return decision.p


def decode_of(rule: str, engines: list[Known], seed: int = 0) -> str:
    view = FixedView([], engines)
    decision = create("random", rule).decide(REQUEST, view, 0.0, Random(seed))
    assert isinstance(decision, Route)
    return decision.d


engines = st.builds(
    Known,
    name=st.just(""),
    open_requests=st.integers(0, 100),
    queued=st.floats(0, 10),
    queued_tokens=st.integers(0, 10_000),
    prefills=st.integers(0, 8),
    batch=st.integers(0, 64),
    context=st.integers(0, 100_000),
    heavy=st.integers(0, 10),
    free_kv=st.one_of(st.just(inf), st.floats(0, 1000)),
    pull_prefix=st.booleans(),
    has_room=st.booleans(),
    blocks=st.integers(0, 10).map(lambda n: frozenset(range(n))),
)


def named(some: list[Known], letter: str) -> list[Known]:
    return [replace(one, name=f"{letter}{n}") for n, one in enumerate(some)]


@given(
    p=st.lists(engines, max_size=5),
    d=st.lists(engines, min_size=1, max_size=5),
    policy=st.sampled_from([*PREFILL, "length:jsq"]),
    decode=st.sampled_from(["", *DECODE]),
    seed=st.integers(0, 5),
)
def test_a_policy_names_engines_that_it_was_shown_and_equal_events_give_equal_decisions(
    p: list[Known], d: list[Known], policy: str, decode: str, seed: int
) -> None:
    p, d = named(p, "p"), named(d, "d")
    decisions = []
    for _ in range(2):
        view = FixedView(p, d)
        made, random = create(policy, decode), Random(seed)
        decisions.append([made.decide(REQUEST, view, 1.0, random) for _ in range(3)])
    assert decisions[0] == decisions[1]
    for one in decisions[0]:
        if isinstance(one, Route):
            assert one.d in {engine.name for engine in d}
            assert one.p in {None, *(engine.name for engine in p)}
            assert one.pull_from in {None, *(engine.name for engine in p)}
            assert (one.p is None) <= (not p or policy.startswith("length"))
        else:
            assert policy == "on_demand"


def test_an_engine_that_does_all_decodes_what_it_prefills() -> None:
    whole = [Known("b0", Role.WHOLE, queued=5.0), Known("b1", Role.WHOLE)]
    decision = create("least_work").decide(REQUEST, FixedView(whole, whole), 0.0, Random(0))
    assert decision == Route(None, "b1")


@pytest.mark.parametrize("policy", [*PREFILL, "length"])
def test_an_engine_of_both_sides_is_its_own_partner_only_if_there_is_no_other(policy: str) -> None:
    a, b = Known("a", Role.BOTH), Known("b", Role.BOTH)
    p, d = Known("p", queued=9.0, open_requests=9), Known("d", Role.DECODE, batch=9)

    def pairs(prefill: list[Known], decode: list[Known]) -> set[tuple[str | None, str]]:
        made, found = create(policy), set()
        for n in range(30):
            request = REQUEST._replace(id=f"{n}", hashes=(n, *range(9)))
            decision = made.decide(request, FixedView(prefill, decode), 0.0, Random(n))
            assert isinstance(decision, Route)
            found.add((decision.p, decision.d))
        return found

    assert pairs([a, b], [a, b]) <= {("a", "b"), ("b", "a")}
    assert pairs([p, a], [a]) == {("p", "a")}, "a busy partner is better than none"
    assert pairs([a], [a, d]) == {("a", "d")}
    assert pairs([a], [a]) == {(None, "a")}


def test_jsq_counts_requests_and_least_work_seconds() -> None:
    few = Known("few", open_requests=1, queued=9.0)
    many = Known("many", open_requests=5, queued=1.0)
    assert prefill_of("jsq", [many, few]) == "few"
    assert prefill_of("least_work", [few, many]) == "many"


def test_cache_aware_follows_the_cache_until_load_is_out_of_balance() -> None:
    warm = Known("warm", open_requests=60, blocks=frozenset(range(8)))
    idle = Known("idle")
    assert prefill_of("cache_aware", [idle, warm]) == "warm"
    assert prefill_of("cache_aware", [idle, replace(warm, open_requests=70)]) == "idle"
    little = replace(warm, blocks=frozenset(range(2)))
    assert prefill_of("cache_aware", [idle, little]) == "idle", "2 of 10 blocks are below 0.3"


def test_kv_cost_weighs_what_is_cached_against_what_is_queued() -> None:
    warm = Known("warm", queued_tokens=100, blocks=frozenset(range(8)))
    idle = Known("idle")
    assert prefill_of("kv_cost", [idle, warm]) == "idle" if 100 + 32 > 160 else "warm"
    assert prefill_of("kv_cost", [idle, replace(warm, queued_tokens=200)]) == "idle"
    drawn = Counter[str]()
    rule, random = KvCostPrefill(temperature=1.0), Random(1)
    for _ in range(200):
        drawn[rule.choose(REQUEST, [idle, warm], FixedView(), 0.0, random).engine.name] += 1
    assert drawn["warm"] > drawn["idle"] > 20, "the dearer engine is drawn too, less often"


def test_the_conductor_takes_the_smallest_ttft() -> None:
    warm = Known("warm", queued=0.05, blocks=frozenset(range(8)))
    idle = Known("idle")
    assert prefill_of("conductor", [idle, warm]) == "warm", "0.05 + 0.032 s against 0.160 s"
    assert prefill_of("conductor", [idle, replace(warm, queued=0.2)]) == "idle"


def test_a_prefix_is_pulled_where_that_is_sooner_and_the_engine_can() -> None:
    warm = Known("warm", queued=5.0, blocks=frozenset(range(8)))
    idle = Known("idle")
    able = replace(idle, pull_prefix=True)

    def decide(engine: Known, transfer_s: float) -> Route:
        view = FixedView([engine, warm], D, transfer_s=transfer_s)
        found = create("conductor").decide(REQUEST, view, 0.0, Random(0))
        assert isinstance(found, Route)
        return found

    assert decide(able, 0.01) == Route("idle", "d0", "warm")
    assert decide(able, 1.0).pull_from is None, "computing is sooner"
    assert decide(idle, 0.01).pull_from is None, "it cannot"
    near = replace(able, blocks=frozenset(range(5)))
    assert decide(near, 0.01).pull_from is None, "5 blocks are near enough to 8"


def test_a_prefix_is_fetched_from_a_pool_by_any_engine_if_that_is_sooner_than_from_another() -> (
    None
):
    idle, pool = Known("idle"), Known("pool", blocks=frozenset(range(9)))

    def decide(
        *engines: Known, transfer_s: float = 0.01, pools: list[Known] | None = None
    ) -> Route:
        view = FixedView(
            engines, D, transfer_s=transfer_s, pools=[pool] if pools is None else pools
        )
        found = create("conductor").decide(REQUEST, view, 0.0, Random(0))
        assert isinstance(found, Route)
        return found

    assert decide(idle) == Route("idle", "d0", "pool")
    assert decide(idle, transfer_s=1.0).pull_from is None, "computing is sooner"
    assert decide(idle, pools=[]).pull_from is None
    assert decide(replace(idle, blocks=frozenset(range(5)))).pull_from is None, "near enough to 9"
    able = replace(idle, pull_prefix=True)
    warm = Known("warm", queued=5.0, blocks=frozenset(range(10)))
    assert decide(able, warm).pull_from == "warm", "it has a block more than the pool"
    assert decide(idle, warm).pull_from == "pool", "only a pool gives to every engine"


def test_matches_in_blocks_of_unlike_sizes_are_compared_in_tokens() -> None:
    pool = Known("pool", block_tokens=128, blocks=frozenset(range(1)))
    engine = Known("p", blocks=frozenset(range(2)))
    request = REQUEST._replace(tokens=256)
    view = FixedView([engine], D, transfer_s=0.01, pools=[pool])
    found = create("conductor").decide(request, view, 0.0, Random(0))
    assert isinstance(found, Route)
    assert found.pull_from == "pool", "2 blocks are 32 tokens, a chunk is 128"


def test_a_promise_that_cannot_be_kept_is_told_at_once() -> None:
    promised = REQUEST._replace(ttft_slo_s=0.1)
    decision = create("conductor").decide(promised, FixedView([Known("p")], D), 0.0, Random(0))
    assert decision == Reject("ttft", pytest.approx(0.06))
    slow = REQUEST._replace(tpot_slo_s=0.011)
    view = FixedView([Known("p")], [Known("d", batch=10)])
    decision = create("conductor").decide(slow, view, 0.0, Random(0))
    assert isinstance(decision, Reject)
    assert decision.cause == "tpot"
    assert isinstance(create("random").decide(promised, view, 0.0, Random(0)), Route)


@pytest.mark.parametrize("policy", ["conductor", "conductor_2x", "least_delay"])
def test_nobody_is_turned_away_whose_promise_another_engine_keeps(policy: str) -> None:
    """Policies that mind others do not always take the engine with the smallest time."""
    warm = Known("warm", queued=0.15, blocks=frozenset(range(8)))
    promised = REQUEST._replace(ttft_slo_s=0.17)
    decision = create(policy).decide(promised, FixedView([warm, Known("idle")], D), 0.0, Random(0))
    assert decision == Route("idle", "d0"), "0.160 s there, 0.182 s where it is cached"


def test_on_demand_asks_the_idlest_first_then_waits_then_gives_up() -> None:
    idle, busy = Known("idle", open_requests=1), Known("busy", open_requests=2)
    assert prefill_of("on_demand", [busy, idle]) == "idle"
    assert prefill_of("on_demand", [busy, replace(idle, prefills=4)]) == "busy"
    assert prefill_of("on_demand", [busy, replace(idle, has_room=False)]) == "busy"
    full = FixedView([replace(idle, prefills=4)], D)
    policy = Sides(OnDemand(), DECODE["least_tpot"]())
    assert policy.decide(REQUEST, full, 1.0, Random(0)) == Defer(pytest.approx(1.05))
    late = policy.decide(REQUEST, full, PATIENCE_S, Random(0))
    assert isinstance(late, Reject)
    assert late.cause == "deadline"
    own = policy.decide(REQUEST._replace(deadline_s=0.5), full, 0.5, Random(0))
    assert isinstance(own, Reject)


@given(st.integers(2, 8), st.data())
def test_prefix_hash_moves_only_the_prompts_of_the_engine_that_left(
    count: int, data: st.DataObject
) -> None:
    some = [Known(f"p{n}") for n in range(count)]
    gone = data.draw(st.integers(0, count - 1))
    left = some[:gone] + some[gone + 1 :]
    for n in range(20):
        request = REQUEST._replace(hashes=(0, f"conversation {n}", n))
        before, after = (prefill_of("prefix_hash", which, request) for which in (some, left))
        assert before == after or before == f"p{gone}"
        alike = request._replace(id="other", hashes=(*request.hashes[:2], "more"))
        assert prefill_of("prefix_hash", some, alike) == before


def test_prefix_hash_bounds_the_load() -> None:
    counts = Counter[str]()
    for _ in range(100):  # all want the same engine
        some = [Known(f"p{n}", open_requests=counts[f"p{n}"]) for n in range(4)]
        counts[str(prefill_of("prefix_hash", some))] += 1
    assert max(counts.values()) <= 1.25 * 100 / 4 + 1
    assert len(counts) == 4


def test_a_session_stays_and_moves_only_when_its_engine_is_gone() -> None:
    policy = create("session")

    def ask(session: str, some: list[Known]) -> str | None:
        request = REQUEST._replace(session=session)
        decision = policy.decide(request, FixedView(some, D), 0.0, Random(0))
        assert isinstance(decision, Route)
        return decision.p

    a, b = Known("a"), Known("b", queued=1.0)
    assert ask("one", [a, b]) == "a"
    assert ask("one", [replace(a, queued=9.0), b]) == "a"
    assert ask("two", [replace(a, queued=9.0), b]) == "b"
    assert ask("", [replace(a, queued=9.0), b]) == "b"
    assert ask("one", [b]) == "b"
    assert ask("one", [a, b]) == "b"


def test_least_tpot_looks_at_batch_and_context_and_leaves_full_engines_out() -> None:
    a, b = Known("a", batch=2, context=1000), Known("b", batch=2, context=500)
    assert decode_of("least_tpot", [a, b]) == "b"
    assert decode_of("least_tpot", [a, replace(b, free_kv=100)]) == "a"


def test_an_engine_that_computes_its_prompt_itself_is_chosen_by_what_is_cached_or_stored() -> None:
    blocks = frozenset(range(10))
    a, b = Known("a", blocks=blocks), Known("b")
    request = Request("r", 160, tuple(range(10)), max_tokens=4)

    def route(decode: Sequence[Known], prefill: Sequence[Known] = (), **pooled: Any) -> Decision:
        view = FixedView(prefill, decode, **pooled)
        return create("least_delay").decide(request, view, 0.0, Random(0))

    assert route([b, a]) == Route(None, "a")
    assert route([b, replace(a, batch=40)]) == Route(None, "b"), "a full batch waits for it"
    assert route([b, replace(a, context=9)], [Known("p")]) == Route("p", "b"), "p computes it"
    store = Known("pool", blocks=blocks)
    for pools, source in (([], None), ([store], "pool")):
        assert route([b], transfer_s=0.01, pools=pools) == Route(None, "b", source)
    assert route([b], transfer_s=9.0, pools=[store]) == Route(None, "b")


def test_power_of_two_takes_the_one_with_fewer_heavy_decodes_of_those_with_room() -> None:
    heavy, light = Known("heavy", heavy=3), Known("light", heavy=1)
    full = Known("full", free_kv=200)  # 160 + 100 tokens do not fit
    assert {decode_of("power_of_two", [heavy, light, full], seed) for seed in range(20)} == {
        "light"
    }


def test_length_sends_very_long_prompts_that_nobody_waits_for_to_cpus() -> None:
    policy = Length(create("conductor"), min_uncached=100, max_uncached=1000)
    p, cpu = Known("p", blocks=frozenset(range(100))), Known("cpu", Role.CPU_PREFILL)
    view = FixedView([p], D, [cpu])
    long = Request("l", 3200, tuple(range(200)), interactive=False)
    assert policy.decide(long, view, 0.0, Random(0)) == Route("cpu", "d0")
    waited_for = long._replace(interactive=True)
    assert policy.decide(waited_for, view, 0.0, Random(0)) == Route("p", "d0")
    cached = long._replace(tokens=1700)
    assert policy.decide(cached, view, 0.0, Random(0)) == Route("p", "d0"), "100 tokens are fresh"
    short = Request("s", 90)
    assert policy.decide(short, view, 0.0, Random(0)) == Route(None, "d0")


def test_minding_those_that_come_after_prefers_the_cache() -> None:
    warm = Known("warm", queued=0.15, blocks=frozenset(range(8)))
    view, random = FixedView(), Random(0)
    chosen = [
        Conductor(own_weight=weight).choose(REQUEST, [Known("idle"), warm], view, 0.0, random)
        for weight in (1.0, 2.0)
    ]
    assert [one.engine.name for one in chosen] == ["idle", "warm"]


@pytest.mark.parametrize(("tokens", "chosen"), [(19_000, "p"), (21_000, "c")])
def test_length_computes_from_costs_which_prompts_are_long(tokens: int, chosen: str) -> None:
    """An engine of 10,000 tokens a second is held up for 2 s by 20,000 tokens. Without costs the bound is 32,768."""
    known, unknown = (
        FixedView(
            [Known("p", Role.PREFILL, costs=costs)],
            [Known("d", Role.DECODE)],
            [Known("c", Role.CPU_PREFILL)],
        )
        for costs in (CostModel(a=1e-4), CostModel.token_count())
    )
    asked = Request("r", tokens, interactive=False)
    policy = Length(create("conductor"))
    assert policy.decide(asked, known, 0.0, Random(0)) == Route(chosen, "d")
    assert policy.decide(asked, unknown, 0.0, Random(0)) == Route("p", "d")


def test_the_length_of_a_sessions_name_costs_no_memory() -> None:
    """Clients choose it: it may be as long as a body."""
    policy, engines = create("session"), [Known("a"), Known("b")]
    tracemalloc.start()
    try:
        for n in range(30):
            request = REQUEST._replace(session=f"{n}{'x' * 1_000_000}")
            policy.decide(request, FixedView(engines, D), 0.0, Random(0))
        assert tracemalloc.get_traced_memory()[0] < 5_000_000
    finally:
        tracemalloc.stop()
