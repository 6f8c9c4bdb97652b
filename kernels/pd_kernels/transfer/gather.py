# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-decorators
"""Gather: from the pages of a cache to a payload in wire order, coded on the way, in one launch."""

import torch
import triton

from pd_kernels.transfer import gather_fp8_kernel, gather_int8_kernel, numerics
from pd_kernels.transfer.blocks import Blocks
from pd_kernels.transfer.chunk_launch import TRITON, ChunkLaunch
from pd_kernels.transfer.copy_kernel import launch_copy
from pd_kernels.transfer.paging import read_tokens
from pd_kernels.transfer.payload import SUPER_PAGE, super_pages
from pd_kernels.transfer.sums import reference_payload_sums


def gather_pages(
    blocks: Blocks,
    pages: torch.Tensor,
    slot: torch.Tensor,
    first_token: int,
    tokens: int,
    sums: torch.Tensor | None = None,
) -> None:
    """Write the payload of a chunk: its tokens in all layers of `blocks`.

    On a GPU this queues one kernel on the current stream (a small buffer is zeroed before where
    `fp8_e4m3` computes its scales) and returns; on CPU, and where rows are not multiples of 16
    bytes, a head has more than 2^26 elements or a block more than 2^28, it takes plain torch.

    Args:
        blocks: of the producer's cache, whose memory is only read.
        pages: int32 `[pages]`, the engine's pages that hold the chunk, on the cache's device. Their
            ids are not checked: one that does not exist reads beyond the cache.
        slot: uint8 `[blocks.nbytes(tokens)]` or longer, dense, on the cache's device, aligned to 16
            bytes. The payload is written from its start, every byte; nothing behind it is touched.
        first_token: the chunk's first, counted from the start of the first page; 0 for `verbatim`.
        tokens: of the chunk; for `verbatim` pages of `blocks.views`.
        sums: from `new_sums(blocks.nbytes(tokens))`; the payload's sums are added to it.

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
            launch_gather(chunk)
    else:
        reference_gather(chunk)


@torch.library.custom_op("pd_kernels::gather_pages", mutates_args=("slot", "sums"))
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


def launch_gather(chunk: ChunkLaunch, max_polls: int = gather_fp8_kernel.MAX_POLLS) -> None:
    """`gather_pages` by kernels; `max_polls` is how often fp8 polls at what other programs have published."""
    if chunk.blocks.codec == "fp8_e4m3":
        _launch_fp8(chunk, max_polls)
    elif chunk.blocks.codec == "int8":
        _launch_int8(chunk)
    else:
        launch_copy(chunk, gather=True)


def _launch_fp8(chunk: ChunkLaunch, max_polls: int) -> None:
    blocks = chunk.blocks
    compute = blocks.step == "none"
    widths = chunk.vectors(8)
    vectors = gather_fp8_kernel.vectors(blocks.source.itemsize)
    tiles = triton.cdiv(chunk.tokens * max(widths), vectors)
    columns = blocks.parts * blocks.heads
    ahead = tiles if compute and tiles > gather_fp8_kernel.resident(chunk.slot.device) else 0
    programs = tiles + ahead
    grid = (programs, columns, blocks.layers) if compute else (columns, tiles, blocks.layers)
    words = columns * blocks.layers * tiles if compute else 1
    state = torch.zeros(words, dtype=torch.int32, device=chunk.slot.device)
    gather_fp8_kernel.gather_fp8[grid](
        *(blocks.table, blocks.factors, chunk.pages, chunk.slot),
        *(blocks.table if chunk.sums is None else chunk.sums, state),
        *(chunk.first_token, chunk.tokens),
        **chunk.places(),
        tiles=tiles,
        ahead=ahead,
        max_polls=max_polls,
        **chunk.paging(),
        HEADS=blocks.heads,
        KEY_VECTORS=widths[0],
        VALUE_VECTORS=widths[1],
        SOURCE=TRITON[blocks.source],
        COMPUTE=compute,
        CHECK=chunk.sums is not None,
        VECTORS=vectors,
        num_warps=gather_fp8_kernel.WARPS,
        maxnreg=gather_fp8_kernel.REGISTERS,
    )


def _launch_int8(chunk: ChunkLaunch) -> None:
    blocks = chunk.blocks
    key_dim, value_dim = blocks.dims[0], blocks.dims[-1]
    channels, padded = gather_int8_kernel.key_channels(key_dim), triton.next_power_of_2(value_dim)
    value_tokens = gather_int8_kernel.value_tokens(padded)
    pages = super_pages(chunk.tokens)
    tiles = pages * (key_dim // channels)
    if blocks.parts == 2:
        tiles = max(tiles, triton.cdiv(chunk.tokens, value_tokens))
    gather_int8_kernel.gather_int8[(blocks.parts * blocks.heads, tiles, blocks.layers)](
        *(blocks.table, chunk.pages, chunk.slot),
        blocks.table if chunk.sums is None else chunk.sums,
        *(chunk.first_token, chunk.tokens, pages),
        **chunk.places(),
        **chunk.paging(),
        HEADS=blocks.heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        CHANNELS=channels,
        TOKENS=value_tokens,
        PADDED=padded,
        SOURCE=TRITON[blocks.source],
        CHECK=chunk.sums is not None,
        num_warps=gather_int8_kernel.WARPS,
        maxnreg=gather_int8_kernel.REGISTERS,
    )


def reference_gather(chunk: ChunkLaunch) -> None:
    """What `gather_pages` does, block by block, in torch."""
    blocks, pages = chunk.blocks, chunk.pages.tolist()
    payload, begin = chunk.payload, 0
    for number, view in enumerate(blocks.views):
        part = number % blocks.parts
        size = chunk.extent.parts[part]
        block = payload[begin : begin + size.total]
        begin += size.total
        x = read_tokens(view, pages, chunk.first_token, chunk.tokens, blocks.page_size)
        if chunk.verbatim:
            block.copy_(x.transpose(0, 1).reshape(-1))  # a page of all heads is a token here
            continue
        scales, codes = _encode(x, blocks, number)
        block[: size.scales] = 0
        block[: scales.numel()] = scales
        block[size.scales :] = codes
    if chunk.sums is not None:
        chunk.sums.add_(reference_payload_sums(payload))


def _encode(x: torch.Tensor, blocks: Blocks, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of the scales and the codes of a block `[head, token, dim]`."""
    if blocks.codec == "raw":
        return x.new_empty(0).view(torch.uint8), _bytes(x)
    value = x.float()
    if blocks.codec == "int8":
        return _encode_int8(value, number % blocks.parts == 0)
    if blocks.step == "over":
        factor = float(blocks.factors[number])
        scales = torch.full((x.shape[0],), factor, device=x.device)
        return _bytes(scales), _bytes(numerics.store(value, factor, "over", numerics.FP8))
    scales = numerics.power_scales(value)
    whole = value.masked_fill(value.isinf(), torch.nan)
    return _bytes(scales), _bytes((whole / scales[:, None, None]).to(numerics.FP8))


def _encode_int8(value: torch.Tensor, key: bool) -> tuple[torch.Tensor, torch.Tensor]:
    groups = value.split(SUPER_PAGE, dim=1) if key else (value,)
    scales = [numerics.int8_scales(group, 1 if key else 2) for group in groups]
    codes = [
        (group / scale).round().nan_to_num(0.0).to(torch.int8)
        for group, scale in zip(groups, scales, strict=True)
    ]
    return _bytes(torch.cat(scales, 1).to(torch.bfloat16)), _bytes(torch.cat(codes, 1))


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)
