# SPDX-License-Identifier: Apache-2.0
"""How vLLM's CPU attention packs K and V within a page.

Its pages are `[head][K|V]`. With AMX, K and V both lie in tiles, as the matrix unit reads them. With the other
known instruction sets, K lies as `[dim][token]` and V as `[token][dim]`. A trial with vLLM's own operation
confirms the layout. Pages with another layout pass only between engines of the same kind.
"""

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from pd_connector.pages.tiles import untiled

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec

_TILE = 16  # rows of an AMX tile
_PAIR = 2  # elements that AMX multiplies at once


class CpuPacking(NamedTuple):
    """The packing of one layer's backend."""

    name: str  # backend and instruction set
    isa: str | None  # as vLLM calls it; None for backends that do not pack

    @classmethod
    def of(cls, vllm_config: "VllmConfig", layer: str) -> "CpuPacking":
        module = vllm_config.compilation_config.static_forward_context.get(layer)
        backend = getattr(module, "attn_backend", None)
        name = str(backend.get_name()) if backend is not None else "unknown"
        isa = getattr(getattr(module, "impl", None), "isa", None) or getattr(module, "isa", None)
        return cls(f"{name}-{isa or torch.backends.cpu.get_cpu_capability()}", isa)

    def covers(self, spec: "AttentionSpec", page_size: int) -> bool:
        """Whether `halves` is right for pages of this shape."""
        packs = self.name.startswith("CPU_ATTN") and self.isa is not None
        if not packs or spec.head_size != spec.head_size_v:
            return False
        return _as_expected(self.isa, page_size, int(spec.head_size), spec.dtype)

    def halves(
        self, tensor: torch.Tensor, key_dim: int, value_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of pages `[page, head, token, K and V]`: `[page, head, token, dim]` each, or tiled
        (`pd_connector.pages.tiles`)."""
        if self.isa == "amx":
            return _amx_halves(tensor, key_dim, value_dim)
        pages, heads, tokens, _ = tensor.shape
        page, head, *_ = tensor.stride()
        key = tensor.as_strided((pages, heads, tokens, key_dim), (page, head, 1, tokens))
        value = tensor.as_strided(
            (pages, heads, tokens, value_dim),
            (page, head, value_dim, 1),
            tensor.storage_offset() + tokens * key_dim,
        )
        return key, value


def _amx_halves(
    tensor: torch.Tensor, key_dim: int, value_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of pages in AMX tiles. Two neighbouring elements of the axis that AMX multiplies along lie side by side;
    sixteen such pairs, along the other axis, follow each other. K is `[token / 16][dim / 2][16 tokens][2 dims]`. V is
    multiplied along the tokens: `[dim / 16][token / 2][16 dims][2 tokens]`."""
    pages, heads, tokens, _ = tensor.shape
    page, head, *_ = tensor.stride()
    row = _TILE * _PAIR
    key = tensor.as_strided(
        (pages, heads, tokens // _TILE, _TILE, key_dim // _PAIR, _PAIR),
        (page, head, _TILE * key_dim, _PAIR, row, 1),
    )
    value = tensor.as_strided(
        (pages, heads, tokens // _PAIR, _PAIR, value_dim // _TILE, _TILE),
        (page, head, row, 1, _TILE * tokens, _PAIR),
        tensor.storage_offset() + tokens * key_dim,
    )
    return key, value


@functools.cache
def _as_expected(isa: str | None, page_size: int, dim: int, dtype: torch.dtype) -> bool:
    """Let vLLM write one page, and check that its K and V are at the expected places."""
    from vllm import _custom_ops

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
    try:
        _custom_ops.cpu_attn_reshape_and_cache(
            key, value, key_pages, value_pages, slots, isa, 1.0, 1.0, cache_dtype
        )
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    seen = pages if dtype.itemsize > 1 else pages.view(torch.float8_e4m3fn)
    halves = CpuPacking("", isa).halves(seen, dim, dim)
    return all(
        torch.equal(untiled(half)[1].transpose(0, 1).to(written), expected)
        for half, expected in zip(halves, (key, value), strict=True)
    )
