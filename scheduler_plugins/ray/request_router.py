# SPDX-License-Identifier: Apache-2.0
"""The request router of Serve, which chooses a replica for each request.

For each deployment, Serve makes one router in every process that sends requests to it: in the ingress for decode
replicas, in each decode replica for prefill replicas. A router knows only the requests that it has sent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from random import Random
from typing import Any

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from scheduler_plugins.ray.fleet import Fleet
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.prompt.body import BadRequestError
from scheduler_plugins.router.prompt.describe import SESSION_HEADER
from scheduler_plugins.router.routing.fallback import Fallback

logger = logging.getLogger("ray.serve")

_FIELDS = ("prompt", "messages", "cache_salt", "max_completion_tokens", "max_tokens", "user")
_PREFIXES = {"Prefill:": Role.PREFILL, "Decode:": Role.DECODE}
"""Names that the builders of prefill/decode applications give to deployments."""


class PolicyRequestRouter(RequestRouter):
    """Sends each request to the replica that a policy of `pd-router` chooses."""

    def initialize_state(self, policy: str = "cache_aware", decode_policy: str = "") -> None:
        """Called by Serve with `request_router_kwargs`.

        Args:
            policy: a value of `pd-router --policy`.
            decode_policy: a value of `--decode-policy`; empty: the rule that goes with `policy`. It chooses among the
                decode replicas of a pair.

        Raises:
            ConfigError: no policy has that name.
        """
        name = self._deployment_id.name
        role = next((r for prefix, r in _PREFIXES.items() if name.startswith(prefix)), Role.WHOLE)
        self._fleet = Fleet(Fallback(policy, decode_policy), role, Random())

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve whenever replicas come or go."""
        super().update_replicas(replicas)
        self._fleet.set_replicas(replica.replica_id.unique_id for replica in replicas)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The policy's choice first. The others follow in case the first has no room."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # all candidates are named each time
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        try:
            chosen = self._fleet.choose(
                pending_request.metadata.internal_request_id,
                _body(pending_request),
                _headers(pending_request),
                list(by_name),
                time.monotonic(),
            )
        except BadRequestError:  # the engine will report the error
            return [candidate_replicas]
        except Exception:  # Serve would log the error, and the request would wait for ever
            logger.exception("the policy failed: the request can go to any replica")
            return [candidate_replicas]
        if chosen is None:
            return []
        first = by_name.pop(chosen)
        return [[first], list(by_name.values())] if by_name else [[first]]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Serve when a request has ended."""
        super().on_request_completed(replica_id, internal_request_id)
        self._fleet.ended(internal_request_id, time.monotonic())


def _body(pending: PendingRequest) -> Mapping[str, Any]:
    """The fields of a client's request that policies use; empty if it is not such a request."""
    request = pending.args[0] if pending.args else None
    fields = {name: getattr(request, name, None) for name in _FIELDS}
    return {name: value for name, value in fields.items() if value is not None}


def _headers(pending: PendingRequest) -> Mapping[str, str]:
    info = pending.args[1] if len(pending.args) > 1 else None
    headers = {
        "-".join(part.capitalize() for part in name.split("-")): value
        for name, value in (getattr(info, "headers", None) or {}).items()
    }
    if pending.metadata.session_id:
        headers.setdefault(SESSION_HEADER, pending.metadata.session_id)
    return headers
