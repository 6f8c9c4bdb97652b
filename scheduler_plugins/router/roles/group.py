# SPDX-License-Identifier: Apache-2.0
"""Common base of role policies: a group's two sides, how near each is to its promise, and how much work it has."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import NamedTuple

from scheduler_plugins.cost.closed import FILL, largest_batch, prompt_s, token_s
from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.router.policies.base import ASSUMED_TPOT_S, ASSUMED_TTFT_S, Role
from scheduler_plugins.router.roles.base import Fleet, Front, Member, Move, RolePolicy
from scheduler_plugins.router.roles.history import History, Seen

PROMISE_S = 60.0
"""SLOs are read from the arrivals within this time."""
TOLD_S = 10.0
"""If decode costs are unknown, the time per token comes from the answers that ended within this time."""
LEAST_ANSWERS = 10
"""A mean length of fewer answers than this says little: answers of a longer time count then."""


class Work(NamedTuple):
    """Engines that a group's load keeps busy, on each side. 2.5: two and a half engines."""

    prefill: float
    decode: float

    def fullest(self, prefill: int, decode: int) -> float:
        """Utilisation of the fuller side, with this number of engines on each side."""
        return max(self.prefill / max(prefill, 1e-9), self.decode / max(decode, 1e-9))


@dataclass(frozen=True)
class Group:
    """The engines of a group that are alive, and what is known of its requests, at one time."""

    name: str
    members: Sequence[Member]
    history: History
    front: Front
    now_s: float
    _seen: dict[float, Seen] = field(default_factory=dict)

    @cached_property
    def prefill(self) -> list[Member]:
        """Engines that serve prefill."""
        return [member for member in self.members if member.on(Role.PREFILL)]

    @cached_property
    def decode(self) -> list[Member]:
        """Engines that serve decode."""
        return [member for member in self.members if member.on(Role.DECODE)]

    def mover(
        self, source: Role, target: Role, rank: Callable[[Member], object] | None = None
    ) -> Member | None:
        """The emptiest engine of role `source` that can get role `target` now; None if there is none."""
        able = [member for member in self.members if member.role is source and target in member.may]
        return min(able, key=rank or _emptiness, default=None)  # type: ignore[arg-type]

    def seen(self, seconds: float) -> Seen:
        """What happened in the last seconds."""
        sums = self._seen.get(seconds)
        if sums is None:
            sums = self._seen[seconds] = self.history.over(self.now_s, seconds, self.name)
        return sums

    @cached_property
    def promises(self) -> tuple[float, float]:
        """TTFT and TPOT in seconds, promised or assumed."""
        seen = self.seen(PROMISE_S)
        ttft_s, tpot_s = seen.ttft_slo_s, seen.tpot_slo_s
        return (
            ttft_s if ttft_s < inf else ASSUMED_TTFT_S,
            tpot_s if tpot_s < inf else ASSUMED_TPOT_S,
        )

    @cached_property
    def costs(self) -> CostModel:
        """Mean costs of the engines whose decode costs are known; of all engines if none are."""
        every = [member.view.costs for member in self.members]
        return CostModel.mean([costs for costs in every if costs.knows_decode] or every)

    def prefill_pressure(self, fewer: int = 0) -> float:
        """Seconds of queued prompts for each prefill engine, front included, as a part of the promised TTFT.

        `fewer`: computed as if this number of engines had left, and the others had taken over their queues.
        """
        side = self.prefill
        if len(side) <= fewer:
            return inf
        queued_s = sum(member.view.queued_s(self.now_s) for member in side)
        queued_s += self.front.tokens * self.costs.a
        return queued_s / (len(side) - fewer) / self.promises[0]

    def decode_pressure(self, fewer: int = 0) -> float:
        """The larger of: time per token as a part of the promise, KV in use as a part of the room.

        `fewer`: computed as if this number of engines had left, and the others had taken over their sequences.
        """
        side = self.decode
        if len(side) <= fewer:
            return inf
        spread = len(side) / (len(side) - fewer)
        parts = [decode_part(member, self.promises[1], spread) for member in side]
        measured = self.seen(TOLD_S).tpot_ratio if not self.costs.knows_decode else 0.0
        return max(sum(parts) / len(parts), measured)

    def work(self, seconds: float) -> Work | None:
        """The load of the last seconds, and at least the sequences that decode now; None as in `mean_work`."""
        mean = self.mean_work(seconds)
        if mean is None:
            return None
        return mean._replace(decode=max(mean.decode, self.decoding()))

    def mean_work(self, seconds: float) -> Work | None:
        """The load of the requests that came in the last seconds; None if no request has ended or costs of decode are
        unknown."""
        seen, each = self.seen(seconds), self.mix(seconds)
        if each is None:
            return None
        per_s = seen.arrivals / max(1.0, seen.seconds)
        return Work(each.prefill * per_s, each.decode * per_s)

    def mix(self, seconds: float) -> Work | None:
        """Seconds of an engine, on each side, for the mean request of the last seconds; None as in `mean_work`."""
        seen, costs, longer = self.seen(seconds), self.costs, self.seen(max(seconds, PROMISE_S))
        if not (seen.arrivals and longer.prefills and longer.answers and costs.knows_decode):
            return None
        prompt = seen.tokens / seen.arrivals
        # Hits and answers are known when requests end, prompts when they arrive.
        uncached = min(prompt, longer.uncached / longer.prefills)
        spread = longer.squares * longer.prefills / max(1.0, longer.uncached) ** 2
        ended = seen if seen.answers >= LEAST_ANSWERS else longer
        answer = ended.answered / ended.answers
        return Work(prompt_s(costs, uncached, spread), answer * self.token_s(prompt + answer / 2))

    def decoding(self) -> float:
        """Number of decode engines that the present sequences keep busy, including sequences that wait for room."""
        busy = 0.0
        for member in self.decode:
            batch = member.view.batch
            if batch:
                busy += batch / self.largest_batch(member.view.context / batch)
        return busy

    def token_s(self, context: float) -> float:
        """Seconds of one engine for one token, at the largest batch. `context`: mean tokens of a sequence."""
        return token_s(self.costs, context, self.largest_batch(context))

    def largest_batch(self, context: float) -> float:
        """The largest batch of an engine that keeps promise and room, with `context` tokens a sequence."""
        _, tpot_s = self.promises
        return largest_batch(self.costs, context, tpot_s=tpot_s, room_tokens=self._room)

    @cached_property
    def _room(self) -> float:
        """Mean room of a decode engine, as far as sequences fill it; infinite if unknown."""
        room = [tokens for member in self.decode if (tokens := _room(member)) < inf]
        return FILL * sum(room) / len(room) if room else inf


