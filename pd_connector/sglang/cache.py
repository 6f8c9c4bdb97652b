# SPDX-License-Identifier: Apache-2.0
"""SGLang's KV pool in our terms: the geometry of a rank, and each layer's pages as K and V.

A layer's K is `[slot, head, dim]`, one slot per token; V lies elsewhere in the same layout. A page is `page_size`
neighbouring slots. Page 0 receives the writes of padding tokens, and never belongs to a request.

Layers with a sliding window have a pool of their own. SGLang translates slots of the other pool into slots of this
pool, so these layers are a second page table. Recurrent layers are one more: a request has one slot of their pool (`states.py`).

Sparse attention (DSA) keeps a latent and an index key of each token. Keys of a page lie together, and their scales
behind them, so these pages pass whole, between pools with pages of the same size. Latents in DSA's
own FP8 form pass whole, too: they have scales in each latent.

A draft model (speculative decoding) has a pool of its own, with pages of the same numbers.
"""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from pd_connector.codec.elements import DTYPE_NAMES, DTYPES
from pd_connector.errors import UnsupportedGeometryError
from pd_connector.kv.geometry import DRAFT_LAYERS, Geometry, Group, Shard
from pd_connector.kv.heads import total_heads
from pd_connector.pages.layer import LayerPages, StatePages
from pd_connector.pages.paged_cache import PagedCache
from pd_connector.sglang.states import Parts, describe_states

_FP8 = "fp8_e4m3"
_OPAQUE = "uint8"  # bytes whose meaning only SGLang knows
_ONE = 1.0, 1.0
WINDOW_TABLE = 1
"""Page table of the layers with a sliding window; other layers with KV use table 0."""
STATE_TABLE = 1
"""Page table of recurrent layers. SGLang has no pool with both."""

INDEX_LAYERS = 1024
"""Number of the index keys of layer 0. Both of a layer's caches need a number, and models have fewer layers."""

NamedHeads = Mapping[int, Collection[int]]
"""`kv.heads.named_heads` of each layer's modules, by the layer's number in the model."""

Scales = Mapping[int, tuple[float, float]]
"""Scales of K and V in an FP8 pool, by the layer's number in the model."""


class DraftPool(NamedTuple):
    """The KV pool of a draft model.

    Attributes:
        pool: SGLang's.
        named, scales: see `describe_cache`; keyed by the draft model's own layer numbers.
    """

    pool: Any
    named: NamedHeads
    scales: Scales = MappingProxyType({})


def describe_cache(
    pool: Any,
    named: NamedHeads,
    shard: Shard,
    *,
    sliding_window: int = 0,
    scales: Scales | None = None,
    parts: Parts = (),
    draft: DraftPool | None = None,
) -> PagedCache:
    """A rank's pool as a `PagedCache`.

    Args:
        pool: SGLang's `token_to_kv_pool`.
        named: for each layer the numbers of KV heads in the whole model that its modules name.
        shard: the part of the model that this rank holds.
        sliding_window: tokens before a token that layers with a window see, as SGLang counts them.
        scales: scales of an FP8 pool; 1 for a layer without an entry.
        parts: parts of the convolutions of recurrent layers (`states.state_parts`).
        draft: the draft model's pool; None: the engine does not draft.

    Raises:
        UnsupportedGeometryError: this kind of pool cannot be moved, or it is not known which heads a rank holds.
    """
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    groups: list[tuple[Mapping[int, LayerPages | StatePages], Group]] = []
    if type(pool) is HybridLinearKVPool:
        numbers = list(pool.full_attention_layer_id_mapping)
        groups += _describe(pool.full_kv_pool, numbers, named, shard, scales or {})
        attends = frozenset(numbers)
        groups.append(describe_states(pool.mamba_pool, parts, shard, STATE_TABLE, attends))
    elif type(pool) is not SWAKVPool:
        held = range(shard.first_layer, shard.stop_layer)
        groups += _describe(pool, held, named, shard, scales or {})
        if getattr(pool, "use_dsa", False):
            index_keys = _index_keys(pool, held)
            groups += [] if index_keys is None else [index_keys]
    else:
        if not sliding_window:
            raise UnsupportedGeometryError(
                f"KV pool of type {type(pool).__name__} of a model without a sliding window: "
                "PDConnector cannot tell which part of it a request needs"
            )
        for part, table in ((pool.full_kv_pool, 0), (pool.swa_kv_pool, WINDOW_TABLE)):
            places = {
                place: number
                for number, (place, windowed) in pool.layers_mapping.items()
                if windowed == bool(table)
            }
            if not places:
                continue
            numbers = [places[place] for place in range(len(places))]
            # Our window also counts the token that sees.
            window = sliding_window + 1 if table else 0
            groups += _describe(
                part, numbers, named, shard, scales or {}, window=window, table=table
            )
    if draft is not None:
        groups += _describe_draft(pool, draft, shard)
    layers = {number: pages for part, _ in groups for number, pages in part.items()}
    return PagedCache(layers, Geometry(shard, tuple(group for _, group in groups)))


