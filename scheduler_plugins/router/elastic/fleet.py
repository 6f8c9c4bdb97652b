# SPDX-License-Identifier: Apache-2.0
"""The engines of a group as role policies see them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.kinds import Kind
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.roles.base import Member
from scheduler_plugins.router.settings.elastic import MOVABLE

logger = logging.getLogger(__name__)


class Groups:
    """Makes groups of the pool's engines. Each problem is logged once, until it has passed."""

    def __init__(self) -> None:
        self._said = set[str]()

    def of(
        self, engines: Iterable[BackendEngine], *, every: bool = False
    ) -> dict[str, list[Member]]:
        """The members of each group that a policy may change. A group with two models is left out.

        Args:
            every: also groups none of whose engines may move, for a policy that starts and stops engines.
        """
        groups = dict[str, list[BackendEngine]]()
        problems = set[str]()
        for engine in engines:
            if engine.whole and engine.up and engine.role_state.place.may:
                problems.add(
                    f"{engine.url} is never moved: it is an SGLang engine that works alone; start it with "
                    "--disaggregation-mode and --enable-pd-role-switch, or take `may` out"
                )
            if engine.role in MOVABLE and not engine.whole:
                groups.setdefault(engine.role_state.place.group, []).append(engine)
        movable = {}
        for name, members in groups.items():
            if not every and not any(member.role_state.place.may for member in members):
                continue
            if problem := _two_models(name, members):
                problems.add(problem)
                continue
            movable[name] = [_member(engine) for engine in members]
            if not every:
                problems.update(filter(None, [_all_on_both_sides(name, members)]))
            problems.update(filter(None, map(_cannot, members)))
        for problem in sorted(problems - self._said):
            logger.warning("%s", problem)
        self._said = problems
        return movable


def _member(engine: BackendEngine) -> Member:
    role_state = engine.role_state
    place, moving = role_state.place, role_state.moving
    if moving is None and engine.switches and not role_state.problem:
        moving = role_state.switch_to  # the settings win over a policy
    home = role_state.home(engine.role)
    allowed = place.may | {home} if place.may and role_state.switch_to is None else frozenset()
    return Member(
        engine,
        moving or engine.role,
        home,
        (allowed & engine.able) | {engine.role},
        place.group,
        role_state.since_s,
        engine.up and not engine.draining,
        moving is not None,
    )


def _cannot(engine: BackendEngine) -> str:
    """Why an engine cannot take a role that the settings allow it; empty: it can take all, or its roles are unknown."""
    place = engine.role_state.place
    lacking = sorted(place.may - engine.able - {engine.role})
    sglang = engine.kind is Kind.SGLANG
    identified = engine.up and engine.kind is not None and (sglang or engine.handover_known)
    if not lacking or not identified or engine.role_state.problem:  # the log has said the problem
        return ""
    if not sglang:
        limit = "decodes only (kv_consumer, or no PDConnector)"
        if engine.addresses:
            limit = "prefills only (kv_producer)"
        do = 'start it with PDConnector and "kv_role": "kv_both"'
    elif engine.switches:
        limit, do = (
            "is an SGLang engine, which has one side",
            f"take {', '.join(lacking)} out of `may`",
        )
    else:
        limit, do = "is an SGLang engine with a fixed side", "start it with --enable-pd-role-switch"
    return f"{engine.url} is never moved to {', '.join(lacking)}: it {limit}; {do}"


def _all_on_both_sides(group: str, engines: Sequence[BackendEngine]) -> str:
    """Why no policy of ours finds an engine to move; empty: it may find one."""
    if any(engine.role_state.home(engine.role) is not Role.BOTH for engine in engines):
        return ""
    return (
        f"group {group}: no engine of it is moved, because each serves both sides already; name each on one side "
        "(--prefill or --decode, role in the file), which is then its home"
    )


def _two_models(group: str, engines: Sequence[BackendEngine]) -> str:
    """Why the engines of a group cannot stand in for each other; empty: they can."""
    models = {engine.model for engine in engines if engine.model}
    if len(models) < 2:
        return ""
    return (
        f"group {group}: no engine of it is moved, because it has several models ({', '.join(sorted(models))}); give "
        "the engines of each model a group of their own"
    )
