# SPDX-License-Identifier: Apache-2.0
"""vLLM on a GPU that is not there: its platform for CUDA chooses backends, and its layers, builders and custom
operations call them, as its model runner does.

Only what vLLM compiles for CUDA is missing: modules that must be importable stand empty, and the operations that
write caches, and FlashAttention (`flash.py`), are torch's.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from flash import flash_attention, scheduled
from memory import FaultError
from streams import STREAMS
from transfer_cases import FP8

from pd_bench.kernels.decode_cases import coded_latents
from pd_kernels.attention import decode_call

COMPILED = ("_C_stable_libtorch", "vllm_flash_attn._vllm_fa2_C", "vllm_flash_attn._vllm_fa3_C")
FLASH = "vllm.v1.attention.backends.flash_attn"
UNLIKE = "vllm.v1.attention.backends.flash_attn_diffkv"
SPARSE = "vllm.model_executor.layers.attention.sparse_mla_attention"
LATENT_PREFILL = "vllm.v1.attention.backends.mla.prefill.flash_attn"


@functools.cache
def for_cuda() -> None:
    """Make vLLM take this for a machine with a GPU and Triton, and find the layers of tests/kernels."""
    sys.modules.update({f"vllm.{name}": ModuleType(name) for name in COMPILED})
    platforms = importlib.import_module("vllm.platforms")
    driver = importlib.import_module("triton.backends.nvidia.driver").CudaDriver
    with (
        mock.patch.object(driver, "is_active", return_value=True),
        mock.patch.object(platforms, "vllm_version_matches_substr", return_value=False),
    ):
        importlib.import_module("vllm.triton_utils")  # a CPU build has none
    chosen = importlib.import_module("vllm.platforms.cuda").NonNvmlCudaPlatform()
    platforms._current_platform = chosen  # type: ignore[attr-defined]
    operations = importlib.import_module("vllm._custom_ops")
    for name in (each for each in dir(operations) if "_supports_" in each):
        setattr(operations, name, lambda *_: False)  # it asks for FP8 products when it is imported
    for module, name, value in (
        ("vllm._custom_ops", "concat_and_cache_mla", _write_latents),
        (FLASH, "reshape_and_cache_flash", _write_keys),
        (FLASH, "get_scheduler_metadata", scheduled),
        (FLASH, "flash_attn_varlen_func", flash_attention),
        (UNLIKE, "flash_attn_varlen_func", flash_attention),
        (UNLIKE, "triton_reshape_and_cache_flash_diffkv", _write_unlike),
        ("vllm.model_executor.layers.attention.mla_attention", "PIN_MEMORY", False),
        (SPARSE, "PIN_MEMORY", False),
        ("vllm.utils.torch_utils", "is_pin_memory_available", lambda: False),
        (SPARSE, "get_tensor_model_parallel_world_size", lambda: 1),
        (LATENT_PREFILL, "flash_attn_varlen_func", flash_attention),
    ):
        setattr(importlib.import_module(module), name, value)
    importlib.import_module("pd_kernels.vllm.plugin").register()
    sys.path.append(str(Path(__file__).parents[1] / "kernels"))


def _put(new: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Write tokens into `[page, token, ...]`. A slot of -1 is padding, which leaves the cache as it is."""
    pages, places = slots // cache.shape[1], slots % cache.shape[1]
    real = (slots >= 0).view(-1, *[1] * (new.dim() - 1))
    cache[pages, places] = torch.where(real, new, cache[pages, places])


