# SPDX-License-Identifier: Apache-2.0
"""Replaces FLASH_ATTN_DIFFKV on NVIDIA GPUs: values of another head size than keys (MiMo-V2: 192 and 128).

The cache is FLASH_ATTN_DIFFKV's: a head's key and value of a token, one behind the other. It also
computes prefills.
"""

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.flash_attn_diffkv import (
    FlashAttentionDiffKVBackend,
    FlashAttentionDiffKVImpl,
)
from vllm.v1.attention.selector import get_attn_backend

from pd_kernels.attention.paged_call import DIMS
from pd_kernels.vllm.paged_cuda import PagedFlash, PagedFlashImpl
from pd_kernels.vllm.refusals import refuse


class PagedFlashDiffKv(PagedFlash, FlashAttentionDiffKVBackend):
    """FLASH_ATTN_DIFFKV with our decodes."""

    @staticmethod
    def get_impl_cls() -> type["PagedFlashDiffKvImpl"]:
        return PagedFlashDiffKvImpl

    @classmethod
    def set_head_size_v(cls, head_size_v: int) -> None:
        """Called by a model before it makes a layer. Layers read it from vLLM's class."""
        FlashAttentionDiffKVBackend.set_head_size_v(head_size_v)


class PagedFlashDiffKvImpl(PagedFlashImpl, FlashAttentionDiffKVImpl):
    """A layer with FLASH_ATTN_DIFFKV's pages."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """The arguments are those of `PagedImpl`.

        Raises:
            NotImplementedError: the kernels do not support the layer; the message says why.
            ValueError: they do not support what the engine needs; so does this message.
        """
        super().__init__(
            *(num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window),
            *(kv_cache_dtype, logits_soft_cap, attn_type, kv_sharing_target_layer_name, sinks),
        )
        self.value_size = FlashAttentionDiffKVBackend.head_size_v
        config = get_current_vllm_config()
        refuse(self.where, _refusals(self.value_size, config.quant_config))
        # vLLM does not ask a backend that a model has chosen whether it supports what the engine needs.
        get_attn_backend(
            head_size,
            self.model_dtype(),
            kv_cache_dtype,
            has_sink=sinks is not None,
            use_mm_prefix=config.model_config.is_mm_prefix_lm,
            attn_type=attn_type,
            has_sliding_window=sliding_window is not None,
        )


def _refusals(value_size: int, quant_config: Any) -> list[str]:
    reasons = []
    if value_size not in DIMS:
        reasons.append(f"values of head size {value_size}: must be one of {list(DIMS)}")
    scheme = getattr(quant_config, "kv_cache_scheme", None) or {}
    if scheme.get("strategy") == "attn_head":
        reasons.append("scales of each KV head, which FLASH_ATTN_DIFFKV does not write KV with")
    return reasons
