# SPDX-License-Identifier: Apache-2.0
"""The guards hold whatever a policy proposes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_engines import Known

from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.roles.base import Fleet, Member, Move, RolePolicy
from scheduler_plugins.router.roles.controller import (
    LONGEST_PAUSE_S,
    LONGEST_TURN_S,
    RoleController,
)
from scheduler_plugins.router.roles.history import History
from scheduler_plugins.router.roles.published import Fixed

P, D, B = Role.PREFILL, Role.DECODE, Role.BOTH
ANY = frozenset((P, D, B))
DWELL_S, PAUSE_S = 30.0, 5.0


class Proposes(RolePolicy):
    """Proposes what a test says, whatever the fleet."""

    def __init__(self, *moves: Move) -> None:
        self.proposed = list(moves)

    def decide(self, fleet: Fleet, now_s: float) -> list[Move]:
        return self.proposed


class Flips(RolePolicy):
    """The worst policy: it always wants every engine on the other side."""

    def decide(self, fleet: Fleet, now_s: float) -> list[Move]:
        return [Move(one.name, P if one.role is D else D, "flip") for one in fleet.members]


@dataclass
class World:
    """A fleet that does what a controller says, at once."""

    controller: RoleController
    roles: dict[str, Role]
    may: frozenset[Role] = ANY
    groups: dict[str, str] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    moved: list[tuple[float, str, Role, Role]] = field(default_factory=list)
    load: dict[str, int] = field(default_factory=dict)
    home: dict[str, Role] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.home = dict(self.roles)

    def fleet(self) -> Fleet:
        members = [
            Member(
                Known(name, role, open_requests=self.load.get(name, 0)),
                role,
                self.home[name],
                self.may,
                self.groups.get(name, ""),
                -1e9,
                name not in self.dead,
            )
            for name, role in self.roles.items()
        ]
        return Fleet(members, History())

    def tick(self, now_s: float) -> list[Move]:
        moves = self.controller.moves(self.fleet(), now_s)
        for move in moves:
            self.moved.append((now_s, move.engine, self.roles[move.engine], move.role))
            self.roles[move.engine] = move.role
            self.controller.done(move.engine, now_s)
        return moves


def world(policy: RolePolicy, prefill: int = 2, decode: int = 2, **guards: int) -> World:
    roles = {f"p{n}": P for n in range(prefill)} | {f"d{n}": D for n in range(decode)}
    return World(RoleController(policy, **guards), roles)


def counts(roles: Sequence[Role]) -> tuple[int, int]:
    return sum(one in (P, B) for one in roles), sum(one in (D, B) for one in roles)


proposals = st.lists(
    st.builds(
        Move,
        st.sampled_from(["p0", "p1", "p2", "d0", "d1", "d2", "ghost"]),
        st.sampled_from(list(Role)),
        st.just("because"),
    ),
    max_size=4,
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.1, 40.0), proposals), max_size=30),
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from([ANY, frozenset((P, D)), frozenset((D, B)), frozenset((P,))]),
    st.sampled_from([None, "p0", "d1"]),
)
def test_whatever_a_policy_proposes_the_guards_hold(
    steps: list[tuple[float, list[Move]]],
    min_prefill: int,
    min_decode: int,
    may: frozenset[Role],
    pinned: str | None,
) -> None:
    policy = Proposes()
    controller = RoleController(policy, min_prefill=min_prefill, min_decode=min_decode)
    fleet = World(
        controller,
        {"p0": P, "p1": P, "p2": P, "d0": D, "d1": D, "d2": D},
        may,
        {"p2": "b", "d2": "b"},
    )
    if pinned:
        controller.pin(pinned)
    now_s, last_of_group, since_s = 0.0, dict[str, float](), dict[str, float]()
    for passed_s, proposed in steps:
        now_s, policy.proposed = now_s + passed_s, proposed
        before = dict(fleet.roles)
        moves = fleet.tick(now_s)
        groups = Counter(fleet.groups.get(one.engine, "") for one in moves)
        assert all(count == 1 for count in groups.values())
        for one in moves:
            group = fleet.groups.get(one.engine, "")
            assert one.engine != pinned
            assert one.role in may
            assert now_s - last_of_group.get(group, -1e9) >= PAUSE_S
            assert now_s - since_s.get(one.engine, -1e9) >= DWELL_S
            last_of_group[group] = since_s[one.engine] = now_s
        for group in ("", "b"):
            names = [name for name in before if fleet.groups.get(name, "") == group]
            was, now = (counts([roles[n] for n in names]) for roles in (before, fleet.roles))
            assert now[0] >= min(was[0], min_prefill)
            assert now[1] >= min(was[1], min_decode)


def test_without_guards_the_same_policy_would_empty_a_side() -> None:
    """The control: the guards are what the test above sees."""
    fleet = World(
        RoleController(Flips(), dwell_s=0, pause_s=0, min_prefill=0, min_decode=0),
        {"p0": P, "d0": D},
    )
    fleet.tick(0.0)
    assert counts(list(fleet.roles.values())) != (1, 1)


def test_a_policy_that_always_flips_turns_half_as_often_and_no_less() -> None:
    """A turn that is taken back doubles the dwell of the group once. With longer ones, a group that had swung would be
    held on the wrong side when its traffic changes."""
    fleet = world(Flips(), 4, 4)
    for second in range(3600):
        fleet.tick(float(second))
    turns = [after[0] for before, after in pairwise(fleet.moved) if before[3] is not after[3]]
    gaps = [b - a for a, b in pairwise(turns)]
    assert gaps == sorted(gaps)
    assert LONGEST_TURN_S <= gaps[-1] < 2 * LONGEST_TURN_S


def test_a_calm_hour_resets_the_dwell() -> None:
    policy = Proposes(Move("p0", D, "x"))
    fleet = world(policy)
    assert fleet.tick(0.0)
    policy.proposed = [Move("p0", P, "x")]
    assert not fleet.tick(29.0)
    assert fleet.tick(30.0)  # taken back: 60 s from here
    policy.proposed = [Move("p0", D, "x")]
    assert not fleet.tick(89.0)
    assert fleet.tick(3600.0)
    policy.proposed = [Move("p0", P, "x")]
    assert fleet.tick(3630.0)


def test_another_engine_cannot_take_a_move_back_either() -> None:
    policy = Proposes(Move("p0", D, "x"))
    fleet = world(policy, 3, 3)
    assert fleet.tick(0.0)
    policy.proposed = [Move("d0", P, "x")]
    assert not fleet.tick(10.0)
    policy.proposed = [Move("p1", D, "x")]
    assert fleet.tick(10.0)  # the same direction may go on


@pytest.mark.parametrize("dead", [P, D])
def test_a_dead_side_is_repaired_at_once_whatever_the_minima(dead: Role) -> None:
    fleet = world(Fixed(), min_prefill=2, min_decode=2)
    fleet.dead = {name for name, role in fleet.roles.items() if role is dead}
    fleet.load = {"p0": 3, "d0": 3}
    (move,) = fleet.tick(0.0)
    assert move.role is dead
    assert move.engine in ("p1", "d1")  # the emptiest
    assert not fleet.tick(1.0)


def test_a_repair_is_not_repeated_while_it_is_carried_out() -> None:
    fleet = world(Fixed(), 2, 3)
    fleet.dead = {"p0", "p1"}
    assert len(fleet.controller.moves(fleet.fleet(), 0.0)) == 1
    assert not fleet.controller.moves(fleet.fleet(), 1.0)


def test_a_repaired_engine_goes_home_when_its_side_lives_again() -> None:
    fleet = world(Fixed())
    fleet.dead = {"p0", "p1"}
    (move,) = fleet.tick(0.0)
    fleet.dead = set()
    assert not fleet.tick(29.0)
    (back,) = fleet.tick(31.0)
    assert back == Move(move.engine, D, back.cause)


def test_the_last_engine_alive_stays() -> None:
    fleet = world(Fixed(), 1, 1)
    fleet.dead = {"p0"}
    assert not fleet.tick(0.0)


def test_a_pinned_engine_repairs_nothing() -> None:
    fleet = world(Fixed(), 1, 2)
    fleet.controller.pin("d0")
    fleet.controller.pin("d1")
    fleet.dead = {"p0"}
    assert not fleet.tick(0.0)
    fleet.controller.release("d1")
    assert fleet.tick(1.0)[0].engine == "d1"


def test_a_failed_move_waits_longer_each_time() -> None:
    fleet = world(Proposes(Move("p0", D, "x")))
    now_s, waits = 0.0, []
    for _ in range(3):
        begun_s = now_s
        while not fleet.controller.moves(fleet.fleet(), now_s):
            now_s += 1.0
        waits.append(now_s - begun_s)
        fleet.controller.failed("p0", now_s, "no answer")
    assert waits == [0.0, 30.0, 60.0]


def test_a_move_may_fail_for_weeks() -> None:
    fleet, now_s = world(Proposes(Move("p0", D, "x"))), 0.0
    for _ in range(1100):  # 2.0 ** 1024 overflows
        assert fleet.controller.moves(fleet.fleet(), now_s)
        fleet.controller.failed("p0", now_s, "no answer")
        assert not fleet.controller.moves(fleet.fleet(), now_s + 1)
        now_s += LONGEST_PAUSE_S


def test_a_moving_engine_counts_on_no_side_for_the_minima() -> None:
    policy = Proposes(Move("d0", P, "x"))
    fleet = world(policy, 2, 2)
    assert fleet.controller.moves(fleet.fleet(), 0.0)  # neither done nor failed
    policy.proposed = [Move("d1", P, "x")]
    assert not fleet.controller.moves(fleet.fleet(), 100.0)
    fleet.controller.failed("d0", 101.0, "no answer")
    policy.proposed = [Move("d1", P, "x")]
    assert fleet.controller.moves(fleet.fleet(), 140.0)


def test_a_clock_that_jumps_back_delays_moves_by_no_more_than_the_dwell() -> None:
    policy = Proposes(Move("p0", D, "x"))
    fleet = world(policy)
    assert fleet.tick(1e6)
    policy.proposed = [Move("p0", P, "x")]
    assert not fleet.tick(0.0)
    assert fleet.tick(31.0)


class Raises(RolePolicy):
    def decide(self, fleet: Fleet, now_s: float) -> list[Move]:
        raise RuntimeError("a bug")


class Nothing(RolePolicy):
    def decide(self, fleet: Fleet, now_s: float) -> list[Move]:
        return None  # type: ignore[return-value]


@pytest.mark.parametrize("policy", [Raises(), Nothing()])
def test_a_dead_side_is_repaired_although_the_policy_fails(policy: RolePolicy) -> None:
    fleet = world(policy, 2, 2)
    fleet.dead = {"d0", "d1"}
    assert [move.role for move in fleet.tick(0.0)] == [D]
    assert isinstance(fleet.controller.fault, RuntimeError | TypeError)
    fleet.controller.policy = Fixed()
    fleet.tick(1.0)
    assert fleet.controller.fault is None


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (Move("ghost", P, "x"), "engine must be one of p0, p1, d0, d1"),
        (Move(["d0"], P, "x"), "engine must be one of"),  # type: ignore[arg-type]
        (Move("d0", Role.WHOLE, "x"), "role must be one of prefill, both, decode"),
        (Move("d0", None, "x"), "role must be one of"),  # type: ignore[arg-type]
        (Move("d0", P, None), "cause must be a text"),  # type: ignore[arg-type]
        (("d0", P, "x"), "must be a Move"),
    ],
)
def test_a_proposal_without_a_meaning_is_named_and_the_others_count(wrong: Move, why: str) -> None:
    fleet = world(Proposes(wrong, Move("d1", P, "x")))
    assert [move.engine for move in fleet.tick(0.0)] == ["d1"]
    assert why in str(fleet.controller.fault)


def test_a_role_that_is_given_as_a_word_is_that_role() -> None:
    fleet = world(Proposes(Move("d0", "decode", "stays"), Move("d1", "prefill", "x")))  # type: ignore[arg-type]
    assert [(move.engine, move.role) for move in fleet.tick(0.0)] == [("d1", P)]
    assert fleet.roles["d1"] is P


def test_a_policy_sees_only_moves_that_are_possible() -> None:
    seen = list[Fleet]()

    class SlowProbes(RolePolicy):
        def decide(self, fleet: Fleet, now_s: float) -> list[Move]:
            seen.append(fleet)
            return []

    fleet = world(SlowProbes(), 1, 2)
    fleet.controller.pin("d0")
    fleet.tick(0.0)
    may = {one.name: one.may for one in seen[0].members}
    assert may == {"p0": frozenset((P, B)), "d0": frozenset((D,)), "d1": ANY}
