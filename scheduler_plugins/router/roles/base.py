# SPDX-License-Identifier: Apache-2.0
"""The interface of role policies. The live router and the simulator call it.

| name | what it is |
|---|---|
| `RolePolicy` | decides which engines change their role |
| `Fleet` | all that a role policy knows |
| `Member`, `Front` | an engine of the fleet, and requests that wait in the router |
| `Move`, `Scale` | the decisions |
| `Coming` | engines that were asked for and do not serve yet |
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


class Scale(NamedTuple):
    """Have this number of engines on a side of a group: start what is missing, stop what is too much."""

    group: str
    role: Role  # `PREFILL` or `DECODE`
    engines: int  # in all; those that serve, come or are pinned are part of it
    cause: str  # a sentence with its numbers, for logs


class Coming(NamedTuple):
    """Engines of a side that were requested and do not serve yet. They count when they serve."""

    group: str
    role: Role
    engines: int
    since_s: float  # when the last of them was asked for, or has come


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
    coming: Sequence[Coming] = ()
    start_s: float = 60.0  # from the wish for an engine until it serves
    usual_per_s: Mapping[str, float] = {}
    """Requests a second that earlier days had at the time when an engine would serve that is asked for now, by group.
    Groups without an entry are not known for two days."""


class RolePolicy(ABC):
    """Decides which engines change their role, and how many there are.

    The controller calls it about once a second. It hides its guards from the policy: an engine that must not move now
    has only its present role in `may`. A policy proposes; the controller checks each proposal again.
    """

    route: ClassVar[str] = ""
    """The route policy that belongs to it, used if the user names none; empty: the router's default."""

    scales: ClassVar[bool] = False
    """Whether it proposes `Scale`. Then each group needs `max_prefill` and `max_decode`. A `Scale` of another policy is
    refused."""

    @abstractmethod
    def decide(self, fleet: Fleet, now_s: float) -> Sequence[Move | Scale]:
        """Moves that would help, the most useful first, and numbers of engines. No I/O, no clock, no randomness.

        Only the first move of each group is carried out. The next call sees the new fleet. A number of engines holds
        until the next one for that side.
        """
