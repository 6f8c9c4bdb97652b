# SPDX-License-Identifier: Apache-2.0
"""Every policy and every rule shares work among engines that are alike, whatever is known of their costs.

The tests go through the registry, so that a new policy is tried without being named here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from random import Random

import pytest
from policy_engines import FixedView, Known

from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.router.policies.base import Request, Role, Route
from scheduler_plugins.router.policies.registry import (
    BOTH_SIDES,
    DECODE,
    PREFILL,
    WRAPPER,
    create,
)
from scheduler_plugins.sim.cluster import Change, Cluster
from scheduler_plugins.sim.links import Network
from scheduler_plugins.sim.node import Node, NodeSettings

COSTS = CostModel(a=1e-4, c=0.02, d0=0.01, d1=2e-4, d2=1e-8)
SLOW = CostModel(a=2e-4, c=0.04, d0=0.02, d1=4e-4, d2=2e-8)
UNKNOWN = CostModel.token_count()
REQUESTS, PER_S = 400, 12.0
"""Three engines of each side are busy for 0.6 of the time, or decode 12 at a time."""
ROUTES = [*PREFILL, *BOTH_SIDES, WRAPPER]
BLIND = {"random", "round_robin"}
"""They look at nothing, so a slow engine gets as much as any."""
FULLEST = {"dop"}
"""They fill one decode engine before the next on purpose, if costs are known."""


@dataclass(frozen=True)
class Fleet:
    """Three engines of each side, and what the router knows of their costs."""

    known: bool
    slow: bool = False  # the last engine of each side takes twice as long
    late: bool = False  # it comes when half of the requests have come
    late_known: bool = False

    @property
    def id(self) -> str:
        parts = ["costs known" if self.known else "costs unknown"]
        parts += ["one slow"] if self.slow else []
        parts += [f"one late, {'' if self.late_known else 'un'}known"] if self.late else []
        return ", ".join(parts)

    def nodes(self, side: str) -> list[Node]:
        role = Role.PREFILL if side == "p" else Role.DECODE
        made = []
        for n in range(3):
            last = n == 2
            settings = NodeSettings(truth=SLOW if self.slow and last else COSTS, block_tokens=16)
            node = Node(f"{side}{n}", role, settings)
            if not (self.late_known if self.late and last else self.known):
                node.costs = UNKNOWN
            made.append(node)
        return made


FLEETS = [
    *(Fleet(known, slow) for known in (True, False) for slow in (True, False)),
    *(
        Fleet(known, late=True, late_known=known and late_known)
        for known, late_known in ((True, True), (True, False), (False, False))
    ),
]


def prompts() -> list[Waiting]:
    """Distinct ones, so that nothing is cached; most of a size, and answers of 40 steps."""
    random, at_s, made = Random(5), 0.0, []
    for n in range(REQUESTS):
        at_s += random.expovariate(PER_S)
        hashes = tuple((n, k) for k in range(80))
        made.append(
            Waiting(id=f"r{n}", tokens=1290, block_hashes=hashes, arrival_s=at_s, max_tokens=100)
        )
    return made


@cache
def shares(policy: str, decode_policy: str, fleet: Fleet) -> dict[str, float]:
    """The part of each side's requests that each engine got; where one came late, of those after."""
    nodes = fleet.nodes("p") + fleet.nodes("d")
    late = [node for node in nodes if fleet.late and node.name in ("p2", "d2")]
    made = Cluster(
        [node for node in nodes if node not in late],
        create(policy, decode_policy),
        network=Network(bytes_per_s=1e12),
    )
    requests = prompts()
    half_s = requests[REQUESTS // 2].arrival_s
    served = made.run(
        requests,
        [Change(half_s, lambda made, now_s, node=node: made.join(node, now_s)) for node in late],
    )
    assert all(one.end_s is not None for one in served), "nothing is lost"
    counted = served[REQUESTS // 2 :] if fleet.late else served
    found: Counter[str] = Counter()
    for one in counted:
        found.update([str(one.p), str(one.d)])
    return {node.name: found[node.name] / len(counted) for node in nodes}


def check(found: dict[str, float], side: str, fleet: Fleet, *, blind: bool) -> None:
    *others, last = (found[f"{side}{n}"] for n in range(3))
    assert 0.75 < others[0] / others[1] < 1.33, f"equal engines have equal shares: {found}"
    if fleet.slow and not blind:
        assert 0.05 <= last < min(others), f"the slow engine gets less, and not nothing: {found}"
    else:
        assert 0.2 < last < 0.45, found


@pytest.mark.parametrize("fleet", FLEETS, ids=lambda fleet: fleet.id)
@pytest.mark.parametrize("policy", ROUTES)
def test_a_route_policy_shares_both_sides(policy: str, fleet: Fleet) -> None:
    found = shares(policy, "", fleet)
    blind = policy in BLIND
    # `prefix_hash` only looks at load where it is out of balance: here, keys are as many as prompts.
    check(found, "p", fleet, blind=blind or policy == "prefix_hash")
    if policy not in FULLEST or not fleet.known:
        check(found, "d", fleet, blind=blind)


@pytest.mark.parametrize("fleet", FLEETS, ids=lambda fleet: fleet.id)
@pytest.mark.parametrize("rule", DECODE)
def test_a_decode_policy_shares(rule: str, fleet: Fleet) -> None:
    check(shares("round_robin", rule, fleet), "d", fleet, blind=rule in BLIND)


@pytest.mark.parametrize("policy", ROUTES)
def test_one_request_at_a_time_does_not_always_get_the_same_engine(policy: str) -> None:
    """Idle engines look alike: the first of equals would keep everything, and the others' caches nothing."""
    made, random = create(policy), Random(0)
    engines = [[Known(f"{side}{n}", costs=UNKNOWN) for n in range(3)] for side in "pd"]
    found: Counter[str | None] = Counter()
    for n in range(60):
        hashes = tuple((n, k) for k in range(80))
        request = Request(f"r{n}", 1290, hashes, max_tokens=100, session=f"user {n}")
        decision = made.decide(request, FixedView(*engines), float(n), random)
        assert isinstance(decision, Route)
        found.update([decision.p, decision.d])
    assert min(found[f"{side}{n}"] for side in "pd" for n in range(3)) >= 6, found


@pytest.mark.parametrize("policy", ROUTES)
def test_a_prefix_that_all_engines_have_prefers_none(policy: str) -> None:
    """A system prompt is soon cached everywhere. `prefix_hash` keeps its prompts together on purpose,
    within its bound of load."""
    made, random, counts = create(policy), Random(0), Counter[str | None]()
    for n in range(60):
        engines = [
            Known(
                f"p{k}",
                open_requests=counts[f"p{k}"],
                prefills=counts[f"p{k}"] // 30,
                queued=0.01 * counts[f"p{k}"],
                queued_tokens=100 * counts[f"p{k}"],
                blocks=frozenset(range(10)),
            )
            for k in range(3)
        ]
        request = Request(f"r{n}", 165, tuple(range(10)))
        decision = made.decide(request, FixedView(engines, [Known("d")]), 0.0, random)
        if isinstance(decision, Route) and decision.p is not None:
            counts[decision.p] += 1
    if policy != WRAPPER:  # 5 tokens to compute are not worth a handoff
        assert min(counts[f"p{k}"] for k in range(3)) >= 10, counts


def test_sessions_and_their_requests_stay_and_sessions_are_shared() -> None:
    made, random, homes = create("session"), Random(0), dict[str, str]()
    queued = Counter[str]()
    for n in range(90):
        session = f"user {n % 30}"
        engines = [Known(f"p{k}", queued=0.1 * queued[f"p{k}"]) for k in range(3)]
        request = Request(f"r{n}", 160, session=session)
        decision = made.decide(request, FixedView(engines, [Known("d")]), 0.0, random)
        assert isinstance(decision, Route)
        assert decision.p is not None
        assert homes.setdefault(session, decision.p) == decision.p
        queued[decision.p] += 1
    assert set(Counter(homes.values()).values()) == {10}


def decodes(engines: list[Known], tokens: int = 100, **promised: float) -> str:
    request = Request("r", tokens, **promised)
    decision = create("random", "least_tpot").decide(
        request, FixedView([], engines), 0.0, Random(0)
    )
    assert isinstance(decision, Route)
    return decision.d


def test_where_no_decode_costs_are_known_sequences_decide_then_tokens() -> None:
    a, b = Known("a", costs=UNKNOWN, batch=3), Known("b", costs=UNKNOWN, batch=2, context=9000)
    assert decodes([a, b]) == "b"
    assert decodes([a, replace(b, batch=3)]) == "a"


def test_errors_of_learnt_costs_move_no_more_work_than_they_are_large() -> None:
    """By the time of a step alone, 5 % of it would be worth 2 sequences of 20 here, and the slower
    engine would get nothing until the other had them; with a batch that costs next to nothing, hundreds."""
    exact = CostModel(a=1e-4, d0=0.02, d1=1e-5)
    off = replace(exact, d0=0.021)
    batches = Counter[str]()
    for _ in range(200):
        engines = [
            Known("exact", costs=exact, batch=batches["exact"]),
            Known("off", costs=off, batch=batches["off"]),
        ]
        batches[decodes(engines)] += 1
    assert 90 <= batches["off"] <= 100


def test_an_engine_whose_costs_are_not_known_is_taken_for_one_like_the_others() -> None:
    known, late = Known("known", batch=4), Known("late", costs=UNKNOWN)
    assert decodes([known, late]) == "late"
    assert decodes([known, replace(late, batch=5)]) == "known"


def test_prompts_that_wait_at_an_engine_of_both_sides_count_as_sequences() -> None:
    both, other = Known("both", Role.BOTH, prefills=3), Known("other", batch=2)
    assert decodes([both, other]) == "other"


def test_a_slow_engine_gets_no_request_whose_promise_it_would_break() -> None:
    fast, slow = Known("fast", costs=COSTS, batch=8), Known("slow", costs=SLOW)
    assert decodes([fast, slow]) == "slow"
    assert decodes([fast, slow], tpot_slo_s=0.015) == "fast"
