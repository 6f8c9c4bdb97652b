# SPDX-License-Identifier: Apache-2.0
"""State of an engine's role: its place in the settings, its present role, and who gave it that role."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.settings.elastic import DEFAULT_GROUP, Place


class Version(NamedTuple):
    """Orders the roles of an engine among several routers. The larger one holds."""

    number: int = 0  # 0: the role is its home
    router: str = ""  # that gave the role


MOST_DECISIONS = 20
"""Decisions on roles that the live page shows."""


class Decision(NamedTuple):
    """A decision to change a role, for the live page."""

    at_s: float  # on the event loop's clock, which all processes of a machine share
    engine: str
    before: str
    after: str
    why: str
    outcome: str  # `moving`, `done`, `dry run`, `given up` (the settings changed), or why it failed


@dataclass
class RoleState:
    """The role state of one engine. Changed by the pool, on the event loop only."""

    place: Place = field(default_factory=Place)
    since_s: float = 0.0
    """When the engine got its role, on the event loop's clock."""
    pinned: bool = False
    """Whether an operator gave the role. The controller leaves the engine alone until it is released."""
    moving: Role | None = None
    """The role that the engine moves to; None: it is steady."""
    switch_to: Role | None = None
    """The side that a steady SGLang engine is to be switched to; None: it is where it should be."""
    problem: str = ""
    """Why an SGLang engine is not on the side that the settings give it, and what to do. Empty: nothing is wrong."""
    version: Version = field(default_factory=Version)
    reported_home: Role | None = None
    """The role that the engine said it has, if the settings give it none."""

    def home(self, role: Role) -> Role:
        """The engine's home. `role`: its present role, used for an engine that has not reported anything yet."""
        return self.place.home or self.reported_home or role

    def allows(self, role: Role) -> bool:
        """Whether the settings let the controller give it this role."""
        return role in self.place.may or role is self.home(role)

    def describe(self, role: Role) -> dict[str, Any]:
        """The state as `/health` and the admin API show it: only fields that differ from an engine that stays at
        home."""
        place, description = self.place, dict[str, Any]()
        home = self.home(role)
        if home is not role or (place.home is not None and place.may):
            description["home"] = home
        if place.may:
            description["may"] = sorted(place.may)
        if place.group != DEFAULT_GROUP:
            description["group"] = place.group
        if self.pinned:
            description["pinned"] = True
        if self.moving is not None:
            description["moving"] = self.moving
        if self.switch_to is not None:
            description["wanted"] = self.switch_to
        if self.problem:
            description["problem"] = self.problem
        return description
