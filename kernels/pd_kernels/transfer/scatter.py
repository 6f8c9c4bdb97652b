# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-decorators
"""Scatter: decode a payload in wire order, and copy it into the pages of a cache, in one launch."""

import torch
import triton

from pd_kernels.payload import SUPER_PAGE, super_pages
from pd_kernels.transfer import numerics, scatter_kernel
from pd_kernels.transfer.chunk_launch import TRITON, ChunkLaunch
from pd_kernels.transfer.chunk_operator import ChunkOperator
from pd_kernels.transfer.copy_kernel import launch_copy
from pd_kernels.transfer.paged_tokens import write_tokens
from pd_kernels.transfer.planes import Planes
from pd_kernels.transfer.sums import reference_payload_sums


def scatter_pages(
    planes: Planes,
    pages: torch.Tensor,
    slot: torch.Tensor,
    first_token: int,
    tokens: int,
    sums: torch.Tensor | None = None,
) -> None:
    """Write the tokens of a payload into the pages of `planes`, in all its layers.

    On a GPU this queues one kernel on the current stream and returns. CPU tensors, and chunks that
    kernels cannot index (see `gather_pages`), take plain torch.

    Args:
        planes: K and V in the consumer's cache; only the tokens of the chunk are written.
        pages: int32 `[pages]` on the cache's device, the engine's pages for the chunk, each at most
            once. The device does not check the ids: an invalid id writes outside the cache.
        slot: uint8 `[planes.nbytes(tokens)]` or longer, dense, on the cache's device, aligned to 16
            bytes; only read.
        first_token: the chunk's first token, counted from the start of the first page; 0 for
            `verbatim`.
        tokens: tokens of the chunk; for `verbatim`, pages of `planes.views`.
        sums: from `new_sums(planes.nbytes(tokens), device)`; the sums of the payload that was read
            are added.

    Raises:
        ValueError: the slot or the sums are too small, or the pages do not hold the chunk.

    Example:
        An int8 payload of 3 tokens goes into page 1 of a cache in float16.

        >>> import torch
        >>> from pd_kernels.transfer import Planes, Stored, gather_pages, scatter_pages
        >>> bf16, fp16 = Stored(torch.bfloat16), Stored(torch.float16)
        >>> key, value = torch.randn(2, 4, 2, 8, 16).bfloat16()  # page, head, token, dim each
        >>> new_key, new_value = torch.zeros(2, 4, 2, 8, 16).half()
        >>> ours = Planes.of([key], [value], 8, "int8", bf16, fp16)
        >>> theirs = Planes.of([new_key], [new_value], 8, "int8", bf16, fp16)
        >>> slot = torch.empty(ours.nbytes(3), dtype=torch.uint8)
        >>> gather_pages(ours, torch.tensor([2], dtype=torch.int32), slot, 0, 3)
        >>> scatter_pages(theirs, torch.tensor([1], dtype=torch.int32), slot, 0, 3)
        >>> torch.allclose(new_value[1, :, :3].float(), value[2, :, :3].float(), atol=0.05)
        True
    """
    _scatter(ChunkLaunch(planes, pages, slot, first_token, tokens, sums))


def launch_scatter(chunk: ChunkLaunch) -> None:
    """Run `scatter_pages` with a kernel."""
    if chunk.planes.as_stored:
        launch_copy(chunk, gather=False)
        return
    planes, summed = chunk.planes, chunk.sums is not None
    vectors = scatter_kernel.VECTORS
    widths = chunk.vectors(16)
    tiles = triton.cdiv(chunk.tokens * max(widths), vectors)
    scale_tiles = triton.cdiv(chunk.most_scale_sections, vectors) if summed else 0
    grid = (planes.parts * planes.heads, tiles + scale_tiles, planes.layers)
    scatter_kernel.scatter_decoded[grid](
        **chunk.operands(summed=summed),
        factors=planes.factors,
        super_pages=super_pages(chunk.tokens),
        tiles=tiles,
        KEY_VECTORS=widths[0],
        VALUE_VECTORS=widths[1],
        CODE=TRITON[_code_dtype(planes)],
        SCALES={"raw": "none", "fp8_e4m3": "super-page", "int8": "group"}[planes.codec],
        STEP=planes.step,
        DESTINATION=TRITON[planes.destination],
        CHECK=summed,
        VECTORS=vectors,
        num_warps=scatter_kernel.WARPS,
        maxnreg=scatter_kernel.registers(planes.wide, summed, widths[0] == widths[1]),
    )


def reference_scatter(chunk: ChunkLaunch) -> None:
    """Compute `scatter_pages` plane by plane, in plain torch."""
    planes, pages = chunk.planes, chunk.pages.tolist()
    payload, begin = chunk.payload, 0
    if chunk.sums is not None:
        chunk.sums.add_(reference_payload_sums(payload))
    for number, view in enumerate(planes.views):
        size = chunk.sizes.parts[number % planes.parts]
        scales = payload[begin : begin + size.scales].clone()
        codes = payload[begin + size.scales : begin + size.total].clone()
        begin += size.total
        if chunk.verbatim:
            x = codes.view(chunk.tokens, planes.heads, -1).transpose(0, 1).unsqueeze(1)
            x = x.reshape(planes.heads, chunk.tokens, -1)
        else:
            x = _decode(codes, scales, planes, number, chunk.tokens)
        write_tokens(view, pages, chunk.first_token, planes.page_size, x)


def _decode(
    codes: torch.Tensor, scales: torch.Tensor, planes: Planes, number: int, tokens: int
) -> torch.Tensor:
    """Decode plane `number` into `[head, token, dim]`, as the destination stores it."""
    heads, dim = planes.heads, planes.dims[number % planes.parts]
    x = codes.view(_code_dtype(planes)).view(heads, tokens, dim)
    if planes.as_stored:
        return x
    value = x.float()
    if planes.codec == "fp8_e4m3":
        count = super_pages(tokens)
        each = scales.view(torch.float32)[: heads * count].view(heads, count, 1)
        value = value * each.repeat_interleave(SUPER_PAGE, dim=1)[:, :tokens]
    elif planes.codec == "int8":
        groups = scales.view(torch.bfloat16).float()
        if number % planes.parts == 0:
            each = groups[: heads * super_pages(tokens) * dim].view(heads, -1, dim)
            value = value * each.repeat_interleave(SUPER_PAGE, dim=1)[:, :tokens]
        else:
            value = value * groups[: heads * tokens].view(heads, tokens, 1)
    factor = float(planes.factors[number])
    return numerics.store(value, factor, planes.step, planes.destination)


def _code_dtype(planes: Planes) -> torch.dtype:
    """The dtype of the codes in the payload."""
    if planes.codec == "raw":
        return planes.source
    return torch.int8 if planes.codec == "int8" else torch.float8_e4m3fn


_scatter = ChunkOperator("scatter_pages", ("views", "sums"), launch_scatter, reference_scatter)
