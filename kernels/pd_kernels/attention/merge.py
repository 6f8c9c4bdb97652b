# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Merge partial attention: one result from attention over several shards of a sequence's KV.

A partial is the result of attention over one shard: `out`, float32, normalised by the shard's own
sum, and `lse`, float32, the natural logarithm of that sum. For an empty shard, `lse` is -inf and
`out` may be anything. For a shard with a sink of inf, `lse` is inf and `out` 0; it takes the place of
all others. Up to rounding, the merged result is that of attention over the whole
sequence (Infinite-LLM, Lin et al. 2024, section 4).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

_TILE = 2048
"""Elements of a program's tile: four accesses of 16 bytes per thread and shard."""
_WARPS = 4


class Partials(NamedTuple):
    """Attention over a part of the KV, or over all of it.

    Attributes:
        out: float32 `[..., dim]`, normalised.
        lse: float32 `[...]`, the natural log-sum-exp of the scores; -inf without KV.
    """

    out: torch.Tensor
    lse: torch.Tensor


def merge_partials(
    outs: torch.Tensor | Sequence[torch.Tensor],
    lses: torch.Tensor | Sequence[torch.Tensor],
    out: torch.Tensor | None = None,
) -> Partials:
    """Merge partials of shards of the same sequences.

    On a GPU this queues one kernel on the current stream and returns; CPU tensors take plain torch.

    Args:
        outs: float32 `[shards, ..., dim]`, or a list of `[..., dim]`, which is copied into one
            tensor. The `out` of an empty shard is not read and may hold anything.
        lses: float32 `[shards, ...]`, or a list of `[...]`.
        out: dense `[..., dim]`, float32, float16 or bfloat16; written. A new float32 tensor by
            default.

    Returns:
        `out`, and float32 `lse`, `[...]`, of the whole. If all shards are empty: 0 and -inf. If the `lse` of a shard is inf:
        the `out` of such shards alone, and inf.

    Raises:
        ValueError: shapes or dtypes contradict each other.

    Example:
        Attention over 30 tokens equals the merge of attention over the first 20 and the last 10.

        >>> import torch
        >>> from pd_kernels.attention import Partials, merge_partials
        >>> query, keys, values = torch.randn(64), torch.randn(30, 64), torch.randn(30, 64)
        >>> def attend(tokens):
        ...     scores = keys[tokens] @ query / 8
        ...     return Partials(scores.softmax(0) @ values[tokens], scores.logsumexp(0))
        >>> first, last, whole = attend(slice(20)), attend(slice(20, 30)), attend(slice(30))
        >>> merged = merge_partials([first.out, last.out], [first.lse, last.lse])
        >>> torch.allclose(merged.out, whole.out, atol=1e-5), torch.allclose(merged.lse, whole.lse)
        (True, True)
    """
    outs = outs if isinstance(outs, torch.Tensor) else torch.stack(list(outs))
    lses = lses if isinstance(lses, torch.Tensor) else torch.stack(list(lses))
    if outs.shape[:-1] != lses.shape or lses.dim() < 1 or not len(lses):
        raise ValueError(
            f"outs {list(outs.shape)}, lses {list(lses.shape)}: "
            "want [shards, ..., dim] and [shards, ...] with at least one shard"
        )
    if outs.dtype != torch.float32 or lses.dtype != torch.float32:
        raise ValueError(f"outs of {outs.dtype}, lses of {lses.dtype}: partials are float32")
    if out is None:
        out = torch.empty(outs.shape[1:], dtype=torch.float32, device=outs.device)
    elif out.shape != outs.shape[1:] or not out.is_contiguous():
        raise ValueError(
            f"out {list(out.shape)}, strides {list(out.stride())}: want {list(outs.shape[1:])}, dense"
        )
    call = _operator if torch.compiler.is_compiling() else _run
    return Partials(out, call(outs, lses, out))


