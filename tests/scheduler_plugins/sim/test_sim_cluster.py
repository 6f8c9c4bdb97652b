# SPDX-License-Identifier: Apache-2.0
"""The cluster against formulas; nothing is lost whatever happens."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_bench.scheduler.workload import conversations, lengths, poisson
from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.policies.registry import PREFILL, create
from scheduler_plugins.sim.cluster import Change, Cluster
from scheduler_plugins.sim.kv_pool import KvPool, PoolSettings
from scheduler_plugins.sim.links import Network
from scheduler_plugins.sim.node import Node, NodeSettings
from scheduler_plugins.sim.served import Served
from scheduler_plugins.sim.simulate import Scenario, simulate

ROLES = [Role.PREFILL, Role.DECODE, Role.BOTH, Role.WHOLE]
TRUTH = CostModel(a=1e-3, c=0.1, d0=0.01, d1=1e-3, d2=1e-6)
SLOW = Network(bytes_per_s=1e6, latency_s=0.005, kv_bytes_per_token=1000, layers=4, overlap=False)


def one(name: str, tokens: int, at_s: float = 0.0, more: int = 1) -> Waiting:
    return Waiting(
        id=name,
        tokens=tokens,
        block_hashes=tuple((name, n) for n in range(tokens // 16)),
        arrival_s=at_s,
        max_tokens=more,
    )


def cluster(
    prefill: int = 1,
    decode: int = 1,
    *,
    policy: str = "conductor",
    network: Network = SLOW,
    pool: KvPool | None = None,
    **more,
) -> Cluster:
    settings = NodeSettings(**{"truth": TRUTH, "block_tokens": 16, "order": "fcfs", **more})
    nodes = [Node(f"p{n}", Role.PREFILL, settings) for n in range(prefill)]
    nodes += [Node(f"d{n}", Role.DECODE, settings) for n in range(decode)]
    return Cluster(nodes, create(policy), network=network, pools=[pool] if pool else [])


def test_one_request_takes_prefill_transfer_and_steps() -> None:
    (served,) = cluster().run([one("a", 100, more=3)])
    assert served.prefilled_s == pytest.approx(0.2)
    assert served.first_token_s == pytest.approx(0.2 + 0.105 + TRUTH.decode_step_s(1, 100))
    steps_s = TRUTH.decode_step_s(1, 101) + TRUTH.decode_step_s(1, 102)
    assert served.end_s == pytest.approx(served.first_token_s + steps_s)
    assert (served.p, served.d) == ("p0", "d0")


def test_with_overlap_only_what_the_prefill_does_not_cover_is_waited_for() -> None:
    hidden = cluster(network=replace(SLOW, overlap=True)).run([one("a", 100)])[0]
    decode_s = TRUTH.decode_step_s(1, 100)
    assert hidden.ttft_s == pytest.approx(0.2 + 0.025 + 0.005 + decode_s), "the last of 4 layers"
    slow = replace(SLOW, overlap=True, bytes_per_s=2e5)
    seen = cluster(network=slow).run([one("a", 100)])[0]
    assert seen.ttft_s == pytest.approx(0.2 + (0.5 - 0.2) + 0.005 + decode_s)


def test_engines_of_both_sides_hand_over_to_each_other_and_never_to_themselves() -> None:
    settings = NodeSettings(truth=TRUTH, block_tokens=16, order="fcfs")
    nodes = [Node(f"e{n}", Role.BOTH, settings) for n in range(3)]
    made = Cluster(nodes, create("least_work"), network=SLOW)
    served = made.run([one(f"r{n}", 100, at_s=0.1 * n, more=20) for n in range(30)])
    assert all(each.p != each.d for each in served)
    assert {each.p for each in served} == {each.d for each in served} == {"e0", "e1", "e2"}
    assert made.links.moved_bytes == 30 * 100 * 1000
    alone = Cluster([Node("e0", Role.BOTH, settings)], create("least_work"), network=SLOW)
    (only,) = alone.run([one("a", 100, more=2)])
    assert (only.p, only.d) == (None, "e0")


def test_an_engine_that_does_all_needs_no_link() -> None:
    node = Node("b0", Role.WHOLE, NodeSettings(truth=TRUTH, block_tokens=16, order="fcfs"))
    (served,) = Cluster([node], create("conductor"), network=SLOW).run([one("a", 100, more=2)])
    assert served.first_token_s == pytest.approx(0.2)
    assert served.end_s == pytest.approx(0.2 + TRUTH.decode_step_s(1, 100))
    assert (served.p, served.d) == (None, "b0")


def test_a_prompt_that_comes_in_the_last_step_of_all_others_waits_for_its_end() -> None:
    node = Node("b0", Role.WHOLE, NodeSettings(truth=TRUTH, block_tokens=16, order="fcfs"))
    requests = [one("a", 100, more=2), one("b", 100, 0.201)]
    served = Cluster([node], create("conductor")).run(requests)
    assert served[1].start_s == pytest.approx(served[0].end_s)
    ended_s = served[1].end_s
    assert ended_s is not None
    assert node.busy_s == pytest.approx(ended_s)


def test_a_step_that_prefills_also_decodes() -> None:
    truth = replace(TRUTH, chunk_tokens=64)
    node = Node("b0", Role.WHOLE, NodeSettings(truth=truth, block_tokens=16, order="fcfs"))
    served = Cluster([node], create("conductor")).run([one("a", 64, more=50), one("b", 63, 0.17)])
    assert served[1].start_s is not None
    mixed_s = 0.1 + 63e-3 + 1e-3 + 1e-6 * 65
    assert served[1].first_token_s == pytest.approx(served[1].start_s + mixed_s)


def test_a_sequence_that_decodes_takes_a_token_of_the_step_as_in_vllm() -> None:
    """Beside one sequence a step of 64 tokens has room for 63 of a prompt."""
    truth = replace(TRUTH, chunk_tokens=64)
    node = Node("b0", Role.WHOLE, NodeSettings(truth=truth, block_tokens=16, order="fcfs"))
    served = Cluster([node], create("conductor")).run([one("a", 64, more=50), one("b", 64, 0.17)])
    assert served[1].start_s is not None
    steps_s = [0.1 + tokens * 1e-3 + 1e-3 + 1e-6 * at for tokens, at in ((63, 65), (1, 66))]
    assert served[1].first_token_s == pytest.approx(served[1].start_s + sum(steps_s))
    assert served[0].first_token_s == pytest.approx(0.164)


def test_whoever_joined_last_is_computed_again_when_kv_has_no_room() -> None:
    tight = cluster(kv_tokens=300, prefill=2)
    served = tight.run([one("a", 100, more=120), one("b", 100, more=120)])
    assert sum(each.preemptions for each in served) >= 1
    assert all(each.end_s is not None for each in served)
    roomy = cluster(kv_tokens=inf, prefill=2)
    assert not any(
        each.preemptions for each in roomy.run([one("a", 100, more=120), one("b", 100, more=120)])
    )


def test_kv_waits_at_the_prefill_engine_until_there_is_room() -> None:
    tight = cluster(kv_tokens=150, prefill=2)
    first, second = tight.run([one("a", 100, more=5), one("b", 100, 0.001, more=5)])
    assert first.end_s is not None
    assert second.first_token_s is not None
    assert second.first_token_s > first.end_s + 0.1, "its transfer begins when the first has ended"
    assert not second.preemptions


def test_others_see_a_block_when_it_is_computed_and_its_event_has_come() -> None:
    def split(lag_s: float, at_s: float) -> list[str | None]:
        made = cluster(2, lag_s=lag_s, policy="cache_aware")
        again = replace(one("a", 160), id="b", arrival_s=at_s)
        # A busy engine is not asked without a match: the second request shows what was known.
        served = made.run([one("a", 160), again, one("c", 160, at_s + 1e-3)])
        return [each.p for each in served[:2]]

    assert len(set(split(0.0, 0.1))) == 2, "being computed"
    assert len(set(split(0.0, 1.0))) == 1
    # Before its event comes both are alike, and chance decides, the same each time.
    assert split(2.0, 1.0) == split(2.0, 1.0)


def test_mean_wait_is_that_of_an_m_d_1_queue() -> None:
    load = 0.8
    truth = CostModel(a=0.0, c=1.0)
    made = cluster(truth=truth, policy="random", network=Network(latency_s=0.0))
    shape = replace(lengths(1, 1)[0], block_hashes=())
    requests = poisson([replace(shape, id=str(n)) for n in range(60_000)], load, 5)
    served = made.run(requests)
    waits = [each.prefilled_s - each.request.arrival_s - 1.0 for each in served if each.prefilled_s]
    assert len(waits) == len(requests)
    assert sum(waits) / len(waits) == pytest.approx(load / (2 * (1 - load)), rel=0.02)


names = st.sampled_from(["p0", "p1", "d0", "d1"])
changes = st.one_of(
    st.tuples(st.just("die"), names),
    st.tuples(st.just("drain"), names),
    st.tuples(st.just("role"), names, st.sampled_from(ROLES)),
    st.tuples(st.just("join"), st.sampled_from(ROLES)),
)


@settings(deadline=None, max_examples=60)
@given(
    what=st.lists(st.tuples(st.floats(0, 20), changes), max_size=6),
    policy=st.sampled_from(list(PREFILL)),
    chunk=st.sampled_from([0, 64]),
    pool_blocks=st.sampled_from([0, 20, 1000]),
    kv=st.sampled_from([inf, 700]),
    seed=st.integers(0, 3),
)
def test_nothing_is_lost_whatever_happens(
    what: list[tuple], policy: str, chunk: int, pool_blocks: int, kv: float, seed: int
) -> None:
    truth = replace(TRUTH, chunk_tokens=chunk)
    more = {"truth": truth, "kv_tokens": kv, "pull_prefix": bool(seed % 2), "lag_s": seed * 0.3}
    pool = KvPool(PoolSettings(blocks=pool_blocks, bytes_per_s=3e5), 16) if pool_blocks else None
    made = cluster(2, 2, policy=policy, pool=pool, **more)
    shaped = conversations(seed, 40, open_at_once=5, turn_blocks=(1, 5))
    requests = [
        replace(each, arrival_s=n * 0.4, max_tokens=1 + n % 60) for n, each in enumerate(shaped)
    ]
    served = made.run(
        requests, [change_of(n, at_s, one, more) for n, (at_s, one) in enumerate(what)]
    )
    assert [each.request.id for each in served] == [each.id for each in requests]
    for each in served:
        assert (each.end_s is not None) != bool(each.rejected), each
        check_times(each)
    for node in made.nodes.values():
        if node.up:
            assert node.load.open_requests == 0
            assert node.load.queued_tokens == node.load.context == node.load.heavy == 0
            assert node.engine.decode.batch == node.engine.decode.context == 0
            assert node.engine.reserved_tokens == 0
            assert len(node.engine.prefill) == len(node.engine.queue) == 0
    if pool is not None:
        assert pool.blocks <= pool_blocks
        assert not pool.coming, "what an engine was sending came, or ended with it"
    causes = Counter(each.rejected for each in served if each.rejected)
    assert set(causes) <= {"deadline", "unavailable"}
    able = any(node.up and not node.draining for node in made.nodes.values())
    assert not (able and causes["unavailable"])


def change_of(n: int, at_s: float, one: tuple, more: dict) -> Change:
    kind, *rest = one
    if kind == "join":
        node = Node(f"new{n}", rest[0], NodeSettings(block_tokens=16, order="fcfs", **more))
        return Change(at_s, lambda made, now_s: made.join(node, now_s))
    if kind == "role":
        return Change(at_s, lambda made, now_s: made.set_role(rest[0], rest[1], now_s))

    def leave(made: Cluster, now_s: float) -> None:
        if made.nodes[rest[0]].up:
            getattr(made, kind)(rest[0], now_s)

    return Change(at_s, leave)


def check_times(each: Served) -> None:
    if each.end_s is None:
        return
    assert each.start_s is not None
    assert each.prefilled_s is not None
    assert each.first_token_s is not None
    assert each.request.arrival_s <= each.start_s + 1e-9 < each.prefilled_s + 2e-9
    assert each.start_s < each.first_token_s <= each.end_s + 1e-9


def die_while_it_serves(at_s: float, letter: str) -> Change:
    """The busy engine of one side dies."""

    def die(made: Cluster, now_s: float) -> None:
        busy = [n for n, one in made.nodes.items() if n[0] == letter and one.open_requests]
        # A prefill engine whose KV is on its way has ended the request, as the router counts.
        (name,) = busy or {one.p.name for one in made._journeys.values() if one.p is not None}
        made.die(name, now_s)

    return Change(at_s, die)


def test_a_request_goes_on_with_the_tokens_it_has_when_its_engine_dies() -> None:
    made = cluster(1, 2)
    (served,) = made.run([one("a", 100, more=200)], [die_while_it_serves(1.0, "d")])
    assert served.restarts == 1
    assert [name for name, each in made.nodes.items() if not each.up] != [served.d]
    alone = cluster(1, 1).run([one("a", 100, more=200)])[0]
    assert served.first_token_s == alone.first_token_s, "the client has that token"
    assert served.end_s is not None
    assert alone.end_s is not None
    assert served.end_s < alone.end_s + 0.6, "nothing is generated twice"


def test_a_request_that_decodes_needs_its_prefill_engine_no_more() -> None:
    """Live, KV that has come is the decode engine's own."""
    alone = cluster().run([one("a", 100, more=500)])
    when = Change(1.0, lambda made, now_s: made.die("p0", now_s))
    (served,) = cluster().run([one("a", 100, more=500)], [when])
    assert (served.restarts, served.end_s) == (0, alone[0].end_s)
    early, made = die_while_it_serves(0.25, "p"), cluster(prefill=2)  # its KV is on its way
    (served,) = made.run([one("a", 100, more=500)], [early])
    assert served.restarts == 1
    assert [name for name, each in made.nodes.items() if not each.up] != [served.p]


def test_policies_rank_as_mooncake_found() -> None:
    """Random, shortest queue, conductor, conductor that fetches prefixes: each better than the one before."""
    scenario = Scenario(cache_blocks=1500, level=1, network=Network(bytes_per_s=10e9))
    sums_s = defaultdict[str, float](float)
    for seed in (2, 3, 4):  # of one the first two may be equal by chance
        shaped = conversations(
            seed, 2500, open_at_once=60, turns=8, turn_blocks=(2, 40), page_size=512
        )
        requests = poisson(shaped, 0.5, seed)
        for policy in ("random", "jsq", "conductor", "conductor+pull"):
            sums_s[policy] += simulate(scenario, requests, policy)[0].ttft_s["mean"]
    assert list(sums_s.values()) == sorted(sums_s.values(), reverse=True), sums_s


def test_a_run_is_the_same_every_time() -> None:
    requests = poisson(conversations(1, 200, page_size=512), 3.0, 1)
    runs = [
        [(e.p, e.d, e.end_s) for e in simulate(Scenario(level=2), requests, "random")[1]]
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
