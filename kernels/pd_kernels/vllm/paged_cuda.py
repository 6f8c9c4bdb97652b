# SPDX-License-Identifier: Apache-2.0
"""Replaces FLASH_ATTN on NVIDIA GPUs, as `--attention-backend CUSTOM`.

The cache is FlashAttention's, in any of vLLM's layouts. FlashAttention also computes prefills and
non-causal batches.
"""

from typing import Any

import torch
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from pd_kernels.attention.decode_call import LARGE_MEMORY
from pd_kernels.attention.paged_call import DIMS
from pd_kernels.vllm.paged_backend import PagedImpl, Supported
from pd_kernels.vllm.paged_builder import PagedBuilder
from pd_kernels.vllm.refusals import LayerOptions, refusals

DTYPES = (torch.float16, torch.bfloat16)


class PagedFlash(FlashAttentionBackend):
    """FLASH_ATTN with our decodes. It keeps the name, because other parts derive the layout of the
    pages from the name."""

    @staticmethod
    def get_impl_cls() -> type["PagedFlashImpl"]:
        return PagedFlashImpl

    @staticmethod
    def get_builder_cls() -> type["PagedFlashBuilder"]:
        return PagedFlashBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size in DIMS and bool(super().supports_head_size(head_size))

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == "decoder"

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return False

    @classmethod
    def supports_rswa(cls) -> bool:
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """False: the split of a sequence depends on the whole batch."""
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """False: batches are split by the lengths that the host knows."""
        return False

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        reasons = refusals(LayerOptions(head_size, dtype, kv_cache_dtype), DIMS, DTYPES)
        capability = device_capability
        if head_size > 256 and capability is not None and capability.major not in LARGE_MEMORY:
            reasons.append(
                f"head size {head_size} on compute capability {capability.major}.{capability.minor}: needs "
                "the shared memory of 9.0 or 10.x"
            )
        theirs = super().supports_combination(
            *(head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse),
            *(use_mm_prefix, device_capability),
        )
        return "; ".join([*reasons, *([theirs] if theirs else [])]) or None


class PagedFlashBuilder(PagedBuilder, FlashAttentionMetadataBuilder):
    """FlashAttention's builder makes the metadata of everything except decodes."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        return cls._cudagraph_support


class PagedFlashImpl(PagedImpl, FlashAttentionImpl):
    """A layer with FlashAttention's pages."""

    where = "Decoding with pd_kernels"
    scales_by_head = True

    @classmethod
    def allowed(cls) -> Supported:
        return Supported(DIMS, DTYPES)

    @staticmethod
    def model_dtype() -> torch.dtype:
        return torch.get_default_dtype()  # the model's dtype, while the model is loaded

    def pages(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return key, value
