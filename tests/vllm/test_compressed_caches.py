# SPDX-License-Identifier: Apache-2.0
"""Caches that no CPU engine can compute, of the models' own specs: DeepSeek V4 and V4.1, GLM-5-Next, QSA, Inkling, and indexers
of sparse attention. Agents hand a request over, and every element is compared."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.kv_cache_interface")

import torch
from support.agents import LONG, TRANSPORTS, Ranks, ranks
from support.vllm_caches import (
    Engine,
    Layer,
    Worker,
    attention,
    hand_over,
    moved,
    pages_as_on_a_gpu,
    words,
    workers,
)
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1 import kv_cache_interface as kv

from pd_connector.errors import UnsupportedGeometryError
from pd_connector.plan.route import routes

__all__ = ["pages_as_on_a_gpu", "ranks"]


def deepseek_v4(cache_dtype: str = "fp8_ds_mla") -> list[Layer]:
    """The kinds of cache of DeepSeek V4, in small: of latents for 4 and for 128 tokens, of the indexer, the compressors'
    windows and the window of latents. By vLLM's own modules, where they can be made."""
    cache = SimpleNamespace(cache_dtype=cache_dtype, block_size=256)
    told = SimpleNamespace(cache_config=cache)
    packed = cache_dtype == "fp8_ds_mla"
    with set_current_vllm_config(VllmConfig()):
        from vllm.models.deepseek_v4.attention import DeepseekV4Attention, DeepseekV4IndexerCache
        from vllm.models.deepseek_v4.compressor import CompressorStateCache
        from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache

        made: list[Any] = [
            DeepseekV4IndexerCache(36, torch.uint8, "layers.0.indexer", cache, 4),
            CompressorStateCache(16, torch.float32, 4, "layers.0.compressor"),
            CompressorStateCache(8, torch.float32, 128, "layers.1.compressor"),
            DeepseekV4SWACache(
                24,
                128,
                torch.uint8 if packed else torch.bfloat16,
                "layers.0.window",
                cache,
                packed_bytes_per_token=44,
            ),
        ]
        specs = {one.prefix: one.get_kv_cache_spec(told) for one in made}
    for number, ratio in enumerate((4, 128)):
        layer = SimpleNamespace(
            compress_ratio=ratio,
            kv_cache_dtype=cache_dtype,
            head_dim=24,
            kv_cache_torch_dtype=torch.bfloat16,
        )
        spec = DeepseekV4Attention.get_kv_cache_spec(layer, told)
        specs[f"layers.{number}.attn"] = spec
    return [Layer(name, lambda _, spec=spec: spec) for name, spec in sorted(specs.items())]


def with_rings(rows: int = 8) -> list[Layer]:
    """Those of V4.1 (a ring, and a window that vLLM replays), GLM-5-Next (K and its gate) and QSA."""

    def ring(slots: int, dtype: torch.dtype) -> Any:
        return lambda _: kv.CircularBufferSpec(
            block_size=rows, num_kv_heads=slots, head_size=12, head_size_v=0, dtype=dtype
        )

    def replayed(_: Engine) -> kv.AttentionSpec:
        return kv.SlidingWindowMLASpec(
            block_size=32,
            num_kv_heads=1,
            head_size=8,
            dtype=torch.bfloat16,
            sliding_window=64,
            model_version="deepseek_v4",
            bounded_replay=True,
        )

    return [
        attention("layers.0.attn", 1, 24, 0, tokens_per_state=4),
        Layer("layers.0.compressor", ring(1, torch.float32)),
        Layer("layers.1.tail", ring(2, torch.bfloat16)),
        Layer("layers.0.window", replayed),
    ]


def inkling() -> list[Layer]:
    """A window without V of 4 heads, which ranks share."""

    def convolution(engine: Engine) -> kv.AttentionSpec:
        return kv.SlidingWindowSpec(
            block_size=4,
            num_kv_heads=4 // engine.tp,
            head_size=16,
            head_size_v=0,
            dtype=torch.bfloat16,
            sliding_window=4,
        )

    return [attention("layers.0.attn", 4, 8, 8), Layer("layers.0.conv", convolution, 4)]


def sparse() -> list[Layer]:
    """Latents, and an indexer's entries: codes and their scale, which only vLLM can read."""
    return [
        attention("layers.0.attn", 1, 24, 0),
        attention("layers.0.indexer", 1, 132, 0, dtype=torch.uint8),
    ]


EACH: dict[str, tuple[list[Layer], Engine, Engine]] = {
    "V4": (
        deepseek_v4(),
        Engine(page=256, cache_dtype="fp8_ds_mla"),
        Engine(page=256, cache_dtype="fp8_ds_mla", tp=2),
    ),
    "V4 in bfloat16": (deepseek_v4("auto"), Engine(page=256, tp=2), Engine(page=256)),
    "rings": (with_rings(), Engine(page=64), Engine(page=32, tp=2)),
    "Inkling": (inkling(), Engine(tp=2), Engine(tp=4)),
    "Inkling, to fewer ranks": (inkling(), Engine(tp=4), Engine(tp=1, page=32)),
    "V3.2": (sparse(), Engine(page=64), Engine(page=64, tp=2)),
}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("kind", EACH)
@pytest.mark.parametrize("tokens", [3, 300, 515])
def test_every_element_arrives(ranks: Ranks, kind: str, tokens: int, transport: str) -> None:
    layers, ours, theirs = EACH[kind]
    settings = LONG | TRANSPORTS[transport]
    more = 0 if kind == "rings" else 1  # the last token of a prompt is computed by the consumer
    sources = [ranks.add(w) for w in workers(ours, layers, tokens + more, fills=True, **settings)]
    others = [ranks.add(w) for w in workers(theirs, layers, tokens, fills=False, **settings)]
    assert all(worker.problem() for worker in others)
    hand_over(sources, others)
    assert [worker.problem() for worker in others] == [""] * len(others)


