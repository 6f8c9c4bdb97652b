# SPDX-License-Identifier: Apache-2.0
"""What a waiting request costs now, and where that puts it in its lane."""

from __future__ import annotations

from math import inf
from typing import Protocol

from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.order.base import QueuePolicy
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.queue.place import Place
from scheduler_plugins.queue.prefixes import Prefixes


class Costs(Protocol):
    """Where the cost model comes from: `OnlineFit`, or anything that holds one."""

    @property
    def model(self) -> CostModel: ...


class Costing:
    """Brings policy, prefix cache and cost model together. Changes nothing but what `prefixes`
    notes of a place.
    """

    def __init__(
        self, policy: QueuePolicy, prefixes: Prefixes, costs: Costs, *, block_tokens: int
    ) -> None:
        self.policy = policy
        self._prefixes = prefixes
        self._costs = costs
        self.model = costs.model
        """The cost model in use, see `renew`; to be read, not changed."""
        self._block_tokens = block_tokens

    def place(self, request: Waiting) -> Place:
        """A place for a request, not evaluated."""
        place = Place(request, self._block_tokens)
        place.group = self.policy.group(request)
        return place

    def evaluate(self, place: Place) -> tuple[float, float]:
        """Key and cost in seconds as of now."""
        request, calibrated = place.request, self.policy.calibrated
        if calibrated:
            self._prefixes.look_up(place)
        elif not place.push:
            place.cached = self._prefixes.count(request.block_hashes, place.usable)
        spared = self._spared(request, place.cached)
        cost_s = self.model.prefill_s(request.tokens, spared)
        key = -inf if place.resumed else self.policy.key(request, spared, cost_s)
        return key, cost_s

    def cost_s(self, request: Waiting) -> float:
        """Predicted prefill time of a request, given what is cached now."""
        return self.model.prefill_s(request.tokens, self.spared_tokens(request))

    def spared_tokens(self, request: Waiting) -> int:
        """Tokens of a request that need no computing: what is cached now, or will be loaded."""
        usable = Place(request, self._block_tokens).usable
        return self._spared(request, self._prefixes.count(request.block_hashes, usable))

    def left(self, request: Waiting, computed_tokens: int) -> float:
        """The key of what is left of a prefill."""
        left_s = self.model.prefill_s(request.tokens, computed_tokens)
        return self.policy.key(request, computed_tokens, left_s)

    def renew(self) -> bool:
        """Take up the newest model; whether it is another one."""
        changed = self.model is not self._costs.model
        self.model = self._costs.model
        return changed

    def _spared(self, request: Waiting, cached_blocks: int) -> int:
        loaded = min(request.loaded, request.tokens - 1)
        return max(cached_blocks * self._block_tokens, loaded)
