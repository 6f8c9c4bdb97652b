# SPDX-License-Identifier: Apache-2.0
"""Closed forms of fleets. They order candidates, discard none, and are never shown: in bursts they are several times too
high, and they know no caches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from scheduler_plugins.cost.closed import FILL, largest_batch, prompt_s, token_s
from scheduler_plugins.cost.engine_profile import EngineProfile
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.planner.inventory import Inventory
from scheduler_plugins.planner.mix import Mix, placed
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.sim.fleet import Fleet
from scheduler_plugins.sim.links import Network, Place


class Workload(NamedTuple):
    """Mean requests of a trace, and the promise for a token."""

    prompt: float  # tokens
    spread: float  # mean of the squared prompts, divided by the square of the mean
    answer: float  # tokens
    tpot_s: float

    @classmethod
    def of(cls, requests: Sequence[Waiting], tpot_s: float) -> Workload:
        """The workload of these requests."""
        n = len(requests)
        prompt = sum(request.tokens for request in requests) / n
        squares = sum(request.tokens**2 for request in requests) / n
        answer = sum(request.max_tokens for request in requests) / n
        return cls(prompt, squares / prompt**2, answer, tpot_s)


class Rates(NamedTuple):
    """Requests a second of one engine."""

    prefill: float
    decode: float

    @property
    def whole(self) -> float:
        """Rate of an engine that does both."""
        return 1 / (1 / self.prefill + 1 / self.decode)


def rates_of(profile: EngineProfile, load: Workload) -> Rates:
    """Rates of one engine in steady state."""
    context = load.prompt + load.answer / 2
    batch = largest_batch(
        profile.costs, context, tpot_s=load.tpot_s, room_tokens=FILL * profile.kv_tokens
    )
    return Rates(
        1 / max(1e-9, prompt_s(profile.costs, load.prompt, load.spread)),
        1 / max(1e-9, load.answer * token_s(profile.costs, context, batch)),
    )


class Bounds:
    """Closed-form rates of the mixes of an inventory."""

    def __init__(self, inventory: Inventory, load: Workload) -> None:
        self.inventory, self._load = inventory, load
        self._by_profile = dict[EngineProfile, Rates]()
        self._of = dict[Mix, float]()
        self.rates = {name: rates_of(profile, load) for name, profile in inventory.kinds.items()}

    def best_first(self, mixes: Iterable[Mix]) -> list[Mix]:
        """The mixes, the highest rate first; equal ones in an order that is the same in every run."""
        return sorted(set(mixes), key=lambda mix: (-self.of(mix), mix))

    def of(self, mix: Mix) -> float:
        """Requests a second: the slower of both sides, or the sum of engines that do both. With several nodes, the most that
        the better placement lets pass."""
        if mix not in self._of:
            rate = self._of_roles(mix)
            if self.inventory.binds and any(role is Role.PREFILL for _, role, _ in mix):
                ways = (placed(mix, self.inventory, together=way) for way in (False, True))
                rate = max((self.flow(fleet) for fleet in ways if fleet), default=0.0)
            self._of[mix] = rate
        return self._of[mix]

    def flow(self, fleet: Fleet) -> float:
        """Requests a second of prefill and decode engines on their nodes: the maximum flow over engines, links and NICs.

        KV inside a node needs no NIC, so as much as possible stays there. Then a node has engines left of one side only,
        and the rest is the smaller of what all nodes can send and what they can take.
        """
        network = fleet.network or Network()
        sides = {role: defaultdict[Place, float](float) for role in (Role.PREFILL, Role.DECODE)}
        links = {role: defaultdict[Place, float](float) for role in sides}
        for part in fleet.parts:
            rates = self._by_profile.get(part.profile) or rates_of(part.profile, self._load)
            self._by_profile[part.profile] = rates
            rate = rates.prefill if part.role is Role.PREFILL else rates.decode
            sides[part.role][part.place] += part.number * rate
            links[part.role][part.place] += part.number * network.bytes_per_s
        size = max(1.0, self._load.prompt * network.kv_bytes_per_token)
        inside, passing = 0.0, dict.fromkeys(sides, 0.0)
        for place in {part.place for part in fleet.parts}:
            here = min(side[place] for side in sides.values())
            inside += here
            for role, side in sides.items():
                most = min(links[role][place], place.nic_bytes_per_s) / size
                passing[role] += min(side[place] - here, most)
        return inside + min(passing.values())

    def _of_roles(self, mix: Mix) -> float:
        sums = dict.fromkeys((Role.PREFILL, Role.DECODE, Role.WHOLE), 0.0)
        for kind, role, n in mix:
            rates = self.rates[kind]
            rate = {Role.PREFILL: rates.prefill, Role.DECODE: rates.decode}.get(role, rates.whole)
            sums[role] += n * rate
        return min(sums[Role.PREFILL], sums[Role.DECODE]) + sums[Role.WHOLE]
