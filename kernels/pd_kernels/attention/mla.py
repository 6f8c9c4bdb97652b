# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention of decode batches over a paged cache of latents, in one launch."""

from typing import Any

import torch

from pd_kernels.attention.mla_call import LATENT, MlaCall
from pd_kernels.attention.mla_kernel import launch_mla
from pd_kernels.attention.operators import DecodeOutputs, attend, operator, planned, with_queries
from pd_kernels.attention.plan_kernel import DecodePlan
from pd_kernels.attention.reference import reference_mla_decode


def mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    causal: bool = True,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    return_partials: bool = False,
    plan: DecodePlan | None = None,
) -> Any:
    """Attend with the last tokens of each sequence to its latents, after weight absorption.

    On a GPU this queues one kernel on the current stream (three without `plan`) and returns; it may
    be captured in a CUDA graph, and lengths, tables and caches may change between replays. CPU
    tensors take the reference in torch.

    Args:
        q: bfloat16 or float16 `[batch, heads, 576]`, or `[batch, queries, heads, 576]` with up to 4
            queries; 512 of a head belong to the latent, 64 to the part with RoPE.
        cache: `[pages, page, 576]` of q's dtype, or uint8 `[pages, page, 656]`, FlashMLA's FP8 layout:
            512 codes (e4m3), 4 scales (float32, one for 128 codes), 64 bfloat16; q is bfloat16 then.
            Elements of a token consecutive; any page size, whole tiles of 64 tokens are fastest.
        block_table, lengths: as of `paged_decode`.
        scale: of scores, that of the heads before absorption: it does not follow from 576.
        causal: queries see no later tokens. False for latents that do not hold the queries' own.
        out: dense `[batch, (queries,) heads, 512]`; written and returned.
        return_lse, return_partials, plan: as of `paged_decode`; the plan from `plan_mla_decode`.

    Returns:
        `out`, or `(out, lse)`.

    Raises:
        ValueError: shapes, dtypes or strides that do not belong together or are not supported.
    """
    results = DecodeOutputs.of(q, LATENT, out, return_lse, return_partials)
    run = _operator if torch.compiler.is_compiling() else _run
    run(
        *(with_queries(q), cache, block_table, lengths),
        *(*results.by_query, *planned(plan)),
        *(scale, causal),
    )
    return results.returned


def plan_mla_decode(
    q: torch.Tensor, cache: torch.Tensor, *, max_batch: int | None = None
) -> DecodePlan:
    """Room for the plan of calls with such a `q` and `cache`, to be filled once a step, for all layers
    and for batches up to `max_batch` (by default that of `q`)."""
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
    causal: bool,
) -> None:
    batch = MlaCall(query, cache, table, lengths, scale, causal)
    attend(batch, out, lse, scratch, rows, reference_mla_decode, launch_mla)


_operator = operator("mla_decode", _run)
