# SPDX-License-Identifier: Apache-2.0
"""Caches that no CPU engine can compute, of the models' own specs: DeepSeek V4 and V4.1, GLM-5-Next, QSA, Inkling, and indexers
of sparse attention. Agents hand a request over, and every element is compared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.kv_cache_interface")

import torch
from support.agents import LONG, TRANSPORTS, Ranks, ranks
from support.vllm_caches import Engine, Layer, attention, hand_over, workers
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1 import kv_cache_interface as kv

from pd_connector.vllm.packing import CpuPacking

__all__ = ["ranks"]


@pytest.fixture(autouse=True, scope="module")
def pages_as_on_a_gpu() -> Any:
    """No backend of vLLM's for CPUs packs these pages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPacking, "of", classmethod(lambda *_: None))
        yield


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
