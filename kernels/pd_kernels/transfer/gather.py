# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-decorators
"""Gather: copy the pages of a cache into a payload in wire order, and code them, in one launch."""

import torch
import triton

from pd_kernels.int8_scale import int8_scales
from pd_kernels.payload import SUPER_PAGE, super_pages
from pd_kernels.transfer import gather_fp8_kernel, gather_int8_kernel, numerics
from pd_kernels.transfer.chunk_launch import TRITON, ChunkLaunch
from pd_kernels.transfer.chunk_operator import ChunkOperator
from pd_kernels.transfer.copy_kernel import launch_copy
from pd_kernels.transfer.paged_tokens import read_tokens
from pd_kernels.transfer.planes import Planes
from pd_kernels.transfer.sums import reference_payload_sums


def gather_pages(
    planes: Planes,
    pages: torch.Tensor,
    slot: torch.Tensor,
    first_token: int,
    tokens: int,
    sums: torch.Tensor | None = None,
) -> None:
    """Write the payload of a chunk: some tokens in all layers of `planes`.

    On a GPU this queues one kernel on the current stream and returns. CPU tensors take plain torch.
    Chunks that kernels cannot index do too: rows of codes that are not multiples of 16 bytes, heads
    of more than 2^26 elements, planes of more than 2^28 elements.

    Args:
        planes: K and V in the producer's cache; only read.
        pages: int32 `[pages]` on the cache's device, the engine's pages that hold the chunk. The
            device does not check the ids: an invalid id reads outside the cache.
        slot: uint8 `[planes.nbytes(tokens)]` or longer, dense, on the cache's device, aligned to 16
            bytes. Every byte of the payload is written, from the slot's start. Nothing behind the
            payload is touched.
        first_token: the chunk's first token, counted from the start of the first page; 0 for
            `verbatim`.
        tokens: tokens of the chunk; for `verbatim`, pages of `planes.views`.
        sums: from `new_sums(planes.nbytes(tokens), device)`; the payload's sums are added.

    Raises:
        ValueError: the slot or the sums are too small, or the pages do not hold the chunk.

    Example:
        Two layers with 3 KV heads of 32 elements. Tokens 5 to 24 of pages 4 and 1 pass to another
        cache, whose pages are 2 and 0.

        >>> import torch
        >>> from pd_kernels.transfer import Planes, Stored, gather_pages, scatter_pages
        >>> bf16 = Stored(torch.bfloat16)
        >>> def some_planes():
        ...     views = torch.randn(2, 2, 6, 3, 16, 32).bfloat16()  # K|V, layer, page, head, token, dim
        ...     return Planes.of(views[0], views[1], 16, "raw", bf16, bf16)
        >>> ours, theirs = some_planes(), some_planes()
        >>> slot = torch.empty(ours.nbytes(20), dtype=torch.uint8)
        >>> gather_pages(ours, torch.tensor([4, 1], dtype=torch.int32), slot, 5, 20)
        >>> scatter_pages(theirs, torch.tensor([2, 0], dtype=torch.int32), slot, 5, 20)
        >>> torch.equal(theirs.views[0][2, :, 5:], ours.views[0][4, :, 5:])
        True
    """
    _gather(ChunkLaunch(planes, pages, slot, first_token, tokens, sums))


def launch_gather(chunk: ChunkLaunch) -> None:
    """Run `gather_pages` with a kernel."""
    if chunk.planes.codec == "fp8_e4m3":
        _launch_fp8(chunk)
    elif chunk.planes.codec == "int8":
        _launch_int8(chunk)
    else:
        launch_copy(chunk, gather=True)


def packed(planes: Planes) -> bool:
    """Whether words of two elements are handled: elements have 16 bits, and their rows are
    aligned."""
    return planes.wide and planes.source.itemsize == 2


def _launch_fp8(chunk: ChunkLaunch) -> None:
    planes = chunk.planes
    compute = planes.step == "none"
    pairs = compute and packed(planes)
    vector = 16 if pairs else 8
    widths = chunk.vectors(vector)
    shape = gather_fp8_kernel.Shape.of(max(planes.dims), planes.source.itemsize)
    count = super_pages(chunk.tokens)
    gather_fp8_kernel.gather_fp8[(planes.parts * planes.heads, count, planes.layers)](
        **chunk.operands(summed=chunk.sums is not None),
        factors=planes.factors,
        super_pages=count,
        HEADS=planes.heads,
        KEY_VECTORS=widths[0],
        VALUE_VECTORS=widths[1],
        SOURCE=TRITON[planes.source],
        COMPUTE=compute,
        CHECK=chunk.sums is not None,
        PACKED=pairs,
        VECTORS=gather_fp8_kernel.PIECE_ELEMENTS // vector,
        PIECES=shape.pieces,
        num_warps=shape.warps,
        maxnreg=shape.registers,
    )


