# SPDX-License-Identifier: Apache-2.0
"""Prefixes that engines fetch from each other and from a pool: what that costs, and that nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pd_bench.scheduler.workload import conversations, poisson
from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.policies.registry import create
from scheduler_plugins.sim.cluster import Change, Cluster
from scheduler_plugins.sim.kv_pool import FAR, KvPool, PoolSettings
from scheduler_plugins.sim.links import Network
from scheduler_plugins.sim.node import Node, NodeSettings
from scheduler_plugins.sim.served import Served
from scheduler_plugins.sim.simulate import Scenario, simulate

TRUTH = CostModel(a=1e-3, c=0.1, d0=0.01, d1=1e-3, d2=1e-6)
LINKS = Network(bytes_per_s=1e6, latency_s=0.005, kv_bytes_per_token=1000, layers=4, overlap=False)
FAST = replace(LINKS, bytes_per_s=1e7)
BLOCK = 16


def prompt(name: str, tokens: int, at_s: float, shared: int = 0) -> Waiting:
    """One whose first `shared` blocks all prompts have."""
    blocks = tokens // BLOCK
    hashes = [("all", n) if n < shared else (name, n) for n in range(blocks)]
    return Waiting(id=name, tokens=tokens, block_hashes=hashes, arrival_s=at_s, max_tokens=1)


def cluster(
    prefill: int, pool: KvPool | None = None, *, pull_prefix: bool = False, network: Network = LINKS
) -> Cluster:
    settings = NodeSettings(truth=TRUTH, block_tokens=BLOCK, order="fcfs", pull_prefix=pull_prefix)
    nodes = [Node(f"p{n}", Role.PREFILL, settings) for n in range(prefill)]
    nodes.append(Node("d0", Role.DECODE, settings))
    return Cluster(nodes, create("conductor"), network=network, pools=[pool] if pool else [])


def pool(**settings: float) -> KvPool:
    return KvPool(
        PoolSettings(**{"blocks": 1000, "bytes_per_s": 4e6, "latency_s": 0.02, **settings}), BLOCK
    )


def run(made: Cluster, *requests: Waiting, changes: Sequence[Change] = ()) -> list[Served]:
    served = made.run(requests, changes)
    assert all(one.end_s is not None for one in served)
    return served


def restarted(name: str, at_s: float) -> list[Change]:
    """The engine dies, and another one of its name comes with an empty cache."""
    fresh = Node(name, Role.PREFILL, NodeSettings(truth=TRUTH, block_tokens=BLOCK, order="fcfs"))
    return [
        Change(at_s, lambda made, now_s: made.die(name, now_s)),
        Change(at_s + 0.1, lambda made, now_s: made.join(fresh, now_s)),
    ]


def test_a_pool_outlives_the_engine_that_filled_it() -> None:
    """The get costs the pool's latency, the link's, and the bytes; then only the rest is computed."""
    made = cluster(1, pool(), network=FAST)
    first, second = prompt("a", 800, 0.0, shared=50), prompt("b", 816, 10.0, shared=50)
    _, served = run(made, first, second, changes=restarted("p0", 5.0))
    assert served.pulled_tokens == served.cached_tokens == 800
    get_s = 0.005 + 0.02 + 800 * 1000 / 4e6
    assert served.start_s == pytest.approx(10.0 + get_s)
    assert served.prefilled_s == pytest.approx(10.0 + get_s + 0.1 + 16e-3)
    _, alone = run(cluster(1), first, second, changes=restarted("p0", 5.0))
    assert alone.cached_tokens == 0


@pytest.mark.parametrize(
    ("rate", "pulls"), [(2e6, True), (2e5, False)], ids=["worth it", "computing is sooner"]
)
def test_the_pools_own_rate_bounds_a_get_and_the_conductor_knows(rate: float, pulls: bool) -> None:
    made = cluster(1, pool(bytes_per_s=rate), network=FAST)
    requests = prompt("a", 800, 0.0, shared=50), prompt("b", 816, 20.0, shared=50)
    _, served = run(made, *requests, changes=restarted("p0", 15.0))
    assert bool(served.pulled_tokens) is pulls
    if pulls:
        assert served.start_s == pytest.approx(20.0 + 0.005 + 0.02 + 800 * 1000 / rate)


def test_a_put_moves_what_the_pool_lacks_once_and_shares_the_link_with_the_handoff() -> None:
    made = cluster(2, pool(bytes_per_s=1e9))
    requests = [prompt("a", 160, 0.0, shared=5), prompt("b", 160, 0.001, shared=5)]
    served = run(made, *requests)
    assert {one.p for one in served} == {"p0", "p1"}, "at the same time, on two engines"
    handoffs, puts = 2 * 160 * 1000, (10 + 5) * BLOCK * 1000
    assert made.links.moved_bytes == handoffs + puts
    (alone,) = run(cluster(1), requests[0])
    (beside,) = run(cluster(1, pool(bytes_per_s=1e9)), requests[0])
    assert beside.ttft_s - alone.ttft_s == pytest.approx(0.16), "each has half of p0's link"


def test_a_pool_keeps_what_was_used_last() -> None:
    held = pool(blocks=20)
    made = cluster(1, held)
    prompts = [prompt(name, 160, 5.0 * n) for n, name in enumerate("abc")]
    run(made, *prompts)
    assert [held.seen(one.block_hashes, 100.0) for one in prompts] == [0, 10, 10]
    assert held.blocks == 20


def test_a_request_whose_prefix_was_on_its_way_from_an_engine_that_died_is_decided_anew() -> None:
    made = cluster(3, pull_prefix=True, network=FAST)
    warm = prompt("a", 800, 0.0, shared=50)
    busy = [prompt("own", 1600, 4.0, shared=50)]
    asks = prompt("b", 816, 4.01, shared=50)
    holds = list[str]()

    def die(made: Cluster, now_s: float) -> None:
        holds.extend(n for n, one in made.nodes.items() if n != "d0" and len(one.cache.hashes) > 0)
        made.die(holds[0], now_s)

    served = run(made, warm, *busy, asks, changes=[Change(4.05, die)])
    last = served[-1]
    assert last.restarts == 1, "it waited for the blocks of the engine that died"
    assert last.p is not None
    assert last.p not in holds
    assert made.nodes[last.p].load.open_requests == 0


def test_a_pool_makes_more_hits_than_engines_alone() -> None:
    shaped = conversations(2, 800, open_at_once=60, turns=8, turn_blocks=(2, 40), page_size=512)
    requests = poisson(shaped, 4.6, 2)
    scenario = Scenario(cache_blocks=1500)
    apart, _ = simulate(scenario, requests, "conductor")
    with_pool = replace(scenario, pool=PoolSettings(blocks=6000, bytes_per_s=20e9))
    together, _ = simulate(with_pool, requests, "conductor")
    assert together.hit > apart.hit
    assert together.ttft_s["mean"] < apart.ttft_s["mean"]
    assert apart.pulled == 0 < together.pulled <= together.hit
    assert together.moved_bytes > apart.moved_bytes


def hosts(*pools: KvPool) -> Cluster:
    """Two hosts, each with a prefill engine; the first has the decode engine, too."""
    settings = NodeSettings(truth=TRUTH, block_tokens=BLOCK, order="fcfs")
    at = [replace(settings, host=host) for host in ("h0", "h1")]
    nodes = [Node(f"p{n}", Role.PREFILL, of) for n, of in enumerate(at)]
    nodes.append(Node("d0", Role.DECODE, settings))
    return Cluster(nodes, create("conductor"), network=FAST, pools=pools)


def test_a_host_reads_its_own_pool_and_the_far_store_but_no_other_hosts() -> None:
    settings = PoolSettings(blocks=1000, bytes_per_s=4e6, latency_s=0.0)
    first, second = prompt("a", 800, 0.0, shared=50), prompt("b", 816, 10.0, shared=50)
    for far, pulled in (([], 0), ([KvPool(settings, BLOCK, FAR)], 800)):
        own = [KvPool(settings, BLOCK, f"pool {host}", host) for host in ("h0", "h1")]
        made = hosts(*own, *far)

        def first_dies(made: Cluster, now_s: float, own: list[KvPool] = own) -> None:
            (filled,) = [pool for pool in own if pool.blocks]
            made.host_dies(filled.host, now_s)
            assert not filled.blocks

        begun, served = run(made, first, second, changes=[Change(5.0, first_dies)])
        assert served.p != begun.p
        assert (served.pulled_tokens, served.far_tokens) == (pulled, pulled)


def test_what_comes_from_far_is_in_the_hosts_pool_from_then_on() -> None:
    settings = PoolSettings(blocks=1000, bytes_per_s=4e6, latency_s=0.0)
    own = [KvPool(settings, BLOCK, f"pool {host}", host) for host in ("h0", "h1")]
    far = KvPool(settings, BLOCK, FAR)
    made = hosts(*own, far)
    shared = prompt("a", 800, 0.0, shared=50).block_hashes
    far.put(shared, shared, 0.0)
    (served,) = run(made, prompt("b", 816, 1.0, shared=50))
    assert served.far_tokens == 800
    place = 0 if served.p == "p0" else 1
    assert own[place].seen(shared, 9.0) == 50
    assert own[1 - place].blocks == 0