def _write_keys(
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
    for new, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        coded = new if dtype == "auto" else (new / scale.view(-1, 1)).to(FP8).view(torch.uint8)
        _put(coded[: len(slots)], cache, slots)


def _write_unlike(
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """What `triton_reshape_and_cache_flash_diffkv` does."""
    halves = cache.split((key.shape[-1], value.shape[-1]), -1)
    _write_keys(key, value, *halves, slots, dtype, k_scale, v_scale)


def _write_latents(
    latent: torch.Tensor,
    rope: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    kv_cache_dtype: str,
    scale: torch.Tensor,
) -> None:
    """What `concat_and_cache_mla` does, also in FlashMLA's FP8 layout and in FP8 with one scale."""
    tokens = torch.cat((latent, rope), -1)[: len(slots)]
    if kv_cache_dtype == "fp8_ds_mla":
        tokens = coded_latents(tokens.cpu()).to(cache.device)
    elif kv_cache_dtype != "auto":
        tokens, cache = (tokens / scale).to(FP8).view(torch.uint8), cache.view(torch.uint8)
    _put(tokens, cache, slots)


class Rounded(torch.nn.Module):
    """Queries in FP8, as vLLM hands them over for such a cache: with a scale for all heads, or for the query heads of each
    KV head."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        groups = x.unflatten(-1, (scale.numel(), -1))
        return (groups / scale.view(-1, 1)).flatten(-2).to(FP8), scale


def few_processors() -> Any:
    """A small GPU: most programs of a large one have no work in a small step, and take time here."""
    return mock.patch.object(decode_call, "multiprocessors", return_value=6)


def problem_of(run: Callable[[], None]) -> str:
    """What a damaged step shows; "" if nothing. Work that is left is forgotten, as after a fault of a GPU."""
    try:
        run()
    except (AssertionError, FaultError, RuntimeError) as error:
        STREAMS.start()
        return f"{type(error).__name__}: {error}"
    return ""


class Door:
    """A layer of vLLM on the GPU with its builder and its cache, which holds NaN where no request has a token.

    Attributes:
        name: of the layer.
        bound: of the difference between its results and `wanted`, relative to these.
    """

    name: str
    bound: float
    coded = False
    """Whether the cache is FP8."""

    temporaries = 0
    """Tensors that our backend allocates in a call, of memory that a graph gives back to others."""

    def __init__(self, module: Any, builder: Any, config: Any) -> None:
        self.module, self.builder, self.config = module, builder, config

    @property
    def backend(self) -> tuple[Any, str]:
        """Our class, and the name of its method that a layer calls."""
        return self.module.impl, "forward"

    def forget(self) -> None:
        """NaN instead of what requests have in the cache."""
        self.module.kv_cache.fill_(0x7F if self.coded else torch.nan)

    def write(self, batch: Any) -> None:
        """Write what requests had before this step into the cache."""
        raise NotImplementedError

    def new(self, batch: Any) -> list[torch.Tensor]:
        """What the layer gets of a step's tokens."""
        raise NotImplementedError

    def call(self, *new: torch.Tensor) -> torch.Tensor:
        """`[token, elements]`."""
        raise NotImplementedError

    def wanted(self, batch: Any) -> torch.Tensor:
        """In float32, of what is stored."""
        raise NotImplementedError

    def context(self, metadata: Any, slots: torch.Tensor) -> Any:
        """The forward context of a step."""
        forward = importlib.import_module("vllm.forward_context").set_forward_context
        told = {self.name: metadata}, self.config, len(slots)
        return forward(*told, slot_mapping={self.name: slots})

    def step(self, batch: Any) -> torch.Tensor:
        """Run the new tokens of some requests through the layer."""
        common = batch.common()
        metadata, new = self.builder.build(0, common), self.new(batch)
        with self.context(metadata, common.slot_mapping):
            return self.call(*new)

    def check(self, batch: Any, found: torch.Tensor) -> None:
        """Fail if results are further from the reference than their rounding explains."""
        wanted = self.wanted(batch)
        error = float((found.cpu().float() - wanted).norm() / wanted.norm())
        assert error <= self.bound, f"error {error:.2e}, at most {self.bound}"


def attended(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention in float32 of a request's last tokens, `[token, heads, dim]` each. `sinks`: `[heads]`."""
    count, tokens = len(query), len(keys)
    ahead = torch.arange(tokens - count, tokens)[:, None] - torch.arange(tokens)
    seen = (ahead >= 0) & (ahead < (window or tokens))
    if sinks is not None:
        return _with_sinks(query, keys, values, scale, seen, sinks)
    told = (each.float().transpose(0, 1) for each in (query, keys, values))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(*told, seen, scale=scale, enable_gqa=True).transpose(0, 1)


def _with_sinks(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    seen: torch.Tensor,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """Scores and sinks in one softmax; a sink has no value."""
    group = query.shape[1] // keys.shape[1]
    own = (each.float().repeat_interleave(group, 1) for each in (keys, values))
    keys, values = own
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scale
    scores = scores.masked_fill(~seen, -torch.inf)
    sink = sinks.float()[:, None, None].expand(*scores.shape[:2], 1)
    weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", weights, values)