def own_shard(pool: Any, tp_rank: int, tp_size: int) -> Shard:
    """The part of the model that the pool holds."""
    numbers = getattr(pool, "layers_mapping", None)
    if hasattr(pool, "full_attention_layer_id_mapping"):
        numbers = (*pool.full_attention_layer_id_mapping, *pool.mamba_pool.mamba_layer_ids)
    if numbers is not None:
        return Shard(min(numbers), max(numbers) + 1, tp_rank, tp_size)
    return Shard(pool.start_layer, pool.start_layer + pool.layer_num, tp_rank, tp_size)


def _describe(
    pool: Any,
    numbers: Sequence[int],
    named: NamedHeads,
    shard: Shard,
    scales: Scales,
    *,
    window: int = 0,
    table: int = 0,
) -> list[tuple[dict[int, LayerPages], Group]]:
    """Layers with these numbers, held by one pool of plain tensors: a group for each number of heads."""
    dtype = DTYPE_NAMES.get(pool.dtype)
    if dtype is None:
        raise UnsupportedGeometryError(
            f"KV pool of {pool.dtype}: PDConnector moves SGLang's pools of "
            f"{', '.join(DTYPES)} (--kv-cache-dtype auto, bf16 or fp8_e4m3)"
        )
    pages, dims = _pages(pool)
    device = pages[0].key.device.type
    layout = f"{device}/token-head-dim"
    latent = not dims[1]
    if latent and dtype == _FP8:
        if getattr(pool, "dsa_kv_cache_store_fp8", False):
            dtype, layout = _OPAQUE, f"{device}/fp8-scales-rope"
        elif scaled := [n for n in numbers if scales.get(n, _ONE) != _ONE]:
            raise UnsupportedGeometryError(
                f"FP8 latents of layers {scaled[0]}-{scaled[-1]} with scales: SGLang writes latents without a scale, so "
                "PDConnector cannot tell what they mean; set --kv-cache-dtype auto"
            )
    by_heads: dict[int, dict[int, LayerPages]] = {}
    for number, layer in zip(numbers, pages, strict=True):
        heads = 1
        if not latent:
            named_heads = named.get(number, ())
            heads = total_heads(f"layer {number}", pool.head_num, shard.tp_size, named_heads)
        by_heads.setdefault(heads, {})[number] = layer
    return [
        (
            layers,
            Group(
                kind="latent" if latent else "attention",
                layers=tuple(layers),
                heads=heads,
                key_dim=dims[0],
                value_dim=dims[1],
                page_size=pool.page_size,
                window=window,
                dtype=dtype,
                layout=layout,
                heads_apart=pool.page_size == 1,
                table=table,
                scales=tuple(scales.get(n, _ONE) for n in layers) if dtype == _FP8 else (),
            ),
        )
        for heads, layers in by_heads.items()
    ]


