# SPDX-License-Identifier: Apache-2.0
"""vLLM counts cached tokens by where they come from: the host's memory, its disk, or another engine."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("vllm.v1.metrics.cache_hit_source", reason="vLLM 0.32 and later")

from support.vllm_pooled import CHUNKS, Make, keys_of, make, run
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.pool.store.base import DISK, Found

__all__ = ["make"]

LOADED = CHUNKS * CHUNK_TOKENS


@pytest.mark.parametrize("on_disk", [0, 1, CHUNKS])
def test_tokens_from_the_pool_are_counted_by_tier(
    make: Make, monkeypatch: pytest.MonkeyPatch, on_disk: int
) -> None:
    writer = make("writer")
    run(writer, "a")
    keys_of(writer)
    reader = make("reader")
    find = reader.store.find

    def finds(keys: Any) -> list[Found | None]:
        found = find(keys)
        return [one and one._replace(tier=DISK) for one in found[:on_disk]] + found[on_disk:]

    monkeypatch.setattr(reader.store, "find", finds)
    connector: Any = reader.scheduler.connector
    hook, answers = connector.get_external_cache_hit_sources, []

    def noted(request: Any, tokens: int) -> Any:
        answers.append((tokens, hook(request, tokens)))
        return answers[-1][1]

    monkeypatch.setattr(connector, "get_external_cache_hit_sources", noted)
    (load,) = run(reader, "b")
    assert load.stop_token == LOADED
    wanted = {
        CacheHitSource.HOST: LOADED - on_disk * CHUNK_TOKENS,
        CacheHitSource.DISK: on_disk * CHUNK_TOKENS,
    }
    sources = {source: tokens for source, tokens in wanted.items() if tokens}
    assert answers == [(LOADED, sources)]


def test_tokens_of_a_handoff_come_from_a_peer(make: Make) -> None:
    connector: Any = make("engine").scheduler.connector
    request: Any = type("Request", (), {"request_id": "not of the pool"})
    assert connector.get_external_cache_hit_sources(request, 7) == {CacheHitSource.P2P: 7}
