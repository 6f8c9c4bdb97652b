# SPDX-License-Identifier: Apache-2.0
"""Starts and stops engines of a simulated cluster, as a controller says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.roles.base import Scale
from scheduler_plugins.sim.node import Node


class Scaled(NamedTuple):
    """A change of the number of engines that a side shall have."""

    at_s: float
    before: int
    scale: Scale


@dataclass(frozen=True, kw_only=True)
class Starts:
    """How engines start."""

    make: Callable[[str, Role], Node]
    """Makes an idle engine of this name and role."""
    start_s: float = 60.0
    """From the wish for an engine until it serves."""
    come: bool = True
    """If False, no engine that is started ever serves."""
    usual_per_s: Callable[[float], float] | None = None
    """Requests a second that earlier days had at a time; None: there are no earlier days."""


@dataclass
class _Run:
    """An engine's time, from its start until it has ended."""

    node: Node | None  # None: it does not serve yet
    role: Role
    begun_s: float
    ended_s: float = inf


@dataclass
class Scaler:
    """Carries out numbers of engines: starts some, or drains the emptiest and lets them leave when they are idle."""

    starts: Starts
    nodes: Mapping[str, Node]
    join: Callable[[Node, float], None]
    drain: Callable[[Node, bool, float], None]
    """Called with an engine, whether it drains, and the time."""
    leave: Callable[[Node, float], bool]
    """Lets an engine leave if it is idle; returns whether it was."""
    scaled: list[Scaled] = field(default_factory=list)
    """Changes so far."""

    def __post_init__(self) -> None:
        self._runs = [_Run(node, node.role, 0.0) for node in self.nodes.values()]
        self._numbers = Counter(node.role for node in self.nodes.values())
        self._engines: dict[Role, int] = dict(self._numbers)

    def engine_s(self, until_s: float) -> float:
        """Seconds of all engines up to a time, their starts included."""
        return sum(max(0.0, min(until_s, run.ended_s) - run.begun_s) for run in self._runs)

    def advance(self, now_s: float) -> None:
        """Let engines serve that have started, and those leave that are idle."""
        for run in self._runs:
            if run.ended_s < inf:
                continue
            if run.node is None and self.starts.come and now_s - run.begun_s >= self.starts.start_s:
                run.node = self._made(run.role)
                self.join(run.node, now_s)
            elif run.node is not None and run.node.draining and self.leave(run.node, now_s):
                run.ended_s = now_s

    def _made(self, role: Role) -> Node:
        name = f"{role[0]}{self._numbers[role]}"
        self._numbers[role] += 1
        return self.starts.make(name, role)

    def carry_out(self, scales: Sequence[Scale], now_s: float) -> None:
        """Have this number of engines on each side."""
        for scale in scales:
            before = self._engines.get(scale.role, 0)
            if scale.engines != before:
                self.scaled.append(Scaled(now_s, before, scale))
                self._engines[scale.role] = scale.engines
            self._reach(scale.role, scale.engines, now_s)

    def _reach(self, role: Role, engines: int, now_s: float) -> None:
        runs = [run for run in self._runs if run.role is role and run.ended_s == inf]
        starting = [run for run in runs if run.node is None]
        serving = [run.node for run in runs if run.node is not None and not run.node.draining]
        draining = [run.node for run in runs if run.node is not None and run.node.draining]
        missing = engines - len(starting) - len(serving)
        for node in draining[: max(0, missing)]:
            self.drain(node, False, now_s)
            missing -= 1
        for _ in range(missing):
            self._runs.append(_Run(None, role, now_s))
        while missing < 0 and starting:
            starting.pop().ended_s = now_s
            missing += 1
        serving.sort(key=lambda node: (node.open_requests, node.context))
        for node in serving[: max(0, -missing)]:
            self.drain(node, True, now_s)
