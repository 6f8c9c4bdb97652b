# SPDX-License-Identifier: Apache-2.0
"""Replaces CPU_ATTN: decodes with the references in torch, slowly, on the pages that CPU_ATTN
writes. It tests everything except the kernels without a GPU.

A page is `[head][K|V]`. V is `[token][dim]`. K is `[dim][token]` with the known instruction sets.
When an engine starts, it checks this layout on a page that vLLM's own operation writes. AMX keeps K
and V in tiles, which strides cannot express. If the CPU has AMX, CPU_ATTN computes without it.
"""

import functools
from typing import Any

import torch
from vllm import _custom_ops
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from pd_kernels.vllm.paged_backend import FP8, PagedImpl, Supported
from pd_kernels.vllm.paged_builder import PagedBuilder


class PagedCpu(CPUAttentionBackend):
    """CPU_ATTN with our decodes. It keeps the name, because other parts derive the layout of the
    pages from the name."""

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == "decoder"

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False

    @staticmethod
    def get_impl_cls() -> type["PagedCpuImpl"]:
        return PagedCpuImpl

    @staticmethod
    def get_builder_cls() -> type["PagedCpuBuilder"]:
        return PagedCpuBuilder


class PagedCpuBuilder(PagedBuilder, CPUAttentionMetadataBuilder):
    """Refuses to start if pages have another layout than `halves` expects."""

    isa: str

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if self.isa == "amx":
            self.isa = "vec"
            self._set_isa_to_layers(layer_names)
        impl = self._layers[0].impl
        page, dim = self.block_size, self.head_dim
        if not _as_expected(self.isa, page, dim, self.dtype, impl.stored_dtype is not None):
            raise NotImplementedError(
                f"pages of {page} tokens of head size {dim} in {self.dtype}, as CPU_ATTN packs them for "
                f"{self.isa}: not known to paged_decode. Try --dtype float32 or another --block-size"
            )


class PagedCpuImpl(PagedImpl, CPUAttentionBackendImpl):
    """A layer with CPU_ATTN's pages."""

    where = "Decoding with pd_kernels on a CPU"
    scales_by_head = False  # CPU_ATTN writes with the largest of them

    @classmethod
    def allowed(cls) -> Supported:
        stock = CPUAttentionBackend
        return Supported(stock.get_supported_head_sizes(), stock.supported_dtypes)

    @staticmethod
    def model_dtype() -> torch.dtype:
        dtype: torch.dtype = get_current_vllm_config().model_config.dtype
        return dtype

    def pages(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return halves(kv_cache)


def halves(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of K and V, `[page, token, head, dim]`, in pages `[page, head, token, K and V]`."""
    count, heads, tokens, width = pages.shape
    dim = width // 2
    page, head, *_ = pages.stride()
    shape, start = (count, tokens, heads, dim), pages.storage_offset()
    key = pages.as_strided(shape, (page, 1, head, tokens))
    value = pages.as_strided(shape, (page, dim, head, 1), start + tokens * dim)
    return key, value


@functools.cache
def _as_expected(isa: str, page: int, dim: int, dtype: torch.dtype, fp8: bool) -> bool:
    """Whether `halves` finds the values that vLLM's own operation writes into a page."""
    heads = 2
    pages = torch.zeros(2, heads, page, 2 * dim, dtype=torch.uint8 if fp8 else dtype)
    # Small whole numbers, exact in every dtype.
    numbers = torch.arange(2 * page * heads * dim) % 13 - 6
    key, value = numbers.to(dtype).view(2, page, heads, dim).unbind()
    try:
        _custom_ops.cpu_attn_reshape_and_cache(
            key,
            value,
            *pages.view(2, heads, 2 * page, dim).chunk(2, dim=2),
            torch.arange(page) + page,
            isa,
            k_scale=1.0,
            v_scale=1.0,
            kv_cache_dtype="fp8" if fp8 else "auto",
        )
    except (RuntimeError, NotImplementedError):
        return False
    seen = halves(pages.view(FP8) if fp8 else pages)
    return all(
        torch.equal(half[1].to(dtype), expected)
        for half, expected in zip(seen, (key, value), strict=True)
    )