def _run(outs: torch.Tensor, lses: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    if not outs.is_cuda:
        merged = reference_merge(outs, lses)
        out.copy_(merged.out)
        return merged.lse
    with torch.cuda.device(outs.device):
        return launch_merge(outs, lses, out)


_operator = torch.library.custom_op("pd_kernels::merge_partials", _run, mutates_args=("out",))


@_operator.register_fake
def _(outs: torch.Tensor, lses: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return lses.new_empty(lses.shape[1:])


def reference_merge(outs: torch.Tensor, lses: torch.Tensor) -> Partials:
    """Compute `merge_partials` in plain torch."""
    largest = lses.amax(0)
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    # The difference of two infinities would be NaN.
    weights = torch.where(lses == largest, 1.0, (lses - largest).exp())
    total = weights.sum(0)
    used = outs.masked_fill((weights == 0).unsqueeze(-1), 0.0)
    summed = (used * weights.unsqueeze(-1)).sum(0)
    out = summed / total.masked_fill(total == 0, 1.0).unsqueeze(-1)
    return Partials(out, largest + total.log())


def launch_merge(outs: torch.Tensor, lses: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Compute `merge_partials` with the kernel. Partials that are not dense within a shard are
    copied first."""
    outs = outs if outs[0].is_contiguous() else outs.contiguous()
    lses = lses if lses[0].is_contiguous() else lses.contiguous()
    shards, dim = len(outs), outs.shape[-1]
    lse = torch.empty(lses.shape[1:], dtype=torch.float32, device=lses.device)
    if not out.numel():
        return lse.fill_(-torch.inf)
    unit = 4 if outs.stride(0) % 4 == 0 else 1
    width = triton.next_power_of_2(dim)
    rows = max(1, _TILE // width)
    grid = (triton.cdiv(lse.numel(), rows),)
    _merge[grid](
        outs=outs,
        lses=lses,
        out=out,
        lse=lse,
        rows=lse.numel(),
        out_stride=outs.stride(0) // unit,
        lse_stride=lses.stride(0),
        UNIT=unit,
        SHARDS=shards,
        DIM=dim,
        WIDTH=width,
        ROWS=rows,
        num_warps=_WARPS,
    )
    return lse


_LARGEST_FLOAT = tl.constexpr(torch.finfo(torch.float32).max)
"""The largest finite float32."""


@triton.jit(do_not_specialize=["rows", "out_stride", "lse_stride"])
def _merge(
    outs,
    lses,
    out,
    lse,
    rows,
    out_stride,
    lse_stride,
    UNIT: tl.constexpr,
    SHARDS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = row < rows
    # 64 bits, because shards may lie far apart. UNIT tells the compiler that their distance is a
    # multiple of it.
    between = out_stride.to(tl.int64) * UNIT
    largest = tl.full((ROWS,), -float("inf"), tl.float32)
    for shard in tl.static_range(SHARDS):
        shard_lse = tl.load(lses + shard * lse_stride.to(tl.int64) + row, mask=inside, other=0.0)
        largest = tl.maximum(largest, shard_lse, propagate_nan=tl.PropagateNan.ALL)
    largest = tl.where(largest == -float("inf"), 0.0, largest)
    shift = tl.minimum(largest, _LARGEST_FLOAT, propagate_nan=tl.PropagateNan.ALL)
    total = tl.zeros((ROWS,), tl.float32)
    summed = tl.zeros((ROWS, WIDTH), tl.float32)
    place = row[:, None] * DIM + column[None, :]
    for shard in tl.static_range(SHARDS):
        shard_lse = tl.load(lses + shard * lse_stride.to(tl.int64) + row, mask=inside, other=0.0)
        # The difference of two infinities would be NaN. A select of the weight costs 40 registers with 8 shards of 512.
        shard_lse = tl.minimum(shard_lse, _LARGEST_FLOAT, propagate_nan=tl.PropagateNan.ALL)
        weight = tl.exp(shard_lse - shift)
        mask = (inside & (weight != 0.0))[:, None] & (column < DIM)[None, :]
        partial = tl.load(outs + shard * between + place, mask=mask, other=0.0)
        summed += partial * weight[:, None]
        total += weight
    merged = summed / tl.where(total == 0.0, 1.0, total)[:, None]
    mask = inside[:, None] & (column < DIM)[None, :]
    tl.store(out + place, merged.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + row, largest + tl.log(total), mask=inside)
