# SPDX-License-Identifier: Apache-2.0
"""The state of one engine, as the keeper sends it to its workers."""

from __future__ import annotations

from typing import Any

from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.workers.messages import EngineState


def state_of(number: int, slot: int, engine: BackendEngine, cache: dict[str, Any]) -> EngineState:
    """The keeper's state of an engine.

    Args:
        number: unique among the engines of the keeper.
        slot: the engine's slot in the shared counts.
        cache: the state of its cache, for `/health`.
    """
    return EngineState(
        number,
        slot,
        engine.url,
        engine.role,
        engine.role_given,
        engine.up,
        engine.reason,
        engine.warning,
        engine.about,
        engine.kind,
        engine.was_vllm,
        engine.whole,
        engine.model,
        engine.models,
        engine.context_tokens,
        engine.addresses,
        engine.bootstrap_port,
        engine.down_since,
        engine.refusing,
        engine.answers,
        engine.ended,
        engine.costs,
        engine.draining,
        engine.costs_reported,
        engine.reported_block_tokens,
        engine.free_kv,
        engine.load.correction,
        None if engine.follower is None else engine.follower.block_tokens,
        engine.ranks,
        cache,
        engine.handoffs,
        engine.traffic,
        engine.store,
        engine.role_state,
    )


class FollowedElsewhere:
    """`engine.Follower` of an engine whose events the keeper follows."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens


def apply(state: EngineState, engine: BackendEngine) -> None:
    """Set a worker's engine to the keeper's state."""
    if engine.role is not state.role:
        engine.change_role(Role(state.role), state.role_state.since_s)
    engine.role_given, engine.role_state = state.role_given, state.role_state
    engine.begin_life(up=state.up)
    engine.up, engine.reason = state.up, state.reason
    engine.warning, engine.about = state.warning, state.about
    engine.kind, engine.model = state.kind, state.model
    engine.was_vllm, engine.whole = state.was_vllm, state.whole
    engine.models, engine.context_tokens = state.models, state.context_tokens
    engine.addresses, engine.bootstrap_port = state.addresses, state.bootstrap_port
    engine.down_since, engine.refusing = state.down_since, state.refusing
    engine.answers, engine.ended = state.answers, state.ended
    engine.costs, engine.costs_reported = state.costs, state.costs_reported
    engine.draining, engine.free_kv = state.draining, state.free_kv
    engine.reported_block_tokens, engine.ranks = state.reported_block_tokens, state.ranks
    engine.load.correction = state.correction
    engine.handoffs, engine.traffic = state.handoffs, state.traffic
    engine.store = state.store
    followed = state.event_block_tokens
    engine.follower = None if followed is None else FollowedElsewhere(followed)
