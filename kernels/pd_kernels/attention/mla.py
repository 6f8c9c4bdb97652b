# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention of decode batches over a paged cache of latents, in one launch."""

from typing import Any

import torch

from pd_kernels.attention.decode_plan import DecodePlan, check_filled
from pd_kernels.attention.direct import DirectLaunch, allocated, direct_key, keep, known_launch
from pd_kernels.attention.launch import ONE_LAUNCH, Phases
from pd_kernels.attention.mla_call import LATENT, MlaCall
from pd_kernels.attention.mla_gluon import launch_mla_gluon
from pd_kernels.attention.mla_kernel import launch_mla_triton, score_factor
from pd_kernels.attention.operators import DecodeOutputs, attend, operator, planned, with_queries
from pd_kernels.attention.paged_call import FP8
from pd_kernels.attention.reference import reference_mla_decode


def mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    kv_scale: float = 1.0,
    causal: bool = True,
    tree: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    return_partials: bool = False,
    plan: DecodePlan | None = None,
) -> Any:
    """Attend with the last tokens of each sequence to its latents, after weight absorption.

    On a GPU this queues one kernel on the current stream (three without `plan`) and returns. It may
    be captured in a CUDA graph; lengths, tables and caches may change between replays. CPU tensors
    take the reference in torch.

    Args:
        q: bfloat16 or float16 `[batch, heads, 576]`, or `[batch, queries, heads, 576]` with up to 8
            queries. 512 elements of a head belong to the latent, 64 to the part with RoPE.
        cache: `[pages, page, 576]` of q's dtype, or of float8_e4m3fn with one scale; or uint8
            `[pages, page, 656]`, FlashMLA's FP8 layout: 512 codes (e4m3), 4 scales (float32, one per
            128 codes), 64 bfloat16 elements with RoPE. With this layout q is bfloat16. The elements
            of a token must be consecutive. Any page size works; multiples of 64 tokens are fastest.
        block_table, lengths: as in `paged_decode`.
        scale: factor of the scores. Pass the factor of the heads before absorption; it does not
            follow from 576.
        kv_scale: the scale of a float8_e4m3fn cache, by which stored values are multiplied.
        causal: queries see no later tokens. Pass False if the latents do not hold the queries' own
            tokens.
        tree: int32 `[batch, queries]`, if the queries are drafts of several branches: bit i of a query's word says whether it
            sees the sequence's query i, its own included. All queries see all earlier tokens. A chain is 1, 3, 7 and so on.
        out: dense `[batch, (queries,) heads, 512]`; written and returned.
        return_lse, return_partials: as in `paged_decode`.
        plan: from `plan_mla_decode` with such arguments, filled for these lengths. By default, the
            call makes one.

    Returns:
        `out`, or `(out, lse)`.

    Raises:
        ValueError: shapes, dtypes or strides contradict each other or are not supported.

    Source:
        DeepSeek-V2 (arXiv 2405.04434), section 2.1; the FP8 layout is FlashMLA's.

    Example:
        >>> import torch
        >>> from pd_kernels.attention import mla_decode
        >>> q, cache = torch.randn(1, 16, 576).bfloat16(), torch.randn(3, 64, 576).bfloat16()
        >>> table = torch.tensor([[2, 0]], dtype=torch.int32)
        >>> mla_decode(q, cache, table, torch.tensor([100]), scale=192**-0.5).shape
        torch.Size([1, 16, 512])
    """
    if q.is_nested:
        raise ValueError(
            "nested q: must be dense, [batch, queries, heads, 576]. Sequences with other numbers of "
            "queries need a call of their own"
        )
    if plan is None or plan.latest[0] is not lengths:
        check_filled(plan, lengths)
    if isinstance(kv_scale, torch.Tensor):
        raise ValueError(f"kv_scale is a tensor {list(kv_scale.shape)}: must be one number")
    if kv_scale != 1.0 and cache.dtype != FP8:
        raise ValueError(
            f"kv_scale {kv_scale:g} with a cache of {cache.dtype}: must be 1, because only a cache of {FP8} has one"
        )
    tensors, outputs = [q, cache, block_table], (return_lse, return_partials)
    if tree is not None:
        tensors.append(tree)
    key = direct_key(plan, tensors, lengths, out, causal, *outputs)
    if launch := known_launch(plan, key):
        out, lse = allocated(q, LATENT, out, *outputs)
        target = (out, out if lse is None else lse, lengths, lengths)
        launch(
            *(q, block_table, lengths, target, cache),
            *(score_factor(scale, kv_scale), float(kv_scale), lengths if tree is None else tree),
        )
        return out if lse is None else (out, lse)
    results = DecodeOutputs.of(q, LATENT, out, return_lse, return_partials)
    run = _operator if torch.compiler.is_compiling() else _run
    by_query_out, by_query_lse = results.by_query
    scratch, rows = planned(plan)
    made = run(
        query=with_queries(q),
        cache=cache,
        table=block_table,
        lengths=lengths,
        out=by_query_out,
        lse=by_query_lse,
        scratch=scratch,
        rows=rows,
        scale=scale,
        kv_scale=kv_scale,
        causal=causal,
        tree=tree,
    )
    keep(plan, key, made)
    return results.returned


def plan_mla_decode(
    q: torch.Tensor, cache: torch.Tensor, *, max_batch: int | None = None
) -> DecodePlan:
    """Allocate a plan for calls of `mla_decode` with such a `q` and `cache`. All layers share it.

    Fill it once a step (`plan.fill(lengths)`).

    Args:
        q, cache: as `mla_decode` takes them. Shape, dtype and device matter. Strides and alignment
            of `cache` matter too, because the choice of a kernel depends on them (`Tuning.gluon`).
        max_batch: the most sequences of a batch; by default that of `q`.

    Example:
        >>> import torch
        >>> from pd_kernels.attention import plan_mla_decode
        >>> plan = plan_mla_decode(torch.zeros(4, 16, 576), torch.zeros(9, 64, 576)).fill(torch.tensor([100, 7]))
        >>> plan.rows.heads, plan.rows.tile
        (1, 64)
    """
    query = with_queries(q)
    return MlaCall(query, cache, query, query, 1.0, True).plan(max_batch)


def _run(
    query: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scratch: list[torch.Tensor],
    rows: list[int],
    scale: float,
    kv_scale: float,
    causal: bool,
    tree: torch.Tensor | None = None,
) -> DirectLaunch | None:
    batch = MlaCall(query, cache, table, lengths, scale, causal, kv_scale, tree)
    return attend(batch, out, lse, scratch, rows, reference_mla_decode, launch_mla)


def launch_mla(
    batch: MlaCall,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scratch: list[torch.Tensor],
    phases: Phases = ONE_LAUNCH,
) -> DirectLaunch | None:
    """Run `mla_decode` with the Gluon kernel if `MlaCall.gluon`, else with the Triton kernel.
    Arguments and result are as for `launch`; `phases` are the Triton kernel's. The Gluon kernel has
    no `DirectLaunch`, because its descriptors are made for each cache."""
    if not batch.gluon:
        return launch_mla_triton(batch, out, lse, scratch, phases)
    launch_mla_gluon(batch, out, lse, scratch)
    return None


_operator = operator("mla_decode", _run)
