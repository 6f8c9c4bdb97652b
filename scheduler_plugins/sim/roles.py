# SPDX-License-Identifier: Apache-2.0
"""The role controller of a simulated cluster: when it is asked, what it is told, and what it changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from typing import NamedTuple

from scheduler_plugins.router.policies.added import PolicyError
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.roles.base import Fleet, Front, Member, Move
from scheduler_plugins.router.roles.controller import RoleController
from scheduler_plugins.router.roles.history import KEPT_S, History
from scheduler_plugins.sim.engine import ARRIVAL
from scheduler_plugins.sim.journey import Journey
from scheduler_plugins.sim.node import Node
from scheduler_plugins.sim.scaling import Scaler
from scheduler_plugins.sim.timeline import Timeline

EVERY_S = 1.0
"""Time between two questions to the controller."""
GROUP = ""
"""All engines of a simulated cluster are one group."""
_ABLE = frozenset((Role.PREFILL, Role.DECODE, Role.BOTH))


class Moved(NamedTuple):
    """A move that was carried out."""

    at_s: float
    before: Role
    move: Move


class Roles:
    """Tells a controller what happens, as the live router does, and carries out its moves at once."""

    def __init__(
        self, nodes: Mapping[str, Node], set_role: Callable[[str, Role, float], None]
    ) -> None:
        """`set_role`: called with an engine's name, its new role and the time."""
        self.controller: RoleController | None = None
        self.moved: list[Moved] = []
        self.scaler: Scaler | None = None
        """Starts and stops engines; None: their number stays."""
        self._nodes = nodes
        self._set_role = set_role
        self._history = History()
        self._since_s: dict[str, float] = {}
        self._home: dict[str, Role] = {}
        self._waiting: dict[str, Journey] = {}

    def arrived(self, journey: Journey, now_s: float) -> None:
        """A request came."""
        if self.controller is not None:
            request = journey.request
            self._history.arrived(
                now_s, GROUP, request.tokens, request.ttft_slo_s, request.tpot_slo_s
            )

    def waits(self, journey: Journey) -> None:
        """A request waits in the router."""
        self._waiting[journey.waiting.id] = journey

    def left(self, journey: Journey) -> None:
        """A request no longer waits in the router."""
        self._waiting.pop(journey.waiting.id, None)

    def refused(self, now_s: float) -> None:
        """A request was refused."""
        if self.controller is not None:
            self._history.refused(now_s, GROUP)

    def first_token(self, journey: Journey) -> None:
        """A request got its first token."""
        record = journey.record
        if self.controller is not None and record.first_token_s is not None:
            uncached = record.request.tokens - record.cached_tokens
            self._history.prefilled(
                record.first_token_s, GROUP, uncached, record.ttft_s, journey.request.ttft_slo_s
            )

    def ended(self, journey: Journey) -> None:
        """A request got its last token."""
        record = journey.record
        if self.controller is not None and record.end_s is not None:
            tokens, slo_s = record.request.max_tokens, journey.request.tpot_slo_s
            self._history.answered(record.end_s, GROUP, tokens, record.tpot_s, slo_s)

    def tick(self, now_s: float) -> None:
        """Ask the controller, and carry out its moves. Raises PolicyError if its policy fails."""
        assert self.controller is not None
        if self.scaler is not None:
            self.scaler.advance(now_s)
        moves = self.controller.moves(self._fleet(now_s), now_s)
        if fault := self.controller.fault:
            raise PolicyError(f"role policy at {now_s:.0f} s: {fault!r}") from fault
        for move in moves:
            self.moved.append(Moved(now_s, self._nodes[move.engine].role, move))
            self._set_role(move.engine, move.role, now_s)
            self._since_s[move.engine] = now_s
            self.controller.done(move.engine, now_s)
        if self.scaler is not None:
            self.scaler.carry_out(self.controller.scales, now_s)

    def _fleet(self, now_s: float) -> Fleet:
        waiting = self._waiting.values()
        oldest_s = max((now_s - journey.waiting.arrival_s for journey in waiting), default=0.0)
        tokens = sum(journey.waiting.tokens for journey in waiting)
        front = {GROUP: Front(len(self._waiting), tokens, oldest_s)}
        members = [self._member(node) for node in self._nodes.values() if not node.draining]
        fleet = Fleet(members, self._history, front)
        if self.scaler is None:
            return fleet
        starts = self.scaler.starts
        usual = starts.usual_per_s
        usual_per_s = {} if usual is None else {GROUP: usual(now_s + starts.start_s)}
        return fleet._replace(start_s=starts.start_s, usual_per_s=usual_per_s)

    def _member(self, node: Node) -> Member:
        home = self._home.setdefault(node.name, node.role)
        return Member(
            view=node,
            role=node.role,
            home=home,
            may=_ABLE if home in _ABLE else frozenset([home]),
            group=GROUP,
            since_s=self._since_s.get(node.name, 0.0),
            alive=node.up,
        )


IDLE_S = 2.0 * KEPT_S
"""The questions stop when nothing has happened for this time, until something does. A policy has forgotten all requests
by then, and engines that were lent have gone home. A trace with an idle month would otherwise be millions of questions."""


class Ticks:
    """Calls a function every few seconds."""

    def __init__(
        self,
        timeline: Timeline,
        every_s: float,
        ask: Callable[[float], None],
        goes_on: Callable[[], bool],
    ) -> None:
        """`goes_on`: whether requests are under way or to come."""
        self._timeline = timeline
        self._every_s = every_s
        self._ask = ask
        self._goes_on = goes_on
        self._busy_s = self._last_s = 0.0
        self._asleep = True

    def wake(self, now_s: float) -> None:
        """Something happens at this time. Goes on if the questions had stopped."""
        self._busy_s = now_s
        if self._asleep:
            self._asleep = False
            steps = max(1, ceil((now_s - self._last_s) / self._every_s))
            self._later(self._last_s + steps * self._every_s)

    def _later(self, at_s: float) -> None:
        self._timeline.at(at_s, ARRIVAL, self._tick)

    def _tick(self, now_s: float) -> None:
        self._last_s = now_s
        self._ask(now_s)
        if self._timeline:  # more is to happen
            self._busy_s = now_s
        if self._goes_on() and now_s - self._busy_s <= IDLE_S:
            self._later(now_s + self._every_s)
        else:
            self._asleep = True