class GroupPolicy(RolePolicy):
    """A role policy that looks at one group at a time, and proposes one move at the most."""

    def decide(self, fleet: Fleet, now_s: float) -> list[Move]:
        return [move for group in groups(fleet, now_s) if (move := self.move(group)) is not None]

    @abstractmethod
    def move(self, group: Group) -> Move | None:
        """The move that would help this group."""


def groups(fleet: Fleet, now_s: float) -> list[Group]:
    """The groups of a fleet that have engines alive."""
    members = dict[str, list[Member]]()
    for member in fleet.members:
        if member.alive:
            members.setdefault(member.group, []).append(member)
    return [
        Group(name, alive, fleet.history, fleet.front.get(name, Front()), now_s)
        for name, alive in members.items()
    ]


def _emptiness(member: Member) -> tuple[int, int, int]:
    view = member.view
    return (view.prefills, view.context, view.open_requests)


def _room(member: Member) -> float:
    """KV tokens that the engine can hold for decodes; infinite if unknown."""
    return member.view.context + max(0.0, member.view.free_kv)


def decode_part(member: Member, tpot_s: float, spread: float = 1.0) -> float:
    """How near a decode engine is to its promise or its room. `spread`: factor of its number of sequences."""
    view = member.view
    step_s = 0.0
    if view.costs.knows_decode and view.batch:
        step_s = view.costs.decode_step_s(round(view.batch * spread), round(view.context * spread))
    room = _room(member)
    used = view.context * spread / room if 0 < room < inf else 0.0
    return max(step_s / tpot_s, used)
