# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The checksum of a payload. The kernel that moves the payload sums it on the device, and the host
hashes the sums.

`pd_kernels.checksum` defines it: row and column sums of a matrix of 64-bit words. Sums wrap
and commute, so programs can add to them in any order.
"""

import numpy as np
import torch
import triton
import triton.language as tl

from pd_kernels.checksum import COLUMNS, ROW_BYTES, digest_of

COPIES = 16
"""Copies of the column sums. Neighbouring programs add to different copies, so they rarely wait."""

COLUMN_WORDS = COPIES * COLUMNS
"""Words of all copies. The row sums lie behind these words."""

_COLUMNS = tl.constexpr(COLUMNS)
_COPIES = tl.constexpr(COPIES)
_VECTORS = 1024


def new_sums(nbytes: int, device: torch.device) -> torch.Tensor:
    """Make zeroed sums for a payload of `nbytes` bytes.

    Returns:
        int64 `[16 * 256 + rows]` on `device`: 16 copies of the 256 column sums, then a sum per row
        of 2 KiB.
    """
    rows = -(-nbytes // ROW_BYTES)
    return torch.zeros(COLUMN_WORDS + rows, dtype=torch.int64, device=device)


def finish(sums: torch.Tensor, nbytes: int) -> bytes:
    """Compute the checksum of a payload from its sums. Waits for the device.

    Args:
        sums: from `new_sums(nbytes, device)`, after `gather_pages`, `scatter_pages` or
            `payload_sums`.
        nbytes: bytes of the payload.

    Returns:
        8 bytes, equal to `pd_kernels.checksum.checksum_of` of the same payload.

    Raises:
        ValueError: the sums have another shape than `nbytes` bytes need.

    Example:
        >>> import torch
        >>> from pd_kernels.checksum import checksum_of
        >>> payload = torch.arange(100, dtype=torch.uint8)
        >>> sums = new_sums(payload.numel(), payload.device)
        >>> payload_sums(payload, sums)
        >>> finish(sums, payload.numel()) == checksum_of(payload.numpy().data)
        True
    """
    rows = -(-nbytes // ROW_BYTES)
    if sums.shape != (COLUMN_WORDS + rows,) or sums.dtype != torch.int64:
        raise ValueError(
            f"sums {tuple(sums.shape)} of {sums.dtype}: {nbytes} bytes have "
            f"[{COLUMN_WORDS + rows}] of int64, see new_sums()"
        )
    words = sums.cpu().numpy().view(np.uint64)
    columns = words[:COLUMN_WORDS].reshape(COPIES, COLUMNS).sum(axis=0, dtype=np.uint64)
    return digest_of(nbytes, words[COLUMN_WORDS:], columns)


@triton.jit
def add_words(sums, first_word, words, PITCH: tl.constexpr, copy):
    """Add a tile of a payload to its sums.

    Args:
        sums: see `new_sums`.
        first_word: number of the tile's first word in the payload, int64.
        words: int64 `[rows, width]`, zero behind the end; rows begin PITCH words apart.
        copy: any number; selects the copy of the column sums.
    """
    ROWS: tl.constexpr = words.shape[0]
    WIDTH: tl.constexpr = words.shape[1]
    # The number of rows of the tile after which the columns repeat. A power of two, like all
    # extents.
    PERIOD: tl.constexpr = min(ROWS, _COLUMNS // min(_COLUMNS, PITCH & -PITCH))
    shift = (first_word % _COLUMNS).to(tl.int32)
    first_row = sums + _COPIES * _COLUMNS + first_word // _COLUMNS
    place = tl.arange(0, PERIOD)[:, None] * PITCH + tl.arange(0, WIDTH)[None, :]
    place = shift + tl.reshape(place, (PERIOD * WIDTH,))
    periods = tl.reshape(words, (ROWS // PERIOD, PERIOD * WIDTH))
    columns = sums + (copy % _COPIES) * _COLUMNS
    tl.atomic_add(columns + place % _COLUMNS, tl.sum(periods, axis=0), sem="relaxed")
    # Words beyond column 255 belong to the next row of the payload.
    if PERIOD * PITCH == _COLUMNS:
        every = _quarters(periods)
        row = first_row + tl.arange(0, ROWS // PERIOD)[:, None] + tl.zeros((1, 4), tl.int32)
        if shift == 0:  # the same for all threads; a second sum would cost as much as the first
            tl.atomic_add(row, every, mask=every != 0, sem="relaxed")
        else:
            early = _quarters(tl.where((place < _COLUMNS)[None, :], periods, 0))
            _add_rows(row, early, every - early)
    else:
        start = shift + tl.arange(0, ROWS) * PITCH
        within = (start % _COLUMNS)[:, None] + tl.arange(0, WIDTH)[None, :]
        early = tl.sum(tl.where(within < _COLUMNS, words, 0), axis=1)
        _add_rows(first_row + start // _COLUMNS, early, tl.sum(words, axis=1) - early)


@triton.jit
def _quarters(periods):
    """Sums of the quarters of each row, `[rows, 4]`. A quarter lies within a warp, so that warps do not
    wait for each other."""
    ROWS: tl.constexpr = periods.shape[0]
    return tl.sum(tl.reshape(periods, (ROWS, 4, periods.shape[1] // 4)), axis=2)


@triton.jit
def _add_rows(row, early, late):
    """Add to row sums what belongs to rows of the payload, and to the rows behind these."""
    tl.atomic_add(row, early, mask=early != 0, sem="relaxed")
    tl.atomic_add(row + 1, late, mask=late != 0, sem="relaxed")


@triton.jit
def add_pieces(sums, first_byte, pieces, BYTES: tl.constexpr, copy):
    """Add scales to the sums. Each scale lies within one word of the payload.

    Args:
        first_byte: where each scale lies in the payload, int64; a multiple of BYTES.
        pieces: the scales' bits, unsigned, int64; 0 for none.
        BYTES: bytes of a scale.
        copy: see `add_words`.
    """
    word = first_byte // 8
    value = pieces << ((first_byte % 8) * 8)
    columns = sums + (copy % _COPIES) * _COLUMNS
    tl.atomic_add(columns + word % _COLUMNS, value, mask=value != 0, sem="relaxed")
    row = sums + _COPIES * _COLUMNS + word // _COLUMNS
    tl.atomic_add(row, value, mask=value != 0, sem="relaxed")


@triton.jit
def add_section(sums, slot, first_section, sections, VECTORS: tl.constexpr, copy):
    """Add `sections` sections of 16 bytes of the payload at `slot`, at most VECTORS of them."""
    vector = tl.arange(0, VECTORS)
    words = (slot + first_section * 16).to(tl.pointer_type(tl.int64))
    place = vector[:, None] * 2 + tl.arange(0, 2)[None, :]
    loaded = tl.load(words + place, mask=(vector < sections)[:, None], other=0)
    add_words(sums, first_section * 2, tl.reshape(loaded, (VECTORS // 128, 256)), 256, copy)


@triton.jit
def add_scales(sums, slot, section, scales, head, number, VECTORS: tl.constexpr, copy):
    """Add a part of a plane's scales and the zeros behind them: VECTORS sections, from `number *
    VECTORS` on.

    The scales of all heads lie together, so only the programs of head 0 add them.
    """
    if head == 0:
        done = number * VECTORS
        add_section(sums, slot, section + done, scales - done, VECTORS, copy)


@triton.jit(do_not_specialize=["sections"])
def _sum_payload(slot, sums, sections, VECTORS: tl.constexpr):
    program = tl.program_id(0)
    first = program.to(tl.int64) * VECTORS
    add_section(sums, slot, first, sections - first, VECTORS, program)


def launch_payload_sums(payload: torch.Tensor, sums: torch.Tensor) -> None:
    """Run `payload_sums` with the kernel. The payload must be aligned to 16 bytes, and its length
    must be a multiple of 16 bytes."""
    sections = payload.numel() // 16
    grid = (triton.cdiv(sections, _VECTORS),)
    _sum_payload[grid](payload, sums, sections, VECTORS=_VECTORS, num_warps=4)


@torch.library.custom_op("pd_kernels::payload_sums", mutates_args=("sums",))
def payload_sums(payload: torch.Tensor, sums: torch.Tensor) -> None:
    """Add a payload's words to its sums. On a GPU this queues one kernel and returns.

    Args:
        payload: uint8 `[nbytes]`, dense.
        sums: from `new_sums(nbytes, device)`; changed in place.

    Raises:
        ValueError: `sums` is too short.

    Example:
        See `finish`.
    """
    if sums.numel() < COLUMN_WORDS + -(-payload.numel() // ROW_BYTES):
        raise ValueError(
            f"{sums.numel()} sums: too few for {payload.numel()} bytes, see new_sums()"
        )
    whole = payload.numel() % 16 == 0 and payload.data_ptr() % 16 == 0
    if payload.is_cuda and whole:
        with torch.cuda.device(payload.device):
            launch_payload_sums(payload, sums)
    else:
        sums += reference_payload_sums(payload)


@payload_sums.register_fake
def _(payload: torch.Tensor, sums: torch.Tensor) -> None:
    return None


def reference_payload_sums(payload: torch.Tensor) -> torch.Tensor:
    """Compute the sums of a payload in plain torch."""
    rows = -(-payload.numel() // ROW_BYTES)
    matrix = payload.new_zeros(rows * ROW_BYTES)
    matrix[: payload.numel()] = payload
    words = matrix.view(torch.int64).view(rows, COLUMNS)
    columns = payload.new_zeros((COPIES, COLUMNS), dtype=torch.int64)
    columns[0] = words.sum(0)
    return torch.cat([columns.flatten(), words.sum(1)])
