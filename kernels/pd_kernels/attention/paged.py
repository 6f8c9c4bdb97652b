# SPDX-License-Identifier: Apache-2.0
"""Attention of decode batches over a paged cache of keys and values, in one launch."""

from typing import Any

import torch

from pd_kernels.attention.mods import REGISTRY, Mod
from pd_kernels.attention.operators import DecodeOutputs, attend, operator, planned, with_queries
from pd_kernels.attention.paged_call import PagedCall
from pd_kernels.attention.paged_kernel import launch_paged
from pd_kernels.attention.plan_kernel import DecodePlan
from pd_kernels.attention.reference import reference_paged_decode


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int = 0,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    return_partials: bool = False,
    plan: DecodePlan | None = None,
) -> Any:
    """Attend with the last tokens of each sequence to its KV.

    On a GPU this queues one kernel on the current stream (three without `plan`) and returns; it may
    be captured in a CUDA graph, and lengths, tables and caches may change between replays. CPU
    tensors take the reference in torch.

    Args:
        q: bfloat16 or float16 `[batch, heads, dim]`, or `[batch, queries, heads, dim]` with up to 8
            queries: the last tokens of the sequence, whose KV is in the cache. dim is one of DIMS.
        k_cache, v_cache: `[pages, page, kv heads, dim]` of q's dtype or float8_e4m3fn; any strides,
            elements of a head consecutive; any page size.
        block_table: int32 `[batch, pages of a sequence]`. Ids are not checked on the device; those of
            pages without tokens of the sequence are not read.
        lengths: int32 or int64 `[batch]`, tokens of KV, the queries' own included. A sequence of
            length 0 gives 0, with lse -inf; so does a query that lies before the first token.
        scale: of scores; `dim ** -0.5` by default.
        causal: queries see no later tokens. False for KV that does not hold the queries' own.
        window: tokens that a query sees, its own included; 0 for all. Those before are not read.
        score_mod, mask_mod: see `mods`.
        k_scale, v_scale: of an FP8 cache: its elements are multiplied by them.
        out: dense, shaped like q; written and returned.
        return_lse: also return the natural logarithm of each query's sum, float32 `[batch, (queries,)
            heads]`.
        return_partials: `out` is float32, and lse is returned: what `merge_partials` takes.
        plan: from `plan_paged_decode` with such arguments, filled for these lengths. Without, one is
            made.

    Returns:
        `out`, or `(out, lse)`.

    Raises:
        ValueError: shapes, dtypes or strides that do not belong together or are not supported.
    """
    results = DecodeOutputs.of(q, q.shape[-1], out, return_lse, return_partials)
    run = _operator if torch.compiler.is_compiling() else _run
    run(
        *(with_queries(q), k_cache, v_cache, block_table, lengths),
        *(*results.by_query, *planned(plan)),
        q.shape[-1] ** -0.5 if scale is None else scale,
        *(k_scale, v_scale, causal, window),
        *(-1 if mod is None else mod.number for mod in (score_mod, mask_mod)),
    )
    return results.returned


def plan_paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    *,
    window: int = 0,
    max_batch: int | None = None,
) -> DecodePlan:
    """Room for the plan of calls with such a `q` and `k_cache`, to be filled once a step.

    Layers share it if they have the same heads, dims, cache dtype and window; batches up to
    `max_batch` (by default that of `q`) do, too.
    """
    query = with_queries(q)
    batch = PagedCall(
        query, k_cache, k_cache, query, query, 1.0, 1.0, 1.0, True, window, None, None
    )
    return batch.plan(max_batch)


def _run(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scratch: list[torch.Tensor],
    rows: list[int],
    scale: float,
    key_scale: float,
    value_scale: float,
    causal: bool,
    window: int,
    score_mod: int,
    mask_mod: int,
) -> None:
    mods = (REGISTRY.get(number) for number in (score_mod, mask_mod))
    scales = scale, key_scale, value_scale
    batch = PagedCall(query, keys, values, table, lengths, *scales, causal, window, *mods)
    attend(batch, out, lse, scratch, rows, reference_paged_decode, launch_paged)


_operator = operator("paged_decode", _run)
