# SPDX-License-Identifier: Apache-2.0
"""The guards around numbers of engines: bounds, whole units, engines that never come up, and a slow scale-in."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from pd_connector.pauses import doubled_s
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.roles.base import Coming, Member, Scale

SETTLE_S = 300.0
"""A side is made smaller only to the largest number that was wanted within this time."""
AGAIN_S, LONGEST_AGAIN_S = 60.0, 3600.0
"""After engines that did not come, no more are asked for within `AGAIN_S`. It doubles with each failure in a row."""
SIDES = (Role.PREFILL, Role.DECODE)


class Limits(NamedTuple):
    """Fewest and most engines of each side of a group, and how many come and go together."""

    fewest: Mapping[Role, int]
    most: Mapping[Role, int]
    unit: Mapping[Role, int] = {}
    """Engines of a whole group, as 3 prefill and 1 decode; empty: sides are scaled apart."""
    start_timeout_s: float = 900.0
    """An engine that does not serve by then is given up."""
    settle_s: float = SETTLE_S

    @property
    def units(self) -> tuple[int, int]:
        """Fewest and most units, if there are any."""
        fewest = max(-(-self.fewest[role] // self.unit[role]) for role in SIDES)
        return fewest, min(self.most[role] // self.unit[role] for role in SIDES)


@dataclass
class _Side:
    """What is settled about one side of a group."""

    engines: int
    cause: str = ""
    since_s: float = 0.0  # when the last engine was asked for, or came
    serving: int = 0
    proposals: deque[tuple[float, int, str]] = field(default_factory=deque)
    failures: int = 0
    again_s: float = -inf  # more engines are asked for from then on
    begun_s: float = 0.0


class ScaleGuards:
    """Decides how many engines each side has, from what a policy proposes.

    | guard | what it means |
    |---|---|
    | bounds | a number stays within the limits, and is at least the number of pinned engines |
    | units | both sides have whole units, as many as the side that needs more |
    | coming | engines that are asked for count when they serve; those that do not within `start_timeout_s` are given
        up, and no more are asked for in a pause that doubles |
    | settle | a side becomes smaller only to the largest number of the last `settle_s`. What has not come delays that
        by nothing |
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._sides: dict[tuple[str, Role], _Side] = {}

    def coming(self, members: Iterable[Member], now_s: float) -> list[Coming]:
        """Note the engines that serve now. Returns the requested engines that do not serve yet."""
        members = list(members)
        groups = {member.group for member in members} | {group for group, _ in self._sides}
        coming = list[Coming]()
        for group in sorted(groups):
            for role in SIDES:
                serving = sum(
                    each.alive and each.group == group and each.on(role) for each in members
                )
                first = max(serving, self._limits.fewest[role])
                side = self._sides.setdefault(
                    (group, role), _Side(first, since_s=now_s, serving=serving, begun_s=now_s)
                )
                self._note(side, serving, now_s)
                if side.engines > serving:
                    missing = side.engines - serving
                    coming.append(Coming(group, role, missing, side.since_s))
        return coming

    def _note(self, side: _Side, serving: int, now_s: float) -> None:
        side.since_s = min(side.since_s, now_s)  # the clock jumped back
        if serving > side.serving:
            side.failures, side.since_s = 0, now_s
            # An operator's engine, or one that was given up and came all the same: the policy says if it stays.
            side.engines = max(side.engines, serving)
        elif serving < side.serving:
            side.since_s = now_s  # an engine died or was stopped: its successor has its own time
        side.serving = serving
        missing, limit_s = side.engines - serving, self._limits.start_timeout_s
        if missing > 0 and now_s - side.since_s > limit_s:
            self._give_up(side, missing, f"did not come within {limit_s:.0f} s", now_s)

    def _give_up(self, side: _Side, missing: int, what: str, now_s: float) -> None:
        """Give up engines that did not come. Engines that were requested together fail together, so within a pause this
        counts once."""
        if now_s >= side.again_s or not side.failures:
            side.failures += 1
            side.again_s = now_s + doubled_s(AGAIN_S, side.failures - 1, LONGEST_AGAIN_S)
        side.engines -= missing
        side.cause = f"{missing} that were asked for {what} (failure {side.failures} in a row)"

    def failed(self, group: str, role: Role, now_s: float) -> None:
        """An engine of this side could not be started: it is not waited for any longer."""
        side = self._sides.get((group, role))
        if side is not None and side.engines > side.serving:
            self._give_up(side, 1, "could not be started", now_s)

    def settle(
        self,
        proposals: Sequence[Scale],
        members: Collection[Member],
        pinned: Collection[str],
        now_s: float,
    ) -> list[Scale]:
        """The number of engines of each side now. Call `coming` before, at the same time."""
        for scale in self._whole(proposals):
            side = self._sides.get((scale.group, scale.role))
            if side is not None:
                self._propose(side, scale, self._pins(scale, members, pinned), now_s)
        for (
            _,
            role,
        ), side in self._sides.items():  # also if no engine is alive, and nothing is proposed
            if side.engines < (fewest := self._limits.fewest[role]) and now_s >= side.again_s:
                side.engines, side.since_s = fewest, now_s
        return [
            Scale(group, role, side.engines, side.cause)
            for (group, role), side in self._sides.items()
        ]

    def _pins(self, scale: Scale, members: Iterable[Member], pinned: Collection[str]) -> int:
        return sum(
            each.name in pinned and each.group == scale.group and each.on(scale.role)
            for each in members
        )

    def _propose(self, side: _Side, scale: Scale, pins: int, now_s: float) -> None:
        limits, role = self._limits, scale.role
        engines = max(limits.fewest[role], pins, min(limits.most[role], scale.engines))
        side.proposals.append((now_s, engines, scale.cause))
        while len(side.proposals) > 1 and side.proposals[0][0] <= now_s - limits.settle_s:
            side.proposals.popleft()
        if engines > side.engines:
            if now_s >= side.again_s:
                side.engines, side.cause, side.since_s = engines, scale.cause, now_s
        elif now_s - side.begun_s >= limits.settle_s:
            _, largest, cause = max(side.proposals, key=lambda proposal: proposal[1])
            if largest < side.engines:
                side.engines, side.cause = largest, cause

    def _whole(self, proposals: Sequence[Scale]) -> list[Scale]:
        """Proposals in whole units: those of a group with the larger number of units."""
        unit = self._limits.unit
        if not unit:
            return list(proposals)
        units, (fewest, most) = dict[str, Scale](), self._limits.units
        counts = dict[str, int]()
        for scale in proposals:
            count = max(fewest, min(most, -(-scale.engines // unit[scale.role])))
            if count > counts.get(scale.group, -1):
                counts[scale.group], units[scale.group] = count, scale
        return [
            Scale(group, role, counts[group] * unit[role], scale.cause)
            for group, scale in units.items()
            for role in SIDES
        ]
