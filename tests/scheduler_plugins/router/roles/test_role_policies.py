# SPDX-License-Identifier: Apache-2.0
"""What each role policy decides, and that a constant load ends every move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_engines import Known

from pd_bench.roles.arrow_paper import ArrowPaper
from pd_connector.errors import ConfigError
from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.roles.base import Fleet, Front, Member, Move
from scheduler_plugins.router.roles.controller import RoleController
from scheduler_plugins.router.roles.history import History
from scheduler_plugins.router.roles.pressure import Pressure
from scheduler_plugins.router.roles.registry import ROLES, create

P, D, B = Role.PREFILL, Role.DECODE, Role.BOTH
ANY = frozenset((P, D, B))
COSTS = CostModel(a=1e-4, c=0.01, d0=0.02, d1=1e-4, d2=1e-7)
UNKNOWN = CostModel.token_count()
TTFT_S, TPOT_S = 2.0, 0.1
NOW_S = 600.0


def history(
    prompt: int = 1000,
    answer: int = 100,
    per_s: int = 10,
    ttft_s: float = 0.5,
    promised: bool = True,
    refusals: int = 0,
) -> History:
    """Ten minutes of the same requests."""
    told = History()
    slos = (TTFT_S, TPOT_S) if promised else (float("inf"),) * 2
    for second in range(600):
        for _ in range(per_s):
            told.arrived(second, "", prompt, *slos)
            told.prefilled(second, "", prompt, ttft_s, slos[0])
            told.answered(second, "", answer, 0.05, slos[1])
        for _ in range(refusals):
            told.refused(second, "")
    return told


def fleet(
    prefill: Mapping[str, float],
    decode: Mapping[str, int],
    told: History | None = None,
    costs: CostModel = COSTS,
    front: Front | None = None,
    room: int = 100_000,
) -> Fleet:
    """Engines with these seconds of queued prompts, and these tokens of sequences that decode."""
    engines = [Known(name, P, queued=s, costs=costs, prefills=1) for name, s in prefill.items()]
    engines += [
        Known(name, D, context=tokens, batch=tokens // 1000, costs=costs, free_kv=room - tokens)
        for name, tokens in decode.items()
    ]
    members = [Member(one, one.role, one.role, ANY) for one in engines]
    return Fleet(members, told or history(), {"": front} if front else {})


def test_pressure_moves_the_emptiest_engine_to_the_side_near_its_promise() -> None:
    late = fleet({"p0": 3.0}, {"d0": 20_000, "d1": 5_000, "d2": 20_000})
    (move,) = Pressure().decide(late, NOW_S)
    assert (move.engine, move.role) == ("d1", P)
    assert "1.50" in move.cause  # 3 s queued, 2 s promised


def test_pressure_leaves_a_side_that_cannot_spare_an_engine() -> None:
    """Else both sides take turns, as Dynamo's planner did."""
    assert not Pressure().decide(fleet({"p0": 3.0}, {"d0": 50_000, "d1": 50_000}), NOW_S)
    assert Pressure().decide(fleet({"p0": 3.0}, {"d0": 30_000, "d1": 30_000}), NOW_S)


def test_pressure_does_not_answer_a_burst_that_the_load_does_not_support() -> None:
    """Decode has most of the work of this mix. A moment's queue at prefill is not a reason to move."""
    told = history(prompt=500, answer=400)
    assert not Pressure().decide(fleet({"p0": 3.0}, {"d0": 9000, "d1": 9000}, told), NOW_S)
    short = history(prompt=1500, answer=10)
    assert Pressure().decide(fleet({"p0": 3.0}, {"d0": 9000, "d1": 9000}, short), NOW_S)


def test_pressure_counts_what_waits_in_the_router() -> None:
    told = history(prompt=1500, answer=10)
    calm = fleet({"p0": 0.1}, {"d0": 9000, "d1": 9000}, told)
    assert not Pressure().decide(calm, NOW_S)
    waiting = calm._replace(front={"": Front(20, 30_000, 1.0)})
    assert Pressure().decide(waiting, NOW_S)