def lacking(worker: Worker, number: int, first: int = 0) -> int:
    """Entries that a worker would keep in a layer from token `first` on, and does not hold."""
    found = words(worker.tensors[number])
    wanted = worker.entries(number, first)
    return sum((found[page, :, at] != values).any() for (page, at), values in wanted.items())


RINGS = Engine(page=64)
KEPT = 300 - 64 + 1
"""The first token of V4.1's window after 300 tokens."""


def test_a_window_that_no_prefix_hit_brings_is_loaded_whole() -> None:
    """V4.1's window is not in vLLM's prefix cache: a load behind a hit brings what is before the hit, too."""
    sources = workers(RINGS, with_rings(), 300, fills=True)
    (worker,) = others = workers(RINGS, with_rings(), 300, fills=False)
    moved(sources, others, first=256)
    assert lacking(worker, 0) == 256 // 4, "what is in the cache is not written"
    assert lacking(worker, 0, 256) == 0
    assert [lacking(worker, 1), lacking(worker, 2), lacking(worker, 3, KEPT)] == [0, 0, 0]


def test_without_that_fact_it_would_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harm: vLLM would read what an earlier request left in those pages."""
    monkeypatch.setattr(kv.SlidingWindowMLASpec, "prefix_replay_tokens", property(lambda _: 0))
    sources = workers(RINGS, with_rings(), 300, fills=True)
    (worker,) = others = workers(RINGS, with_rings(), 300, fills=False)
    moved(sources, others, first=256)
    assert lacking(worker, 3, KEPT) == 256 - KEPT


@pytest.mark.parametrize("first", [0, 256, 512])
def test_what_the_consumer_has_of_compressed_entries_stays(first: int) -> None:
    layers = deepseek_v4("auto")
    sources = workers(Engine(page=256), layers, 900, fills=True)
    others = workers(Engine(page=256), layers, 900, fills=False)
    moved(sources, others, first=first)
    (worker,) = others
    for number, spec in enumerate(worker.specs):
        if isinstance(spec, kv.MLAAttentionSpec):
            assert lacking(worker, number) == first // spec.tokens_per_state
            assert lacking(worker, number, first) == 0


def pair(ours: Sequence[Layer], theirs: Sequence[Layer], page: int = 64) -> None:
    (source,), (destination,) = (
        workers(Engine(page=64), ours, 100, fills=True),
        workers(Engine(page=page), theirs, 100, fills=False),
    )
    routes(source.geometry, destination.geometry, ("raw",), ("raw",))


def test_unlike_caches_are_refused_with_both_values() -> None:
    two = attention("layers.0.attn", 1, 24, 0, tokens_per_state=2)
    with pytest.raises(UnsupportedGeometryError, match="state_tokens 4 / 2"):
        pair(with_rings(), [two, *with_rings()[1:]])
    with pytest.raises(
        UnsupportedGeometryError, match=r"rows of ring.0 8 / 16; start both .*speculative"
    ):
        pair(with_rings(), with_rings(rows=16))
    with pytest.raises(UnsupportedGeometryError, match=r"page size 64 / 32.*--block-size"):
        pair(sparse(), sparse(), page=32)
    with pytest.raises(UnsupportedGeometryError, match="heads 4 / 2"):
        pair(inkling()[:1], [attention("layers.0.attn", 2, 8, 8)])
    pair(with_rings(), with_rings())  # the control


def test_indexers_pass_as_they_are() -> None:
    """A codec takes the latents beside them."""
    (source,), (other,) = (
        workers(Engine(page=64), sparse(), 100, fills=True),
        workers(Engine(page=64, tp=2), sparse(), 100, fills=False)[:1],
    )
    latents, indexer = routes(source.geometry, other.geometry, ("int8", "raw"), ("int8", "raw"))
    assert (latents.codec, latents.verbatim) == ("int8", False)
    assert (indexer.codec, indexer.verbatim) == ("raw", True)


def test_a_ring_of_another_request_is_found_by_the_elements() -> None:
    """A control."""
    sources = workers(Engine(page=64), with_rings(), 300, fills=True)
    others = workers(Engine(page=64), with_rings(), 300, fills=False)
    (source,) = sources
    source.tables[1] = [next(page for page in range(source.pages) if page not in source.tables[1])]
    moved(sources, others)
    assert others[0].problem().startswith("layers.0.compressor")


def test_a_page_that_is_no_ring_is_refused() -> None:
    layers = [
        Layer(
            "layers.0.ring",
            lambda _: kv.CircularBufferSpec(
                block_size=8, num_kv_heads=1, head_size=2, head_size_v=0, dtype=torch.int32
            ),
        )
    ]
    with pytest.raises(
        UnsupportedGeometryError, match=r"ring of layers.0.ring has 8 rows of torch.int32"
    ):
        workers(Engine(), layers, 20, fills=True)
