# SPDX-License-Identifier: Apache-2.0
"""The interface of role policies. The live router and the simulator call it.

| name | what it is |
|---|---|
| `RolePolicy` | decides which engines change their role |
| `Fleet` | all that a role policy knows |
| `Member`, `Front` | an engine of the fleet, and requests that wait in the router |
| `Move` | the decision |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

from scheduler_plugins.router.policies.base import EngineView, Role
from scheduler_plugins.router.roles.history import History


class Move(NamedTuple):
    """Give an engine another role."""

    engine: str  # its name
    role: Role
    cause: str  # a sentence with its numbers, for logs


class Member(NamedTuple):
    """An engine, and what the controller may do with it."""

    view: EngineView
    role: Role  # present role; of a moving engine, the role it moves to
    home: Role  # the role in the file
    may: frozenset[Role]  # roles that it may have
    group: str = ""  # roles are balanced within a group
    since_s: float = 0.0  # when it got its role
    alive: bool = True
    moving: bool = False  # the router is carrying out a move of it

    @property
    def name(self) -> str:
        return self.view.name

    def on(self, side: Role) -> bool:
        """Whether it serves this side: `PREFILL` or `DECODE`. `BOTH` serves both."""
        return self.role is side or self.role is Role.BOTH


class Front(NamedTuple):
    """Requests of a group that wait in the router and not at an engine."""

    requests: int = 0
    tokens: int = 0  # of their prompts
    oldest_s: float = 0.0  # how long the oldest has waited


class Fleet(NamedTuple):
    """All that a role policy knows."""

    members: Sequence[Member]  # always in the same order
    history: History
    front: Mapping[str, Front] = {}  # by group; groups without an entry have nothing waiting


class RolePolicy(ABC):
    """Decides which engines change their role.

    The controller calls it about once a second. It hides its guards from the policy: an engine that must not move now
    has only its present role in `may`. A policy proposes; the controller checks each proposal again.
    """

    route: ClassVar[str] = ""
    """The route policy that belongs to it, used if the user names none; empty: the router's default."""

    @abstractmethod
    def decide(self, fleet: Fleet, now_s: float) -> list[Move]:
        """Moves that would help, the most useful first. No I/O, no clock, no randomness.

        Only the first move of each group is carried out. The next call sees the new fleet.
        """