@pytest.mark.parametrize("late", [{"ttft_s": 3.0}, {"refusals": 5}])
def test_pressure_remembers_promises_that_were_missed(late: dict[str, float]) -> None:
    """After a burst the queues are empty, and the next burst would be as late."""
    told = history(prompt=1500, answer=10, **late)  # type: ignore[arg-type]
    (move,) = Pressure().decide(fleet({"p0": 0.1}, {"d0": 9000, "d1": 9000}, told), NOW_S)
    assert move.role is P
    assert "of the last minute's requests were late or refused" in move.cause
    assert "1 prefill and 2 decode engines have work for" in move.cause, "the third condition"


def test_pressure_blames_the_side_that_was_full_while_promises_were_missed() -> None:
    """Prefill missed them for a minute. Decode is fuller at this moment only: it has the end of a burst."""
    told = history(prompt=1500, answer=10, refusals=5)
    prefill, decode = dict.fromkeys(("p0", "p1", "p2", "p3"), 0.1), {"d0": 60_000, "d1": 60_000}
    assert not Pressure().decide(fleet(prefill, decode, told), NOW_S)
    answers = history(prompt=500, answer=400, refusals=5)
    (move,) = Pressure().decide(fleet(prefill, decode, answers), NOW_S)
    assert move.role is D, "here decode has the work of the whole minute"


def test_pressure_without_promise_or_profile_goes_by_queues_and_room() -> None:
    told = history(promised=False)
    late = fleet({"p0": 3.0}, {"d0": 9000, "d1": 9000}, told, UNKNOWN)
    (move,) = Pressure().decide(late, NOW_S)
    assert move.role is P
    full = fleet({"p0": 0.1, "p1": 0.1}, {"d0": 90_000}, told, UNKNOWN)
    (move,) = Pressure().decide(full, NOW_S)
    assert move.role is D


def test_pressure_turns_back_only_near_a_missed_promise() -> None:
    """Near the right ratio both sides are above the limit by turns. The engine that came last would go to and fro."""
    told = history(prompt=500, answer=400)

    def moves(used: int, came_last: str, since_s: float = 500.0) -> list[Move]:
        pressed = fleet({"p0": 0.1, "p1": 0.1}, {"d0": used, "d1": used}, told)
        members = [
            one._replace(since_s=since_s if one.name == came_last else 0.0)
            for one in pressed.members
        ]
        return Pressure().decide(pressed._replace(members=members), NOW_S)

    assert moves(88_000, came_last="d0"), "it goes on in the same direction"
    assert not moves(88_000, came_last="p1")
    assert moves(97_000, came_last="p1")
    assert moves(88_000, came_last="p1", since_s=0.01), (
        "a router starts with its engines one by one"
    )


def test_pressure_treats_groups_apart() -> None:
    one, other = fleet({"a": 3.0}, {"b": 0, "c": 0}), fleet({"x": 0.0}, {"y": 0, "z": 0})
    members = [m._replace(group="one") for m in one.members]
    members += [m._replace(group="two") for m in other.members]
    (move,) = Pressure().decide(Fleet(members, History()), NOW_S)
    assert move.engine in ("b", "c")


def test_ratio_divides_engines_as_work_is_divided() -> None:
    """1,000 tokens take 0.11 s of prefill. 100 tokens at a batch of 85 (0.9 of the room) take 0.043 s of decode."""
    engines = fleet(dict.fromkeys("abcd", 0.0), dict.fromkeys("wxyz", 0))
    (move,) = create("ratio").decide(engines, NOW_S)
    assert move.role is P
    assert "6:2 fits it better than 4:4" in move.cause


