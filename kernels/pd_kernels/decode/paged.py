# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-decorators
"""Attention of decode batches over a paged cache of keys and values, in one launch."""

from typing import Any

import torch

from pd_kernels.decode.mods import REGISTRY, Mod
from pd_kernels.decode.paged_batch import COSTS, Batch
from pd_kernels.decode.paged_kernel import launch_paged
from pd_kernels.decode.plan import Plan, multiprocessors
from pd_kernels.decode.reference import reference_paged_decode
from pd_kernels.decode.schedule import Rows


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
    plan: Plan | None = None,
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
    single = q.dim() == 3
    query = q.unsqueeze(1) if single else q
    dtype = torch.float32 if return_partials else q.dtype
    if out is None:
        out = torch.empty(query.shape, dtype=dtype, device=q.device)
    elif out.shape != q.shape or not out.is_contiguous():
        raise ValueError(f"out {list(out.shape)}: must be dense, {list(q.shape)} as q")
    wanted = return_lse or return_partials
    lse = torch.empty(query.shape[:3] if wanted else (0,), device=q.device)
    call = _operator if torch.compiler.is_compiling() else _run
    call(
        *(query, k_cache, v_cache, block_table, lengths, out.view(query.shape), lse),
        plan.tensors if plan else [],
        list(plan.rows) if plan else [],
        q.shape[-1] ** -0.5 if scale is None else scale,
        *(k_scale, v_scale, causal, window),
        *(-1 if mod is None else mod.number for mod in (score_mod, mask_mod)),
    )
    out = out.view(q.shape)
    return (out, lse.squeeze(1) if single else lse) if wanted else out


def plan_paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    *,
    window: int = 0,
    max_batch: int | None = None,
) -> Plan:
    """Room for the plan of calls with such a `q` and `k_cache`, to be filled once a step.

    Layers share it if they have the same heads, dims, cache dtype and window; batches up to
    `max_batch` (by default that of `q`) do, too.
    """
    query = q.unsqueeze(1) if q.dim() == 3 else q
    shape = Batch(query, k_cache, k_cache, query, query, 1.0, 1.0, 1.0, True, window, None, None)
    workers = shape.config.programs * multiprocessors(q.device)
    batch = query.shape[0] if max_batch is None else max_batch
    return Plan.of(shape.rows, COSTS, batch, workers, shape.height, query.shape[3], q.device)


def _run(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scratch: list[torch.Tensor],
    planned: list[int],
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
    batch = Batch(query, keys, values, table, lengths, *scales, causal, window, *mods)
    batch.check()
    if planned and Rows(*planned) != batch.rows:
        raise ValueError(f"plan for {Rows(*planned)}: must be for {batch.rows}")
    wanted = lse if lse.numel() else None
    if not query.is_cuda:
        reference_paged_decode(batch, out, wanted)
    elif query.numel():
        batch.check_kernel()
        with torch.cuda.device(query.device):
            if not scratch:
                scratch = plan_paged_decode(query, keys, window=window).fill(lengths).tensors
            launch_paged(batch, out, wanted, scratch)


_operator = torch.library.custom_op(
    "pd_kernels::paged_decode", _run, mutates_args=("out", "lse", "scratch")
)


@_operator.register_fake
def _(*_: object) -> None:
    return None
