# SPDX-License-Identifier: Apache-2.0
"""The values that the middleware reads from vLLM's configuration, without importing vLLM."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from scheduler_plugins.admission.board import boards_of
from scheduler_plugins.admission.report import EngineReport, EventPorts

PAIR_CONNECTORS = ("PDConnector", "NixlConnector", "MooncakeConnector", "P2pNcclConnector")
"""Connectors for prefill and decode in two engines."""


def is_half_of_a_pair(config: Any) -> bool:
    """Whether the engine sends KV to another engine, or receives KV from it."""
    transfer = getattr(config, "kv_transfer_config", None)
    if getattr(transfer, "kv_connector", None) in PAIR_CONNECTORS:
        return True
    # `MultiConnector` has its connectors here.
    extra = getattr(transfer, "kv_connector_extra_config", None)
    inner = extra.get("connectors") if isinstance(extra, dict) else None
    return any(
        isinstance(connector, dict) and connector.get("kv_connector") in PAIR_CONNECTORS
        for connector in (inner if isinstance(inner, list) else ())
    )


def pool_engine(config: Any) -> str | None:
    """The `engine_id` of an engine that uses the KV pool of its host; None for any other engine."""
    transfer = getattr(config, "kv_transfer_config", None)
    extra = getattr(transfer, "kv_connector_extra_config", None)
    if not isinstance(extra, dict):
        return None
    own = str(getattr(transfer, "engine_id", ""))
    if getattr(transfer, "kv_connector", None) == "PDConnector":
        return own if extra.get("pool") else None
    inner = extra.get("connectors")  # of `MultiConnector`
    for connector in inner if isinstance(inner, list) else ():
        if isinstance(connector, dict) and connector.get("kv_connector") == "PDConnector":
            settings = connector.get("kv_connector_extra_config")
            if isinstance(settings, dict) and settings.get("pool"):
                return str(connector.get("engine_id") or own)
    return None


def with_cache(report: EngineReport, config: Any) -> EngineReport:
    """Add the fields with which a router can follow the engine's cache."""
    if config is None:
        return report
    ports, events = None, getattr(config, "kv_events_config", None)
    if events is not None and events.enable_kv_cache_events and events.publisher == "zmq":
        ports = EventPorts(events=events.endpoint, replay=events.replay_endpoint)
    cache = config.cache_config
    return replace(
        report,
        block_tokens=cache.block_size or 0,
        blocks=cache.num_gpu_blocks or 0,
        kv_events=ports,
    )


def cache_tokens(config: Any) -> int:
    """Tokens that fit into the prefix caches of all ranks; 0 if there are no prefix caches."""
    cache_config = config.cache_config
    if not cache_config.enable_prefix_caching:
        return 0
    blocks: int = (cache_config.num_gpu_blocks or 0) * cache_config.block_size
    one_rank: int = cache_config.kv_cache_size_tokens or blocks
    return one_rank * len(boards_of(config))
