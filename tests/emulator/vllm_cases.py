# SPDX-License-Identifier: Apache-2.0
"""Steps of vLLM through `--attention-backend CUSTOM` on a GPU: vLLM's platform for CUDA chooses the backend, and its
layer, builder and custom operations call it, as its model runner does.

Only what vLLM compiles for CUDA is missing: modules that must be importable stand empty, and the operation that
writes the cache is torch's.
"""

import contextlib
import functools
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch_device import gpu
from transfer_cases import FP8, Case

from pd_kernels.tuning import tuned

COMPILED = ("_C_stable_libtorch", "vllm_flash_attn._vllm_fa2_C", "vllm_flash_attn._vllm_fa3_C")
DECODES = ((1, 70), (1, 1), (1, 33))
BESIDE_PROMPTS = ((1, 70), (1, 33), (20, 20), (9, 40))
VERIFIED = ((4, 70), (4, 4), (4, 33))
BOUND = 1e-2


@functools.cache
def _for_cuda() -> Any:
    """vLLM, which takes this for a machine with a GPU; returns tests/kernels' layers."""
    sys.modules.update({f"vllm.{name}": ModuleType(name) for name in COMPILED})
    platforms = importlib.import_module("vllm.platforms")
    chosen = importlib.import_module("vllm.platforms.cuda").NonNvmlCudaPlatform()
    platforms._current_platform = chosen  # type: ignore[attr-defined]
    operations = importlib.import_module("vllm._custom_ops")
    for name in (each for each in dir(operations) if "_supports_" in each):
        setattr(operations, name, lambda *_: False)  # it asks for FP8 products when it is imported
    importlib.import_module("pd_kernels.vllm.plugin").register()
    sys.path.append(str(Path(__file__).parents[1] / "kernels"))
    return importlib.import_module("backend_layers")


def _write_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """What `reshape_and_cache_flash` does, of which vLLM's CPU build has no version for CUDA."""
    pages, places = slots // key_cache.shape[1], slots % key_cache.shape[1]
    for new, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        coded = new if dtype == "auto" else (new / scale).to(FP8).view(torch.uint8)
        cache[pages, places] = coded


class _Rounded(torch.nn.Module):
    """Queries in FP8, as vLLM hands them over for such a cache."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x / scale).to(FP8), scale


@contextlib.contextmanager
def _compiled_operations(module: Any, dtype: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        flash = importlib.import_module("vllm.v1.attention.backends.flash_attn")
        stack.enter_context(mock.patch.object(flash, "reshape_and_cache_flash", _write_cache))
        if dtype != "auto":
            stack.enter_context(mock.patch.object(module, "query_quant", _Rounded()))
        yield


def step(
    requests: tuple[tuple[int, int], ...] = DECODES,
    cache_dtype: str = "auto",
    verified: int = 1,
    window: int | None = None,
    steps: int = 1,
    **switches: bool,
) -> None:
    """Run the last tokens of some requests through a layer, behind what the cache has of them."""
    with gpu(), tuned(**switches):
        layers = _for_cuda()
        forward = importlib.import_module("vllm.forward_context").set_forward_context
        given = {"heads": 8, "dim": 128, "dtype": torch.bfloat16, "device": "cuda:0"}
        shape = layers.Shape(**given, cache_dtype=cache_dtype, window=window)
        layer, batch = shape.layer("CUSTOM"), layers.Batch(shape, requests)
        module, config = layer.module.to("cuda:0"), layer.config
        assert type(module.impl).__name__ == "PagedFlashImpl"
        layer.builder.reorder_batch_threshold = verified
        stored = torch.uint8 if cache_dtype != "auto" else shape.dtype
        size = layers.PAGES, shape.kv_heads, layers.PAGE, 2 * shape.dim
        module.kv_cache = torch.zeros(size, dtype=stored, device="cuda:0")
        with _compiled_operations(module, cache_dtype):
            for row, tokens in enumerate(batch.tokens):
                kv, slots = batch.kv[:, row, :tokens].to("cuda:0"), batch.slots(row)[:tokens]
                module.impl.do_kv_cache_update(
                    module, *kv.unbind(), module.kv_cache, slots.to("cuda:0")
                )
            for _ in range(steps):
                common = batch.common()
                metadata = {layers.NAME: layer.builder.build(0, common)}
                where = {layers.NAME: common.slot_mapping}
                new = [x.flatten(1).to("cuda:0") for x in (batch.query, *batch.new_kv())]
                with forward(metadata, config, len(batch.query), slot_mapping=where):
                    found = module(*new)
                _compare(
                    batch,
                    found.cpu().float(),
                    window,
                    FP8 if stored == torch.uint8 else shape.dtype,
                )


def _compare(batch: Any, found: torch.Tensor, window: int | None, stored: torch.dtype) -> None:
    """With attention in float32 of what is stored."""
    wanted, first = [], 0
    for row, (count, tokens) in enumerate(zip(batch.queries, batch.tokens, strict=True)):
        query = batch.query[first : first + count].to(stored).float().transpose(0, 1)
        keys, values = batch.kv[:, row, :tokens].to(stored).float().transpose(1, 2).unbind()
        ahead = torch.arange(tokens - count, tokens)[:, None] - torch.arange(tokens)
        seen = (ahead >= 0) & (ahead < (window or tokens))
        told = query, keys, values, seen
        attend = torch.nn.functional.scaled_dot_product_attention
        wanted.append(attend(*told, enable_gqa=True).transpose(0, 1).flatten(1))
        first += count
    reference = torch.cat(wanted)
    error = float((found - reference).norm() / reference.norm())
    assert error <= BOUND, f"error {error:.2e}, at most {BOUND}"


STEPS: dict[str, Case] = {
    f"vllm, {name}": functools.partial(step, **given)
    for name, given in {
        "decodes": {"steps": 2},
        "decodes, direct_launch off": {"direct_launch": False},
        "fp8": {"cache_dtype": "fp8"},
        "verified": {"requests": VERIFIED, "verified": 4},
        "window": {"window": 40},
        "mixed steps": {"requests": BESIDE_PROMPTS, "mixed_steps": True},
        "mixed steps, fp8": {"requests": BESIDE_PROMPTS, "mixed_steps": True, "cache_dtype": "fp8"},
    }.items()
}
