# SPDX-License-Identifier: Apache-2.0
"""Closed forms of fleets. They order candidates, discard none, and are never shown: in bursts they are several times too
high, and they know no caches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from scheduler_plugins.cost.closed import FILL, largest_batch, prompt_s, token_s
from scheduler_plugins.cost.engine_profile import EngineProfile
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.planner.inventory import Inventory
from scheduler_plugins.planner.mix import Mix
from scheduler_plugins.router.policies.base import Role


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
        self.inventory = inventory
        self.rates = {name: rates_of(profile, load) for name, profile in inventory.kinds.items()}

    def best_first(self, mixes: Iterable[Mix]) -> list[Mix]:
        """The mixes, the highest rate first; equal ones in an order that is the same in every run."""
        return sorted(set(mixes), key=lambda mix: (-self.of(mix), mix))

    def of(self, mix: Mix) -> float:
        """Requests a second: the slower of both sides, or the sum of engines that do both."""
        sums = dict.fromkeys((Role.PREFILL, Role.DECODE, Role.WHOLE), 0.0)
        for kind, role, n in mix:
            rates = self.rates[kind]
            rate = {Role.PREFILL: rates.prefill, Role.DECODE: rates.decode}.get(role, rates.whole)
            sums[role] += n * rate
        return min(sums[Role.PREFILL], sums[Role.DECODE]) + sums[Role.WHOLE]
