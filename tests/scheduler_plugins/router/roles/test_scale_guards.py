# SPDX-License-Identifier: Apache-2.0
"""What the guards make of numbers of engines: bounds, whole groups, pins, engines that never come, slow scale-in."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.roles.base import Coming, Fleet, Member, Move, RolePolicy, Scale
from scheduler_plugins.router.roles.controller import RoleController
from scheduler_plugins.router.roles.history import History
from scheduler_plugins.router.roles.scaling import AGAIN_S, SETTLE_S, Limits
from scheduler_plugins.sim.simulate import Scenario

P, D = Role.PREFILL, Role.DECODE
TIMEOUT_S = 120.0
LIMITS = Limits({P: 1, D: 1}, {P: 8, D: 4}, {}, TIMEOUT_S)


class Wants(RolePolicy):
    """Proposes what a test wants, and keeps what it was shown."""

    scales = True

    def __init__(self) -> None:
        self.prefill: object = 1
        self.decode = 1
        self.shown: Fleet | None = None

    def decide(self, fleet: Fleet, now_s: float) -> Sequence[Move | Scale]:
        self.shown = fleet
        return [Scale("g", P, self.prefill, "p"), Scale("g", D, self.decode, "d")]  # type: ignore[arg-type]


class World:
    def __init__(self, limits: Limits | None = LIMITS) -> None:
        self.policy = Wants()
        self.controller = RoleController(self.policy, limits=limits)
        self.now_s = 1000.0
        nodes = Scenario(prefill=12, decode=4, level=2).nodes()
        self.members = [
            Member(node, node.role, node.role, frozenset([node.role]), "g") for node in nodes
        ]

    def after(self, seconds: float, prefill: int, decode: int = 1) -> dict[Role, int]:
        """Engines of each side, when `seconds` have passed and these serve."""
        self.now_s += seconds
        serving = {P: prefill, D: decode}
        alive = []
        for member in self.members:
            serving[member.role] -= 1
            alive.append(member._replace(alive=serving[member.role] >= 0))
        self.controller.moves(Fleet(alive, History()), self.now_s)
        return {scale.role: scale.engines for scale in self.controller.scales}

    @property
    def coming(self) -> list[Coming]:
        assert self.policy.shown is not None
        return [coming for coming in self.policy.shown.coming if coming.role is P]


def test_a_number_stays_within_its_bounds() -> None:
    world = World()
    world.policy.prefill, world.policy.decode = 50, 0
    assert world.after(1, 2) == {P: 8, D: 1}


def test_engines_that_come_are_shown_until_they_serve() -> None:
    world = World()
    world.policy.prefill = 4
    world.after(1, 2)
    world.after(1, 2)
    assert world.coming == [Coming("g", P, 2, 1001.0)]
    world.after(60, 3)
    assert world.coming == [Coming("g", P, 1, 1062.0)]
    world.after(60, 4)
    assert world.coming == []


def test_engines_that_do_not_come_are_given_up_and_asked_for_again_after_a_pause_that_doubles() -> (
    None
):
    world = World()
    world.policy.prefill = 4
    assert world.after(1, 2)[P] == 4
    assert world.after(TIMEOUT_S, 2)[P] == 4
    assert world.after(1, 2)[P] == 2
    assert world.after(AGAIN_S - 1, 2)[P] == 2
    assert world.after(1, 2)[P] == 4
    assert world.after(TIMEOUT_S + 1, 2)[P] == 2
    assert world.after(2 * AGAIN_S - 1, 2)[P] == 2
    assert world.after(1, 2)[P] == 4


def test_what_never_comes_does_not_hold_up_scale_in() -> None:
    world = World()
    world.policy.prefill = 8
    world.after(1, 4)
    world.policy.prefill = 1
    for _ in range(int(SETTLE_S)):
        seen = world.after(1, 4)
    assert seen[P] == 1


def test_a_side_becomes_smaller_only_to_the_largest_number_of_the_last_minutes() -> None:
    world = World()
    world.policy.prefill = 5
    world.after(1, 5)
    for second in range(int(2 * SETTLE_S)):
        world.policy.prefill = 3 if second % 60 else 4
        seen = world.after(1, 5)
        assert seen[P] in (4, 5), "the largest of the last minutes is 4"
    assert seen[P] == 4


def test_an_engine_that_cannot_be_started_is_not_waited_for() -> None:
    world = World()
    world.policy.prefill = 4
    world.after(1, 2)
    world.controller.not_started("g", P, world.now_s)
    assert world.after(1, 2)[P] == 3
    assert world.after(AGAIN_S, 2)[P] == 4


def test_starts_that_fail_together_are_one_failure() -> None:
    world = World()
    world.after(0, 1)
    world.policy.prefill = 5
    assert world.after(1, 1)[P] == 5
    for _ in range(4):
        world.controller.not_started("g", P, world.now_s)
    assert world.after(1, 1)[P] == 1
    assert world.after(AGAIN_S - 2, 1)[P] == 1
    assert world.after(2, 1)[P] == 5, "the pause has not doubled"


def test_pinned_engines_count_and_stay() -> None:
    world = World()
    for member in world.members[:3]:
        world.controller.pin(member.name)
    world.after(1, 4)
    for _ in range(int(SETTLE_S) + 1):
        seen = world.after(1, 4)
    assert seen[P] == 3


def test_groups_come_and_go_whole() -> None:
    """Three prefill engines and one decode engine: neither side is ever alone."""
    world = World(LIMITS._replace(unit={P: 3, D: 1}))
    world.policy.prefill, world.policy.decode = 4, 1
    assert world.after(1, 3) == {P: 6, D: 2}
    world.policy.prefill, world.policy.decode = 9, 1
    assert world.after(1, 3) == {P: 6, D: 2}, (
        "three units need nine prefill engines, and eight are the most"
    )


def test_a_side_without_any_engine_is_filled_again() -> None:
    world = World()
    world.after(1, 2, 1)
    assert world.after(1, 0, 0) == {P: 2, D: 1}
    assert world.after(TIMEOUT_S + 1, 0, 0)[P] in (0, 1)
    assert world.after(AGAIN_S, 0, 0) == {P: 1, D: 1}


def test_a_policy_that_may_not_scale_is_told_so() -> None:
    world = World(None)
    world.after(1, 2)
    assert world.controller.scales == []
    assert "no engine is started or stopped here: the policy must set `scales`" in str(
        world.controller.fault
    )


@pytest.mark.parametrize("engines", [-1, 2.5, True, "2", None])
def test_a_number_without_meaning_is_refused(engines: object) -> None:
    world = World()
    world.policy.prefill = engines
    assert world.after(1, 2) == {P: 2, D: 1}
    assert "engines must be a whole number from 0 on" in str(world.controller.fault)
