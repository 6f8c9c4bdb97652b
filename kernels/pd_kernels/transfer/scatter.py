# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-decorators
"""Scatter: from a payload in wire order into the pages of a cache, decoded on the way, in one launch."""

import torch
import triton

from pd_kernels.transfer import numerics, scatter_kernel
from pd_kernels.transfer.blocks import Blocks
from pd_kernels.transfer.chunk_launch import TRITON, ChunkLaunch
from pd_kernels.transfer.copy_kernel import launch_copy
from pd_kernels.transfer.paging import write_tokens
from pd_kernels.transfer.payload import SUPER_PAGE, super_pages
from pd_kernels.transfer.sums import reference_payload_sums


def scatter_pages(
    blocks: Blocks,
    pages: torch.Tensor,
    slot: torch.Tensor,
    first_token: int,
    tokens: int,
    sums: torch.Tensor | None = None,
) -> None:
    """Write the tokens of a payload into the pages of `blocks`, in all its layers.

    On a GPU this queues one kernel on the current stream and returns; on CPU, and where rows are
    not multiples of 16 bytes, a head has more than 2^26 elements or a block more than 2^28, it takes
    plain torch.

    Args:
        blocks: of the consumer's cache: only the tokens of the chunk are written.
        pages: int32 `[pages]`, the engine's pages that take the chunk, on the cache's device, each
            at most once. Their ids are not checked: one that does not exist writes beyond the cache.
        slot: uint8 `[blocks.nbytes(tokens)]` or longer, dense, on the cache's device, aligned to 16
            bytes; only read.
        first_token: the chunk's first, counted from the start of the first page; 0 for `verbatim`.
        tokens: of the chunk; for `verbatim` pages of `blocks.views`.
        sums: from `new_sums(blocks.nbytes(tokens))`; the sums of the payload, as it was read, are
            added to it.

    Raises:
        ValueError: the slot or the sums are too small, or the pages do not hold the chunk.
    """
    if torch.compiler.is_compiling():
        _operator(
            *(list(blocks.views), blocks.factors, pages, slot, sums),
            *(blocks.parts, blocks.page_size, first_token, tokens),
            *(blocks.codec, blocks.source, blocks.destination, blocks.step),
        )
    else:  # a list of 160 views through the dispatcher takes longer than most chunks
        _run(ChunkLaunch(blocks, pages, slot, first_token, tokens, sums))


def _run(chunk: ChunkLaunch) -> None:
    chunk.check()
    if chunk.fits_kernels:
        with torch.cuda.device(chunk.slot.device):
            launch_scatter(chunk)
    else:
        reference_scatter(chunk)


@torch.library.custom_op("pd_kernels::scatter_pages", mutates_args=("views", "sums"))
def _operator(
    views: list[torch.Tensor],
    factors: torch.Tensor,
    pages: torch.Tensor,
    slot: torch.Tensor,
    sums: torch.Tensor | None,
    parts: int,
    page_size: int,
    first_token: int,
    tokens: int,
    codec: str,
    source: torch.dtype,
    destination: torch.dtype,
    step: str,
) -> None:
    # What a compiler gives may be copies, and a kernel goes where the table says: made of these.
    blocks = Blocks.at(views, factors, parts, page_size, codec, source, destination, step)
    _run(ChunkLaunch(blocks, pages, slot, first_token, tokens, sums))


@_operator.register_fake
def _(*_: object) -> None:
    return None


def launch_scatter(chunk: ChunkLaunch) -> None:
    """`scatter_pages` by kernels."""
    if chunk.blocks.as_stored:
        launch_copy(chunk, gather=False)
        return
    blocks = chunk.blocks
    widths = chunk.vectors(16)
    tiles = triton.cdiv(chunk.tokens * max(widths), scatter_kernel.VECTORS)
    places = chunk.places()
    scales = max(places["key_scales"], places["value_scales"])
    further = 0 if chunk.sums is None else triton.cdiv(scales, scatter_kernel.VECTORS)
    scatter_kernel.scatter_decoded[(blocks.parts * blocks.heads, tiles + further, blocks.layers)](
        *(blocks.table, blocks.factors, chunk.pages, chunk.slot),
        blocks.table if chunk.sums is None else chunk.sums,
        *(chunk.first_token, chunk.tokens, super_pages(chunk.tokens)),
        **places,
        tiles=tiles,
        **chunk.paging(),
        KEY_VECTORS=widths[0],
        VALUE_VECTORS=widths[1],
        CODE=TRITON[_codes(blocks)],
        SCALES={"raw": "none", "fp8_e4m3": "head", "int8": "group"}[blocks.codec],
        STEP=blocks.step,
        DESTINATION=TRITON[blocks.destination],
        CHECK=chunk.sums is not None,
        VECTORS=scatter_kernel.VECTORS,
        num_warps=scatter_kernel.WARPS,
        maxnreg=scatter_kernel.registers(
            blocks.wide, chunk.sums is not None, widths[0] == widths[1]
        ),
    )


def reference_scatter(chunk: ChunkLaunch) -> None:
    """What `scatter_pages` does, block by block, in torch."""
    blocks, pages = chunk.blocks, chunk.pages.tolist()
    payload, begin = chunk.payload, 0
    if chunk.sums is not None:
        chunk.sums.add_(reference_payload_sums(payload))
    for number, view in enumerate(blocks.views):
        part = number % blocks.parts
        size = chunk.extent.parts[part]
        scales = payload[begin : begin + size.scales].clone()
        codes = payload[begin + size.scales : begin + size.total].clone()
        begin += size.total
        if chunk.verbatim:
            x = codes.view(chunk.tokens, blocks.heads, -1).transpose(0, 1).unsqueeze(1)
            x = x.reshape(blocks.heads, chunk.tokens, -1)
        else:
            x = _decode(codes, scales, blocks, number, chunk.tokens)
        write_tokens(view, pages, chunk.first_token, blocks.page_size, x)


def _decode(
    codes: torch.Tensor, scales: torch.Tensor, blocks: Blocks, number: int, tokens: int
) -> torch.Tensor:
    """A block `[head, token, dim]` as the destination stores it."""
    heads, dim = blocks.heads, blocks.dims[number % blocks.parts]
    x = codes.view(_codes(blocks)).view(heads, tokens, dim)
    if blocks.as_stored:
        return x
    value = x.float()
    if blocks.codec == "fp8_e4m3":
        value = value * scales.view(torch.float32)[:heads, None, None]
    elif blocks.codec == "int8":
        groups = scales.view(torch.bfloat16).float()
        if number % blocks.parts == 0:
            each = groups[: heads * super_pages(tokens) * dim].view(heads, -1, dim)
            value = value * each.repeat_interleave(SUPER_PAGE, dim=1)[:, :tokens]
        else:
            value = value * groups[: heads * tokens].view(heads, tokens, 1)
    factor = float(blocks.factors[number])
    return numerics.store(value, factor, blocks.step, blocks.destination)


def _codes(blocks: Blocks) -> torch.dtype:
    """What lies on the wire."""
    if blocks.codec == "raw":
        return blocks.source
    return torch.int8 if blocks.codec == "int8" else torch.float8_e4m3fn