def test_tetri_measures_capacity_not_busy_time() -> None:
    """Each decode engine has a sequence all the time, and is idle by capacity."""
    told = history(prompt=2000, answer=5, per_s=8)
    engines = fleet({"p0": 1.0, "p1": 1.0}, dict.fromkeys("wxyz", 1000), told)
    (move,) = create("tetri").decide(engines, NOW_S)
    assert move.role is P
    assert not create("tetri").decide(fleet({"p0": 1.0, "p1": 1.0}, {"d": 1000}), NOW_S)


def test_mixed_lends_an_engine_and_takes_it_home() -> None:
    late = fleet({"p0": 3.0}, {"d0": 9000, "d1": 1000})
    (move,) = create("mixed").decide(late, NOW_S)
    assert (move.engine, move.role) == ("d1", B)
    calm = fleet({"p0": 0.1}, {"d0": 9000, "d1": 1000})
    lent = [m._replace(role=B) if m.name == "d1" else m for m in calm.members]
    (move,) = create("mixed").decide(calm._replace(members=lent), NOW_S)
    assert (move.engine, move.role) == ("d1", D)


def test_arrow_has_a_margin_and_the_paper_has_none() -> None:
    near = fleet({"p0": 0.0, "p1": 0.0}, {"d0": 88_000})
    assert [one.role for one in create("arrow").decide(near, NOW_S)] == [D]
    assert not ArrowPaper().decide(near, NOW_S)
    idle = fleet({"p0": 0.0}, {"d0": 0, "d1": 1000})
    assert ArrowPaper().decide(idle, NOW_S)  # it flips whatever is empty
    assert not create("arrow").decide(idle, NOW_S)


def test_fixed_never_moves() -> None:
    assert not create("fixed").decide(fleet({"p0": 99.0}, {"d0": 0, "d1": 0}), NOW_S)


def test_an_unknown_name_is_refused_with_the_known_names() -> None:
    with pytest.raises(
        ConfigError,
        match="'presure' is not known: did you mean 'pressure'",
    ):
        create("presure")


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([*ROLES]),
    st.integers(1, 6),
    st.integers(1, 6),
    st.floats(0, 20),
    st.integers(0, 600_000),
    st.integers(10, 4000),
    st.integers(1, 1000),
    st.integers(1, 40),
)
def test_a_constant_load_ends_moving(
    name: str,
    prefill: int,
    decode: int,
    queued_s: float,
    tokens: int,
    prompt: int,
    answer: int,
    per_s: int,
) -> None:
    """Queues and sequences spread evenly over the engines of their side, and never change in sum."""
    told = history(prompt, answer, per_s)
    controller = RoleController(create(name))
    roles = {f"e{n}": P if n < prefill else D for n in range(prefill + decode)}
    home, moved_s = dict(roles), list[float]()
    for step in range(240):
        now_s = NOW_S + 5 * step
        each = {
            P: queued_s / sum(one in (P, B) for one in roles.values()),
            D: tokens // sum(one in (D, B) for one in roles.values()),
        }
        members = []
        for engine, role in roles.items():
            view = Known(engine, role, costs=COSTS)
            if role in (P, B):
                view = replace(view, queued=each[P], prefills=1)
            if role in (D, B):
                room = max(0, 100_000 - each[D])
                view = replace(view, context=each[D], batch=each[D] // 1000, free_kv=room)
            members.append(Member(view, role, home[engine], ANY))
        # The history's minutes stay the last minutes.
        for move in _moves_at(controller, members, told, now_s):
            moved_s.append(now_s)
            roles[move.engine] = move.role
            controller.done(move.engine, now_s)
    assert not [at for at in moved_s if at > NOW_S + 600]


def _moves_at(
    controller: RoleController, members: list[Member], told: History, now_s: float
) -> list[Move]:
    class Frozen(History):
        def over(self, now_s: float, seconds: float, group: str):  # type: ignore[no-untyped-def]
            return told.over(NOW_S - 1, seconds, group)

    return controller.moves(Fleet(members, Frozen()), now_s)
