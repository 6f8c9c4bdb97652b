# SPDX-License-Identifier: Apache-2.0
"""Attention of decode batches over a paged cache of keys and values, in one launch."""

from typing import Any

import torch

from pd_kernels.attention.decode_plan import DecodePlan, check_filled
from pd_kernels.attention.direct import DirectLaunch, allocated, direct_key, keep, known_launch
from pd_kernels.attention.mods import REGISTRY, Mod, check_mods
from pd_kernels.attention.operators import DecodeOutputs, Queries, attend, operator, planned
from pd_kernels.attention.paged_call import CacheScales, PagedCall, Scale
from pd_kernels.attention.paged_kernel import launch_paged, score_factor
from pd_kernels.attention.reference import reference_paged_decode
from pd_kernels.attention.work_partition import NO_MOD


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
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    return_partials: bool = False,
    plan: DecodePlan | None = None,
) -> Any:
    """Attend with the last tokens of each sequence to its KV.

    On a GPU this queues one kernel on the current stream (a few more without `plan`) and returns. It may
    be captured in a CUDA graph; lengths, tables and caches may change between replays. CPU tensors
    take the reference in torch.

    Args:
        q: bfloat16 or float16 `[batch, heads, dim]`, or `[batch, queries, heads, dim]` with up to 8
            queries: the last tokens of the sequence, whose KV is in the cache. dim is one of
            `paged_call.DIMS`. If sequences have different numbers of queries: nested, of layout
            torch.jagged, `[batch, *, heads, dim]`; no sequence may have more than the plan was
            made for (or, without a plan, than the nested tensor's `max_seqlen`).
        k_cache, v_cache: `[pages, page, kv heads, dim]` of q's dtype or float8_e4m3fn; any page
            size and any strides, except that the elements of a head must be consecutive. V may
            have another dim than K, also one of `paged_call.DIMS`.
        block_table: int32 `[batch, pages of a sequence]`. The device does not check the ids.
            Entries behind the sequence's last page are not read.
        lengths: tokens of KV of each sequence, the queries' tokens included: int32 or int64
            `[batch]`. A sequence of length 0 gives 0, with lse -inf. A query before the first token
            gives the same.
        scale: factor of the scores; `dim ** -0.5` by default.
        causal: queries see no later tokens. Pass False if the KV does not hold the queries' own
            tokens.
        window: the number of tokens that a query sees, its own included; 0 for all. Earlier tokens
            are not read.
        score_mod, mask_mod: change scores, and say which tokens are seen; see `mods.py`. If no
            query sees a token of a tile, the tile is skipped, unless the plan was made without the
            mask mod.
        k_scale, v_scale: scales of an FP8 cache, by which stored values are multiplied: two numbers,
            or two tensors, float32 `[kv heads]`. A scale of queries in FP8 belongs to `k_scale`.
        sinks: a score of each query head, bfloat16, float16 or float32 `[heads]`, not scaled. It
            takes part in the softmax and has no value (gpt-oss). lse then includes it: of partials
            that are merged, one has the sinks.
        out: dense, shaped like q with V's dim (nested, or its values, if q is nested); written and returned.
        return_lse: also return the natural log-sum-exp of each line's scores, float32 `[batch,
            (queries,) heads]`.
        return_partials: return `out` in float32 and lse, as `merge_partials` takes them.
        plan: from `plan_paged_decode` with such arguments, filled for these lengths. By default,
            the call makes one.

    Returns:
        `out`, or `(out, lse)`; nested if q is.

    Raises:
        ValueError: shapes, dtypes or strides contradict each other or are not supported.

    Source:
        FlashDecoding, for split-KV decoding with a partial softmax per piece. `work_partition.py`
        names the sources of the work partition.

    Example:
        Two sequences of 20 and 5 tokens, 4 query heads that share 2 KV heads, pages of 16 tokens.

        >>> import torch
        >>> from pd_kernels.attention import paged_decode
        >>> q = torch.randn(2, 4, 64).bfloat16()
        >>> k_cache, v_cache = torch.randn(2, 3, 16, 2, 64).bfloat16()
        >>> table = torch.tensor([[2, 0], [1, 0]], dtype=torch.int32)
        >>> out, lse = paged_decode(q, k_cache, v_cache, table, torch.tensor([20, 5]), return_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([2, 4, 64]), torch.Size([2, 4]))
        >>> scores = (q[1, 0].float() @ k_cache[1, :5, 0].float().T) * 64**-0.5
        >>> torch.allclose(out[1, 0].float(), scores.softmax(0) @ v_cache[1, :5, 0].float(), atol=0.02)
        True
    """
    if plan is None or plan.latest[0] is not lengths:
        check_filled(plan, lengths)
    key_scale, value_scale, head_scales = CacheScales.of(k_scale, v_scale)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    score = NO_MOD if score_mod is None else score_mod.number
    mask = NO_MOD if mask_mod is None else mask_mod.number
    tensors, outputs = [q, k_cache, v_cache, block_table], (return_lse, return_partials)
    if sinks is not None:
        tensors.append(sinks)
    if head_scales is not None:
        tensors += head_scales
    key = direct_key(plan, tensors, lengths, out, causal, window, score, mask, *outputs)
    if launch := known_launch(plan, key):
        lse = None
        if out is None or return_lse or return_partials:
            out, lse = allocated(q, v_cache.shape[-1], out, *outputs)
        first, last = out if lse is None else lse, lengths if sinks is None else sinks
        target = (out, first, lengths, last)
        launch(
            *(q, block_table, lengths, target),
            *(k_cache, v_cache, (lengths, lengths)),
            *(score_factor(scale, key_scale, score_mod), value_scale),
            head_scales or (lengths, lengths),
        )
        return out if lse is None else (out, lse)
    if score_mod is not None or mask_mod is not None:
        check_mods(score_mod, mask_mod)
    queries = Queries.of(q, plan)
    results = DecodeOutputs.of(q, v_cache.shape[-1], out, return_lse, return_partials)
    by_query_out, by_query_lse = results.by_query
    scratch, rows = planned(plan)
    run = _operator if torch.compiler.is_compiling() else _run
    made = run(
        query=queries.lines,
        starts=queries.starts,
        most_queries=queries.most,
        keys=k_cache,
        values=v_cache,
        table=block_table,
        lengths=lengths,
        out=by_query_out,
        lse=by_query_lse,
        scratch=scratch,
        rows=rows,
        scale=scale,
        key_scale=key_scale,
        value_scale=value_scale,
        causal=causal,
        window=window,
        score_mod=score,
        mask_mod=mask,
        sinks=sinks,
        key_scales=head_scales and head_scales[0],
        value_scales=head_scales and head_scales[1],
    )
    keep(plan, key, made)
    return results.returned