def _launch_int8(chunk: ChunkLaunch) -> None:
    planes = chunk.planes
    key_dim, value_dim = planes.dims[0], planes.dims[-1]
    channels, padded = gather_int8_kernel.key_channels(key_dim), triton.next_power_of_2(value_dim)
    value_tokens = gather_int8_kernel.value_tokens(padded)
    count = super_pages(chunk.tokens)
    tiles = count * (key_dim // channels)
    if planes.parts == 2:
        tiles = max(tiles, triton.cdiv(chunk.tokens, value_tokens))
    gather_int8_kernel.gather_int8[(planes.parts * planes.heads, tiles, planes.layers)](
        **chunk.operands(summed=chunk.sums is not None),
        super_pages=count,
        HEADS=planes.heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        CHANNELS=channels,
        TOKENS=value_tokens,
        PADDED=padded,
        SOURCE=TRITON[planes.source],
        CHECK=chunk.sums is not None,
        PACKED=packed(planes),
        num_warps=gather_int8_kernel.WARPS,
        maxnreg=gather_int8_kernel.REGISTERS,
    )


def reference_gather(chunk: ChunkLaunch) -> None:
    """Compute `gather_pages` plane by plane, in plain torch."""
    planes, pages = chunk.planes, chunk.pages.tolist()
    payload, begin = chunk.payload, 0
    for number, view in enumerate(planes.views):
        size = chunk.sizes.parts[number % planes.parts]
        plane = payload[begin : begin + size.total]
        begin += size.total
        x = read_tokens(view, pages, chunk.first_token, chunk.tokens, planes.page_size)
        if chunk.verbatim:
            plane.copy_(x.transpose(0, 1).reshape(-1))  # here, a "token" is a page of one head
            continue
        scales, codes = _encode(x, planes, number)
        plane[: size.scales] = 0
        plane[: scales.numel()] = scales
        plane[size.scales :] = codes
    if chunk.sums is not None:
        chunk.sums.add_(reference_payload_sums(payload))


def _encode(x: torch.Tensor, planes: Planes, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Code plane `number`, `[head, token, dim]`: the bytes of its scales, and the bytes of its
    codes."""
    if planes.codec == "raw":
        return x.new_empty(0).view(torch.uint8), _bytes(x)
    value = x.float()
    if planes.codec == "int8":
        return _encode_int8(value, key=number % planes.parts == 0)
    if planes.step == "over":
        factor = float(planes.factors[number])
        scales = torch.full((x.shape[0], super_pages(x.shape[1])), factor, device=x.device)
        return _bytes(scales), _bytes(numerics.store(value, factor, "over", numerics.FP8))
    whole = value.masked_fill(value.isinf(), torch.nan)
    groups = whole.split(SUPER_PAGE, dim=1)
    scales = torch.stack([numerics.power_scales(group) for group in groups], 1)
    spread = scales.repeat_interleave(SUPER_PAGE, dim=1)[:, : x.shape[1], None]
    return _bytes(scales), _bytes((whole / spread).to(numerics.FP8))


def _encode_int8(value: torch.Tensor, key: bool) -> tuple[torch.Tensor, torch.Tensor]:
    groups = value.split(SUPER_PAGE, dim=1) if key else (value,)
    largest = [group.abs().amax(1 if key else 2, keepdim=True) for group in groups]  # or NaN
    scales = [int8_scales(each) for each in largest]
    codes = [
        (group / scale).round().nan_to_num(0.0).to(torch.int8)
        for group, scale in zip(groups, scales, strict=True)
    ]
    # Scales are values of bfloat16. Their upper halves have one NaN; a conversion's NaN differs by processor.
    halves = (torch.cat(scales, 1).view(torch.int32) >> 16).to(torch.int16)
    return _bytes(halves), _bytes(torch.cat(codes, 1))


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


_gather = ChunkOperator("gather_pages", ("slot", "sums"), launch_gather, reference_gather)
