# SPDX-License-Identifier: Apache-2.0
"""Caches in the layouts of engines, and the measured models."""

from typing import NamedTuple

import torch

ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""vLLM's layouts. L: layer, B: page, H: head, N: token, C: K and V of one token of one head, side
by side."""
POOLS = "pools"
"""SGLang's layout: K and V apart, `[token slot, head, dim]` for each layer."""

PAGED, RESHARD = "gather and scatter", "reshard"
"""What of the transfer kernels is checked and measured together."""


class Model(NamedTuple):
    """The part of a model that one rank holds."""

    name: str
    layers: int
    heads: int
    key_dim: int
    value_dim: int  # 0 for a latent

    def bytes_of(self, tokens: int, element: int) -> int:
        return self.layers * self.heads * (self.key_dim + self.value_dim) * tokens * element


LLAMA_8B = Model("Llama-3.1-8B", 32, 8, 128, 128)
LLAMA_70B_TP8 = Model("70B, 1 of 8", 80, 1, 128, 128)
DEEPSEEK_MLA = Model("DeepSeek MLA", 61, 1, 576, 0)
MODELS = (LLAMA_8B, LLAMA_70B_TP8, DEEPSEEK_MLA)


class CacheViews(NamedTuple):
    """A cache, as views of each layer.

    Attributes:
        keys, values: `[page, head, token, dim]`; `values` is empty for latents.
        storages: the tensors that own the memory of all views.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    storages: list[torch.Tensor]

    def clone(self) -> "CacheViews":
        """The same layout over a copy of the memory."""
        copies = {old.data_ptr(): old.clone() for old in self.storages}

        def moved(view: torch.Tensor) -> torch.Tensor:
            new = copies[view.untyped_storage().data_ptr()]
            return new.as_strided(view.shape, view.stride(), view.storage_offset())

        return CacheViews(
            [moved(view) for view in self.keys],
            [moved(view) for view in self.values],
            list(copies.values()),
        )


def make_cache(
    model: Model, pages: int, page_size: int, order: str, dtype: torch.dtype, device: str
) -> CacheViews:
    """Make a cache of normal random numbers, clamped to 400 so that FP8 can hold them."""
    if order == POOLS:
        return _pools(model, pages, page_size, dtype, device)
    width = model.key_dim + model.value_dim
    extents = dict(zip("LBHNC", (model.layers, pages, model.heads, page_size, width), strict=True))
    storage = _random([extents[axis] for axis in order], dtype, device)
    whole = storage.permute([order.index(axis) for axis in "LBHNC"])
    keys = [layer[..., : model.key_dim] for layer in whole]
    values = [layer[..., model.key_dim :] for layer in whole] if model.value_dim else []
    return CacheViews(keys, values, [storage])


def _pools(model: Model, pages: int, page_size: int, dtype: torch.dtype, device: str) -> CacheViews:
    def pool(dim: int) -> torch.Tensor:
        return _random([pages * page_size, model.heads, dim], dtype, device)

    def view(storage: torch.Tensor) -> torch.Tensor:
        return storage.view(pages, page_size, *storage.shape[1:]).transpose(1, 2)

    keys = [pool(model.key_dim) for _ in range(model.layers)]
    values = [pool(model.value_dim) for _ in range(model.layers)] if model.value_dim else []
    return CacheViews([view(x) for x in keys], [view(x) for x in values], [*keys, *values])


def _random(shape: list[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    values = torch.empty(shape, dtype=dtype, device=device)
    for part in values.flatten().split(1 << 28):  # keeps float32 copies small
        numbers = torch.randn(part.shape, device=device)
        part.copy_(numbers.clamp_(-400, 400).to(dtype))
    return values