def plan_paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None = None,
    *,
    window: int = 0,
    max_batch: int | None = None,
    mask_mod: Mod | None = None,
    max_tokens: int | None = None,
) -> DecodePlan:
    """Allocate a plan for calls of `paged_decode` with such a `q` and `k_cache`.

    Fill it once a step (`plan.fill(lengths)`), and pass it to every layer. Layers share a plan if
    they have the same heads, dims, cache dtype, window and mask mod.

    Args:
        q, k_cache, v_cache: as `paged_decode` takes them; only shapes, dtypes and the device
            matter. V may be left out if its dim is K's.
        window: as in `paged_decode`.
        max_batch: the most sequences of a batch; by default that of `q`.
        mask_mod: `plan.fill` finds the tiles that the mod keeps, and calls with this mod read only
            those. Without it, calls with a mask mod read all tiles.
        max_tokens: the most tokens of a sequence; needed with `mask_mod`. Later tokens are not
            seen.

    Raises:
        ValueError: `mask_mod` without `max_tokens`.

    Example:
        >>> import torch
        >>> from pd_kernels.attention import paged_decode, plan_paged_decode
        >>> q, lengths = torch.randn(1, 2, 64), torch.tensor([7])
        >>> k_cache, v_cache = torch.randn(2, 1, 16, 2, 64)
        >>> plan = plan_paged_decode(q, k_cache, max_batch=8).fill(lengths)
        >>> table = torch.zeros(1, 1, dtype=torch.int32)
        >>> for layer in range(2):
        ...     out = paged_decode(q, k_cache, v_cache, table, lengths, plan=plan)
    """
    if mask_mod and max_tokens is None:
        raise ValueError("mask_mod without max_tokens: pass the most tokens of a sequence")
    query, starts, most = Queries.of(q)
    example = PagedCall(
        query=query,
        starts=starts,
        most_queries=most,
        keys=k_cache,
        values=k_cache if v_cache is None else v_cache,
        table=query,
        lengths=query if starts is None else starts[1:],
        scale=1.0,
        key_scale=1.0,
        value_scale=1.0,
        causal=True,
        window=window,
        score_mod=None,
        mask_mod=mask_mod,
    )
    return example.plan(max_batch, max_tokens)


def _run(
    query: torch.Tensor,
    starts: torch.Tensor | None,
    most_queries: int,
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
    sinks: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> DirectLaunch | None:
    batch = PagedCall(
        query=query,
        starts=starts,
        most_queries=most_queries,
        keys=keys,
        values=values,
        table=table,
        lengths=lengths,
        scale=scale,
        key_scale=key_scale,
        value_scale=value_scale,
        causal=causal,
        window=window,
        score_mod=REGISTRY.get(score_mod),
        mask_mod=REGISTRY.get(mask_mod),
        sinks=sinks,
        head_scales=None
        if key_scales is None or value_scales is None
        else (key_scales, value_scales),
    )
    return attend(batch, out, lse, scratch, rows, reference_paged_decode, launch_paged)


_operator = operator("paged_decode", _run)
