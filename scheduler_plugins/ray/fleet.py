# SPDX-License-Identifier: Apache-2.0
"""The replicas of one deployment as policies see them. No I/O, no clock, no Ray."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from random import Random
from typing import Any, NamedTuple

from scheduler_plugins.admission.prompt import PromptMemory
from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.router.engines.counted_load import EngineLoad, Loaded
from scheduler_plugins.router.index.prefixes import Prefixes
from scheduler_plugins.router.index.prompt_keys import PromptKeys
from scheduler_plugins.router.policies.base import (
    Defer,
    Policy,
    Reject,
    Request,
    Role,
    cached_tokens,
)
from scheduler_plugins.router.prompt.describe import BLOCK_TOKENS, describe
from scheduler_plugins.router.routing.view import LiveView

FORGOTTEN_S = 600.0
"""If a replica is chosen and then gets no request, Serve does not say so. Such a request counts for this time."""


class Replica(Loaded):
    """One replica. Policies see it as an `EngineView`."""

    block_tokens = BLOCK_TOKENS
    free_kv = inf
    pull_prefix = False

    def __init__(self, name: str, role: Role) -> None:
        self.name = name
        self.role = role
        self.load = EngineLoad()
        self.costs = CostModel.token_count()

    def queued_s(self, now_s: float) -> float:
        return self.load.queued_s(now_s)

    def accepts(self, now_s: float) -> bool:
        return self.load.accepts(now_s)


class _Sent(NamedTuple):
    replica: str
    at_s: float


class Fleet:
    """The replicas of one deployment, and the requests that this router has sent to each.

    Args:
        policy: chooses replicas. Its choice for the other side of a pair is not used.
        role: the work of the replicas. `PREFILL` and `DECODE` are the sides of a pair; replicas of role `WHOLE` answer
            requests alone.
        random: the policy's random number generator.
    """

    def __init__(self, policy: Policy, role: Role, random: Random) -> None:
        self._policy = policy
        self._role = role
        self._random = random
        self._replicas: dict[str, Replica] = {}
        self._sent: dict[str, _Sent] = {}
        self._prefixes = Prefixes()
        self._lengths = PromptMemory(0)
        # Policies decide for both sides. The sender of the request has already chosen the decode replica.
        self._other = Replica("", Role.DECODE)

    def set_replicas(self, names: Iterable[str]) -> None:
        """Set the present replicas. Everything about other replicas is forgotten."""
        present = set(names)
        for name in self._replicas.keys() - present:
            del self._replicas[name]
            self._prefixes.remove(name)
        for name in sorted(present - self._replicas.keys()):
            self._replicas[name] = Replica(name, self._role)
        self._sent = {n: sent for n, sent in self._sent.items() if sent.replica in present}

    def choose(
        self,
        request_id: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        candidates: Sequence[str],
        now_s: float,
    ) -> str | None:
        """The replica for a request; None: ask again later. The request counts as sent to the replica.

        Args:
            request_id: Serve's own id, which no client can choose.
            body: fields of the client's request.
            candidates: the replicas to choose from.
        """
        self.ended(request_id, now_s)
        self._forget(now_s)
        able = [self._replicas[name] for name in candidates if name in self._replicas]
        if not able:
            return None
        request = describe(body, headers, request_id, now_s, self._lengths)
        name = self._decide(request, able, now_s)
        if name is not None:
            self._count(request, self._replicas[name], now_s)
        return name

    def ended(self, request_id: str, now_s: float) -> None:
        """Note that a request has ended, in any way. Unknown ids change nothing."""
        sent = self._sent.pop(request_id, None)
        replica = self._replicas.get(sent.replica) if sent else None
        if replica is not None:
            replica.load.prefill_ended(request_id, now_s)
            replica.load.decode_ended(request_id)

    def _decide(self, request: Request, able: Sequence[Replica], now_s: float) -> str | None:
        engines: dict[Role, Sequence[Replica]] = {
            Role.PREFILL: () if self._role is Role.DECODE else able,
            Role.DECODE: (self._other,) if self._role is Role.PREFILL else able,
        }
        view = LiveView(engines, self._prefixes, now_s)
        decision = self._policy.decide(request, view, now_s, self._random)
        if isinstance(decision, Defer):
            return None
        if isinstance(decision, Reject):  # Serve has no way to say so to the client
            return min(able, key=lambda replica: replica.open_requests).name
        chosen = decision.p if self._role is Role.PREFILL else decision.d
        return chosen or able[0].name

    def _count(self, request: Request, replica: Replica, now_s: float) -> None:
        self._sent[request.id] = _Sent(replica.name, now_s)
        keys = request.hashes
        assert isinstance(keys, PromptKeys)
        if self._role is Role.DECODE:
            replica.load.decode_sent(request.id, request.tokens, request.max_tokens)
            return
        (blocks,) = self._prefixes.match(keys, [replica], BLOCK_TOKENS, now_s)
        fresh = max(1, request.tokens - cached_tokens(request, replica, blocks))
        replica.load.prefill_sent(request.id, fresh, replica.costs.prefill_s(fresh), now_s)
        self._prefixes.prefilled(replica, keys, now_s)

    def _forget(self, now_s: float) -> None:
        old = [n for n, sent in self._sent.items() if sent.at_s < now_s - FORGOTTEN_S]
        for request_id in old:
            self.ended(request_id, now_s)
