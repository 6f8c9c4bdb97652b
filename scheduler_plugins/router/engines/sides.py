# SPDX-License-Identifier: Apache-2.0
"""The side that an SGLang engine is on, beside the side that it should be on.

The router sends requests for the side that the engine reports, because it cannot serve the other side. If the sides
differ, the router has the engine switched, or reports why it cannot.
"""

from __future__ import annotations

import logging

from scheduler_plugins.router.engines.engine import BackendEngine, Role
from scheduler_plugins.router.engines.kinds import SglangFacts
from scheduler_plugins.router.settings.elastic import Moving

logger = logging.getLogger(__name__)

_SIDES = (Role.PREFILL, Role.DECODE)


def settle(
    engine: BackendEngine, facts: SglangFacts | None, moving: Moving | None, now_s: float
) -> None:
    """Use the engine on the side that it reports, and note the side that it should be switched to.

    It is switched if its entry in the settings was edited, if it is pinned, if it was on the other side before a
    restart, or if a role policy may move it. If another program has switched it, it stays on that side.

    Args:
        facts: the engine's latest report; None: it is not an SGLang engine, and serves any side at once.
        moving: the policy that moves engines; None: none.
    """
    role_state, before = engine.role_state, engine.role
    if facts is None or facts.mode not in _SIDES:
        if role_state.switch_to is not None:
            engine.change_role(role_state.switch_to, now_s)
        role_state.switch_to, role_state.problem = None, ""
        return
    if facts.switches and not facts.tells_side:
        _say(engine, _untold(engine, facts.mode))
        return
    side = Role(facts.mode)
    if role_state.place.home is None:
        role_state.reported_home = Role(facts.started)
    if _side(before) is not side:
        engine.change_role(side, now_s)
    elif role_state.switch_to is None and not role_state.problem:
        return
    if role_state.moving is not None:
        return  # what moves it decides
    wish = role_state.switch_to or (before if role_state.pinned else role_state.home(side))
    decided = role_state.switch_to is not None
    role_state.switch_to = None
    if _side(wish) is side:
        _say(engine, "")
    elif wish not in _SIDES:
        _say(
            engine,
            f"{engine.url}: is a {side} engine, but the settings say {wish}, so it is used for {side}. An SGLang engine "
            f"has one side: name it as prefill or as decode",
        )
    elif not decided and facts.started != side:
        kept = moving is not None and side in role_state.place.may
        _say(engine, "" if kept else _switched_by_others(engine, side, wish))
    else:
        restarted = engine.starts > 0 and before is wish
        permitted = _permits(engine, moving)
        if decided or role_state.pinned or restarted or not permitted:
            role_state.switch_to, permitted = wish, ""
        flag = "" if engine.switches else "start it with --enable-pd-role-switch"
        _say(
            engine,
            _in_the_way(
                engine, side, wish, [obstacle for obstacle in (flag, permitted) if obstacle]
            ),
        )


def _side(role: Role) -> Role:
    return Role.PREFILL if role is Role.CPU_PREFILL else role


def _permits(engine: BackendEngine, moving: Moving | None) -> str:
    """What the settings lack to let the router switch the engine without an edit; empty: nothing."""
    if not engine.role_state.place.may:
        return "give it `may: [prefill, decode]`"
    if moving is None or moving.dry_run:
        return "set `roles` to a policy (`fixed` moves nothing later)"
    return ""


def _in_the_way(engine: BackendEngine, side: Role, wish: Role, lacking: list[str]) -> str:
    if not lacking:
        return ""
    return (
        f"{engine.url}: is a {side} engine, but the settings say {wish}, so it is used for {side}. For the router to "
        f"switch it, {' and '.join(lacking)}. Or start it with --disaggregation-mode {wish}, or name it as {side}"
    )


def _switched_by_others(engine: BackendEngine, side: Role, wish: Role) -> str:
    return (
        f"{engine.url}: was switched to {side} while it ran, but the settings say {wish}; it is used for {side}. Switch "
        f"it back by POST /engines/role, or name it as {side}"
    )


def _untold(engine: BackendEngine, started: str) -> str:
    """The engine reports only the side of its start."""
    if engine.role_state.switch_to or started == _side(engine.role):
        return ""
    return (
        f"{engine.url}: was started with --disaggregation-mode {started}, but the settings say {engine.role}. It does "
        f"not tell whether it was switched since, so it is used for {engine.role}. Start it with "
        "--disaggregation-transfer-backend pd_connector, which tells, or name it on the right side"
    )


def _say(engine: BackendEngine, problem: str) -> None:
    """Record the problem with the engine's side, and log it once."""
    if problem and problem != engine.role_state.problem:
        logger.warning("%s", problem)
    engine.role_state.problem = problem
