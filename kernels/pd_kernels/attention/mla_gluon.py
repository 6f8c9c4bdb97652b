# SPDX-License-Identifier: Apache-2.0
"""Launches of the Gluon kernel of `mla_decode`."""

import functools

import torch

from pd_kernels.attention.launch import MERGE_ONLY
from pd_kernels.attention.mla_call import GLUON_TILE, LATENT, ROPE, MlaCall
from pd_kernels.attention.mla_kernel import launch_mla_triton
from pd_kernels.attention.online_softmax import LOG2E


def launch_mla_gluon(
    batch: MlaCall, out: torch.Tensor, lse: torch.Tensor | None, scratch: list[torch.Tensor]
) -> None:
    """Run `mla_decode` with the Gluon kernel, and merge split rows in a second launch.

    The arguments are those of `launch`; `batch.gluon` must be true. The plan must be made under the
    same `Tuning`.
    """
    # Imported at the first launch, because most processes never use it.
    from pd_kernels.attention import mla_gluon_kernel as kernel

    ranges, counters, partials, weights = scratch[:4]
    shape = batch.shape(lse is not None)
    halves, tails = descriptors(batch.cache)
    kernel.latent_attention_tma[(len(ranges) * batch.paired,)](
        halves=halves,
        tails=tails,
        query=batch.query,
        table=batch.table,
        lengths=batch.lengths,
        tree=batch.lengths if batch.tree is None else batch.tree,
        out=out,
        lse=out if lse is None else lse,
        ranges=ranges,
        counters=counters,
        partials=partials,
        weights=weights,
        workers=len(ranges),
        query_stride=batch.query_strides[0],
        table_stride=batch.table.stride(0),
        scale=batch.scale * LOG2E,
        pitch=batch.pitch,
        SHAPE=shape,
        PAGE=batch.cache.shape[1],
        CAUSAL=batch.causal and batch.queries > 1 and not batch.drafts,
        TREE=batch.drafts,
        QUERY=batch.query_strides[1:],
        num_warps=4,
        maxnreg=kernel.REGISTERS,
    )
    launch_mla_triton(batch, out, lse, scratch, MERGE_ONLY)


def descriptors(cache: torch.Tensor) -> tuple[object, object]:
    """Descriptors with which the TMA reads a cache `[pages, page, 576]`. They describe
    `[tokens, 576]`, in boxes of 64 tokens and 256 or 64 elements."""
    return tuple(  # type: ignore[return-value]
        _descriptor(cache, width) for width in (LATENT // 2, ROPE)
    )


def _descriptor(cache: torch.Tensor, width: int) -> object:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    pages, page, elements = cache.shape
    tokens = (pages - 1) * (cache.stride(0) // cache.stride(1)) + page
    flat = cache.as_strided((tokens, elements), (cache.stride(1), 1))
    return TensorDescriptor.from_tensor(flat, [GLUON_TILE, width], _layout(cache.dtype))


@functools.cache
def _layout(dtype: torch.dtype) -> object:
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * dtype.itemsize, rank=2)
