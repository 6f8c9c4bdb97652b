# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-decorators
"""Multi-head latent attention of decode batches over a paged cache of latents, in one launch."""

from typing import Any

import torch

from pd_kernels.decode.mla_batch import COSTS, LATENT, MlaBatch
from pd_kernels.decode.mla_kernel import launch_mla
from pd_kernels.decode.plan import Plan, multiprocessors
from pd_kernels.decode.reference import reference_mla_decode
from pd_kernels.decode.schedule import Rows


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
    plan: Plan | None = None,
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
    single = q.dim() == 3
    query = q.unsqueeze(1) if single else q
    shape = (*q.shape[:-1], LATENT)
    dtype = torch.float32 if return_partials else q.dtype
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=q.device)
    elif out.shape != shape or not out.is_contiguous():
        raise ValueError(f"out {list(out.shape)}: must be dense, {list(shape)}")
    wanted = return_lse or return_partials
    lse = torch.empty(query.shape[:3] if wanted else (0,), device=q.device)
    call = _operator if torch.compiler.is_compiling() else _run
    call(
        *(query, cache, block_table, lengths, out.view(*query.shape[:3], LATENT), lse),
        plan.tensors if plan else [],
        list(plan.rows) if plan else [],
        *(scale, causal),
    )
    return (out, lse.squeeze(1) if single else lse) if wanted else out


def plan_mla_decode(q: torch.Tensor, cache: torch.Tensor, *, max_batch: int | None = None) -> Plan:
    """Room for the plan of calls with such a `q` and `cache`, to be filled once a step, for all layers
    and for batches up to `max_batch` (by default that of `q`)."""
    query = q.unsqueeze(1) if q.dim() == 3 else q
    shape = MlaBatch(query, cache, query, query, 1.0, True)
    workers = shape.config.programs * multiprocessors(q.device)
    batch = query.shape[0] if max_batch is None else max_batch
    return Plan.of(shape.rows, COSTS, batch, workers, shape.height, LATENT, q.device)


def _run(
    query: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scratch: list[torch.Tensor],
    planned: list[int],
    scale: float,
    causal: bool,
) -> None:
    batch = MlaBatch(query, cache, table, lengths, scale, causal)
    batch.check()
    if planned and Rows(*planned) != batch.rows:
        raise ValueError(f"plan for {Rows(*planned)}: must be for {batch.rows}")
    wanted = lse if lse.numel() else None
    if not query.is_cuda:
        reference_mla_decode(batch, out, wanted)
    elif query.numel():
        batch.check_kernel()
        with torch.cuda.device(query.device):
            if not scratch:
                scratch = plan_mla_decode(query, cache).fill(lengths).tensors
            launch_mla(batch, out, wanted, scratch)


_operator = torch.library.custom_op(
    "pd_kernels::mla_decode", _run, mutates_args=("out", "lse", "scratch")
)


@_operator.register_fake
def _(*_: object) -> None:
    return None
