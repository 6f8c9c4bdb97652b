# SPDX-License-Identifier: Apache-2.0
"""How vLLM's CPU attention packs K and V within a page.

Its pages are `[head][K|V]`; V lies as `[token][dim]`, K, for the instruction sets we know, as
`[dim][token]`. Other instruction sets pack otherwise: what a page looks like is tried out with
vLLM's own operation, and pages that look otherwise pass only between engines of the same kind.
"""

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec


class CpuPacking(NamedTuple):
    """The packing of one layer's backend."""

    name: str  # of the backend and the instruction set
    isa: str | None  # as vLLM calls it; None for backends that do not pack

    @classmethod
    def of(cls, vllm_config: "VllmConfig", layer: str) -> "CpuPacking":
        module = vllm_config.compilation_config.static_forward_context.get(layer)
        backend = getattr(module, "attn_backend", None)
        name = str(backend.get_name()) if backend is not None else "unknown"
        isa = getattr(getattr(module, "impl", None), "isa", None) or getattr(module, "isa", None)
        return cls(f"{name}-{isa or torch.backends.cpu.get_cpu_capability()}", isa)

    def known(self, spec: "AttentionSpec", page_size: int) -> bool:
        """Whether `halves` is right for pages of this form."""
        if not self.name.startswith("CPU_ATTN") or spec.head_size != spec.head_size_v:
            return False
        return _as_expected(self.isa, page_size, int(spec.head_size), spec.dtype)

    def halves(
        self, tensor: torch.Tensor, key_dim: int, value_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of pages `[page, head, token, K and V]`, `[page, head, token, dim]` each."""
        pages, heads, tokens, _ = tensor.shape
        page, head, *_ = tensor.stride()
        key = tensor.as_strided((pages, heads, tokens, key_dim), (page, head, 1, tokens))
        value = tensor.as_strided(
            (pages, heads, tokens, value_dim),
            (page, head, value_dim, 1),
            tensor.storage_offset() + tokens * key_dim,
        )
        return key, value


@functools.cache
def _as_expected(isa: str | None, page_size: int, dim: int, dtype: torch.dtype) -> bool:
    """Let vLLM write one page, and look whether its K and V are where we expect them."""
    from vllm import _custom_ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    heads = 2
    stored = dtype if dtype.itemsize > 1 else torch.uint8
    written = dtype if dtype.itemsize > 1 else torch.bfloat16
    pages = torch.zeros(2, heads, page_size, 2 * dim, dtype=stored)
    # Small whole numbers, exact in every dtype.
    numbers = torch.arange(2 * page_size * heads * dim) % 13 - 6
    key, value = numbers.to(written).view(2, page_size, heads, dim).unbind()
    key_pages, value_pages = pages.view(2, heads, 2 * page_size, dim).chunk(2, dim=2)
    slots = torch.arange(page_size) + page_size
    cache_dtype = "auto" if dtype.itemsize > 1 else "fp8"
    isa = isa or _get_attn_isa(written, page_size, dim)
    try:
        _custom_ops.cpu_attn_reshape_and_cache(
            key, value, key_pages, value_pages, slots, isa, 1.0, 1.0, cache_dtype
        )
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    seen = pages if dtype.itemsize > 1 else pages.view(torch.float8_e4m3fn)
    halves = CpuPacking("", isa).halves(seen, dim, dim)
    return all(
        torch.equal(half[1].transpose(0, 1).to(written), wanted)
        for half, wanted in zip(halves, (key, value), strict=True)
    )
