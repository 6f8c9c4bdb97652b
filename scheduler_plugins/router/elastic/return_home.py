# SPDX-License-Identifier: Apache-2.0
"""Decides when SGLang engines are switched to the side that the settings, or a pin, give them."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import NamedTuple

from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.pool import EnginePool
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.roles.base import Move
from scheduler_plugins.router.roles.controller import DWELL_S, pause_s

logger = logging.getLogger(__name__)

_Wish = tuple[str, Role]  # an engine's name, and the side that it should be on


class _Failure(NamedTuple):
    again_s: float  # when it is tried again
    failures: int  # in a row
    problem: str


class ReturnHome:
    """Has engines switched one by one on each side of a group, so that requests find others meanwhile.

    The caller carries out each move that `moves` returns, and then calls `done` or `failed`, as for a `RoleController`.
    """

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._failures: dict[_Wish, _Failure] = {}
        self._logged: set[_Wish] = set()  # wishes for which the log has named another router

    def moves(self, now_s: float) -> list[Move]:
        """Switches to begin now. Only the leading router begins switches."""
        wishes: dict[_Wish, BackendEngine] = {
            (engine.name, engine.role_state.switch_to): engine
            for engine in self._pool.engines
            if engine.role_state.switch_to is not None
            and engine.up
            and engine.switches
            and not self._pool.leaves(engine)
        }
        self._failures = {wish: kept for wish, kept in self._failures.items() if wish in wishes}
        for wish, failure in self._failures.items():
            wishes[wish].role_state.problem = failure.problem
        self._logged &= wishes.keys()
        if not self._pool.leads:
            self._leave_to_others(wishes.keys())
            return []
        due = {wish: engine for wish, engine in wishes.items() if self._is_due(wish, now_s)}
        begun = self._one_of_each_side(list(due.values()), wishes.values())
        return [
            Move(name, role, _why(engine, role))
            for (name, role), engine in due.items()
            if engine in begun
        ]

    def done(self, engine: str, now_s: float) -> None:
        """The engine is where it should be."""

    def failed(self, engine: str, now_s: float, cause: str) -> None:
        """The move failed. It is tried again after a pause, which doubles with each failure in a row."""
        for candidate in self._pool.engines:
            if candidate.name != engine or candidate.role_state.switch_to is None:
                continue
            wish = (engine, candidate.role_state.switch_to)
            before = self._failures.get(wish)
            count = 1 if before is None else before.failures + 1
            wait_s = pause_s(count, DWELL_S)
            again = (
                f"the switch to {candidate.role_state.switch_to} is tried again after {wait_s:g} s"
            )
            self._failures[wish] = _Failure(
                now_s + wait_s, count, f"{candidate.url}: {cause}; {again}"
            )
            logger.info("%s: %s", candidate.url, again)

    def _is_due(self, wish: _Wish, now_s: float) -> bool:
        failure = self._failures.get(wish)
        return failure is None or now_s >= failure.again_s

    def _one_of_each_side(
        self, due: Collection[BackendEngine], all_wanted: Collection[BackendEngine]
    ) -> set[BackendEngine]:
        """The switches to begin with: one on each side that keeps another engine. If no side keeps one, all switches
        begin, because waiting would not help. A group with a failed switch waits: a swap must not be half done."""
        moving = {
            _side(candidate) for candidate in all_wanted if candidate.role_state.moving is not None
        }
        first = dict[tuple[str, Role], BackendEngine]()
        for engine in due:
            if engine.role_state.moving is None and _side(engine) not in moving:
                first.setdefault(_side(engine), engine)
        able = {candidate for candidate in first.values() if self._has_another(candidate)}
        if able or moving:
            return able
        failed = {_side(candidate)[0] for candidate in all_wanted if candidate not in due}
        return {candidate for (group, _), candidate in first.items() if group not in failed}

    def _has_another(self, engine: BackendEngine) -> bool:
        group, role = _side(engine)
        return any(
            other is not engine
            and other.up
            and other.serves(role)
            and other.role_state.place.group == group
            and not (other.draining or other.role_state.moving)
            for other in self._pool.engines
        )

    def _leave_to_others(self, wishes: Collection[_Wish]) -> None:
        for url, role in sorted(set(wishes) - self._logged):
            logger.info(
                "%s: the settings say %s. Another router decides on roles (or no router of --fellows sends messages). It "
                "switches the engine when its own settings say the same",
                *(url, role),
            )
            self._logged.add((url, role))


def _why(engine: BackendEngine, role: Role) -> str:
    return (
        f"an operator has pinned it to {role}"
        if engine.role_state.pinned
        else f"its role in the settings is {role}"
    )


def _side(engine: BackendEngine) -> tuple[str, Role]:
    return engine.role_state.place.group, engine.role