def _describe_draft(
    pool: Any, draft: DraftPool, shard: Shard
) -> list[tuple[dict[int, LayerPages], Group]]:
    """The layers of a draft model. SGLang allocates a page in both pools at once, under one number."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    plain, draft_pool = (MHATokenToKVPool, MLATokenToKVPool), draft.pool
    if type(pool) not in plain or type(draft_pool) not in plain:
        raise UnsupportedGeometryError(
            f"KV pools {type(pool).__name__} of the model and {type(draft_pool).__name__} of its draft model: PDConnector "
            "moves drafts beside full attention and MLA latents (MHATokenToKVPool, MLATokenToKVPool); leave "
            "--speculative-algorithm out"
        )
    if draft_pool.page_size != pool.page_size:
        raise UnsupportedGeometryError(
            f"pages of {pool.page_size} tokens, and of {draft_pool.page_size} in the draft model's pool: PDConnector moves "
            "drafts in pages of one size; leave --speculative-algorithm out"
        )
    numbers = range(DRAFT_LAYERS, DRAFT_LAYERS + draft_pool.layer_num)
    ours = dict(zip(sorted(draft.named), numbers, strict=False))
    named = {ours[number]: heads for number, heads in draft.named.items() if number in ours}
    scales = {ours[number]: scale for number, scale in draft.scales.items() if number in ours}
    return _describe(draft_pool, numbers, named, shard, scales)


def _index_keys(pool: Any, numbers: Sequence[int]) -> tuple[dict[int, LayerPages], Group] | None:
    """The index keys of sparse attention; None if no layer of this pipeline stage has any. A layer that uses the keys
    of the preceding layer has none of its own."""
    if pool.index_kpool != 1:
        raise UnsupportedGeometryError(
            f"index keys of {pool.index_kpool} tokens each: PDConnector moves a key of each token; serve this model without "
            "--disaggregation-transfer-backend pd_connector"
        )
    held = {
        INDEX_LAYERS + number: buffer
        for number, buffer in zip(numbers, pool.index_k_with_scale_buffer, strict=True)
        if len(buffer)
    }
    if not held:
        return None
    first = next(iter(held.values()))
    key_dim = first.shape[1] // pool.page_size
    pages = {
        number: LayerPages(
            buffer.view(len(buffer), 1, pool.page_size, key_dim),
            None,
            (buffer.view(len(buffer), 1, -1),),
        )
        for number, buffer in held.items()
    }
    group = Group(
        kind="latent",
        layers=tuple(pages),
        heads=1,
        key_dim=key_dim,
        value_dim=0,
        page_size=pool.page_size,
        window=0,
        dtype=_OPAQUE,
        layout=f"{first.device.type}/keys-scales",
        heads_apart=pool.page_size == 1,
        table=0,
    )
    return pages, group


def _pages(pool: Any) -> tuple[list[LayerPages], tuple[int, int]]:
    """The layers of a pool, with the dims of K and V; (dim, 0) for a latent, which has no V."""
    from sglang.srt.mem_cache.memory_pool import (
        DSATokenToKVPool,
        MHATokenToKVPool,
        MLATokenToKVPool,
    )

    places = range(pool.layer_num)
    if type(pool) is MHATokenToKVPool:
        if pool.kv_cache_layout != "nhd" or pool.is_quantized_kv_cache:
            raise UnsupportedGeometryError(
                f"KV pool in layout {pool.kv_cache_layout}, quantised {pool.is_quantized_kv_cache}: "
                "PDConnector moves layout nhd, not quantised"
            )
        pages = [_layer(pool, pool.k_buffer[n], pool.v_buffer[n]) for n in places]
        return pages, (pool.head_dim, pool.v_head_dim)
    if type(pool) in (MLATokenToKVPool, DSATokenToKVPool):
        return [_layer(pool, pool.kv_buffer[n], None) for n in places], (pool.kv_cache_dim, 0)
    raise UnsupportedGeometryError(
        f"KV pool of type {type(pool).__name__}, {pool.dtype}: PDConnector moves full and "
        "sliding-window attention (MHATokenToKVPool), MLA latents (MLATokenToKVPool) and sparse attention "
        "(DSATokenToKVPool) of SGLang; serve this model without "
        "--disaggregation-transfer-backend pd_connector"
    )


def _layer(pool: Any, key: torch.Tensor, value: torch.Tensor | None) -> LayerPages:
    parts = [key] if value is None else [key, value]
    views = [_paged(part, pool.page_size) for part in parts]
    planes = tuple(_rows(view, apart=pool.page_size == 1) for view in views)
    opaque = getattr(pool, "dsa_kv_cache_store_fp8", False)
    dtype = torch.uint8 if opaque else pool.dtype
    seen = [view.view(dtype).permute(0, 2, 1, 3) for view in views]
    return LayerPages(seen[0], seen[1] if value is not None else None, planes)


def _paged(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """`[slot, head, dim]` as `[page, token, head, dim]`; slots that do not fill a page are left out."""
    pages = slots.shape[0] // page_size
    return slots[: pages * page_size].view(pages, page_size, *slots.shape[1:])


def _rows(view: torch.Tensor, *, apart: bool) -> torch.Tensor:
    """A paged view as bytes: `[page, head, bytes]`, or `[page, 1, bytes]` if heads are not `apart`."""
    parts = view.shape[2] if apart else 1
    return view.reshape(view.shape[0], parts, -1).view(torch.uint8)
