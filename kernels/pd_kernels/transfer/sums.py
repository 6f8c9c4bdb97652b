# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The checksum of a payload: its sums on the device, in the pass that moves it, the hash on the host.

The payload, zero-padded, is a matrix of 64-bit little-endian words in rows of 256. Its row sums and
column sums wrap and commute, so that programs may add to them in any order.
"""

import hashlib

import numpy as np
import torch
import triton
import triton.language as tl

COLUMNS = 256
ROW_BYTES = 8 * COLUMNS
COPIES = 16
"""Of the column sums: neighbouring programs add to different ones, so that they seldom wait."""

_COLUMNS = tl.constexpr(COLUMNS)
_COPIES = tl.constexpr(COPIES)
_VECTORS = 1024


def new_sums(nbytes: int, device: torch.device) -> torch.Tensor:
    """Room for the sums of a payload, zero: int64 `[16 * 256 + rows]`, columns first."""
    rows = -(-nbytes // ROW_BYTES)
    return torch.zeros(COPIES * COLUMNS + rows, dtype=torch.int64, device=device)


def finish(sums: torch.Tensor, nbytes: int) -> bytes:
    """The checksum, 8 bytes, from the sums of a payload of `nbytes` bytes.

    Waits for the device. Equal to what a host computes of the same bytes.

    Raises:
        ValueError: these are not sums of so many bytes.
    """
    rows = -(-nbytes // ROW_BYTES)
    if sums.shape != (COPIES * COLUMNS + rows,) or sums.dtype != torch.int64:
        raise ValueError(
            f"sums {tuple(sums.shape)} of {sums.dtype}: {nbytes} bytes have "
            f"[{COPIES * COLUMNS + rows}] of int64, see new_sums()"
        )
    words = sums.cpu().numpy().view(np.uint64)
    columns = words[: COPIES * COLUMNS].reshape(COPIES, COLUMNS).sum(axis=0, dtype=np.uint64)
    digest = hashlib.blake2b(nbytes.to_bytes(8, "little"), digest_size=8)
    digest.update(words[COPIES * COLUMNS :].tobytes())
    digest.update(columns.tobytes())
    return digest.digest()


@triton.jit
def add_words(sums, first_word, words, PITCH: tl.constexpr, copy):
    """Add a tile of a payload to its sums.

    Args:
        sums: see `new_sums`.
        first_word: place of the tile's first word in the payload, int64.
        words: int64 `[rows, width]`, zero where there are none; rows begin PITCH words apart.
        copy: any number; which copy of the column sums takes them.
    """
    ROWS: tl.constexpr = words.shape[0]
    WIDTH: tl.constexpr = words.shape[1]
    # Rows of the tile after which columns repeat: a power of two, as all extents are.
    PERIOD: tl.constexpr = min(ROWS, _COLUMNS // min(_COLUMNS, PITCH & -PITCH))
    shift = (first_word % _COLUMNS).to(tl.int32)
    first_row = sums + _COPIES * _COLUMNS + first_word // _COLUMNS
    place = tl.arange(0, PERIOD)[:, None] * PITCH + tl.arange(0, WIDTH)[None, :]
    place = shift + tl.reshape(place, (PERIOD * WIDTH,))
    periods = tl.reshape(words, (ROWS // PERIOD, PERIOD * WIDTH))
    columns = sums + (copy % _COPIES) * _COLUMNS
    tl.atomic_add(columns + place % _COLUMNS, tl.sum(periods, axis=0), sem="relaxed")
    # What lies behind column 255 belongs to the next row of the payload.
    if PERIOD * PITCH == _COLUMNS:
        early = tl.sum(tl.where((place < _COLUMNS)[None, :], periods, 0), axis=1)
        late = tl.sum(periods, axis=1) - early
        row = first_row + tl.arange(0, ROWS // PERIOD)
    else:
        start = shift + tl.arange(0, ROWS) * PITCH
        within = (start % _COLUMNS)[:, None] + tl.arange(0, WIDTH)[None, :]
        early = tl.sum(tl.where(within < _COLUMNS, words, 0), axis=1)
        late = tl.sum(words, axis=1) - early
        row = first_row + start // _COLUMNS
    tl.atomic_add(row, early, mask=early != 0, sem="relaxed")
    tl.atomic_add(row + 1, late, mask=late != 0, sem="relaxed")


@triton.jit
def add_pieces(sums, first_byte, pieces, BYTES: tl.constexpr, copy):
    """Add some small unsigned pieces, each within one word, to the sums.

    Args:
        first_byte: of the payload, where each piece lies: int64, like `pieces`.
        pieces: int64, 0 for those that are not there.
        BYTES: of a piece, which divides its place.
    """
    word = first_byte // 8
    value = pieces << ((first_byte % 8) * 8)
    columns = sums + (copy % _COPIES) * _COLUMNS
    tl.atomic_add(columns + word % _COLUMNS, value, mask=value != 0, sem="relaxed")
    row = sums + _COPIES * _COLUMNS + word // _COLUMNS
    tl.atomic_add(row, value, mask=value != 0, sem="relaxed")


@triton.jit
def add_section(sums, slot, first_section, sections, VECTORS: tl.constexpr, copy):
    """Add `sections` runs of 16 bytes of a payload at `slot`, at most VECTORS of them."""
    vector = tl.arange(0, VECTORS)
    words = (slot + first_section * 16).to(tl.pointer_type(tl.int64))
    place = vector[:, None] * 2 + tl.arange(0, 2)[None, :]
    found = tl.load(words + place, mask=(vector < sections)[:, None], other=0)
    add_words(sums, first_section * 2, tl.reshape(found, (VECTORS // 128, 256)), 256, copy)


@triton.jit(do_not_specialize=["sections"])
def _sum_payload(slot, sums, sections, VECTORS: tl.constexpr):
    program = tl.program_id(0)
    first = program.to(tl.int64) * VECTORS
    add_section(sums, slot, first, sections - first, VECTORS, program)


def launch_payload_sums(payload: torch.Tensor, sums: torch.Tensor) -> None:
    """`payload_sums` by the kernel; the payload has whole sections of 16 bytes, aligned to 16."""
    sections = payload.numel() // 16
    grid = (triton.cdiv(sections, _VECTORS),)
    _sum_payload[grid](payload, sums, sections, VECTORS=_VECTORS, num_warps=4)


@torch.library.custom_op("pd_kernels::payload_sums", mutates_args=("sums",))
def payload_sums(payload: torch.Tensor, sums: torch.Tensor) -> None:
    """Add a payload to its sums.

    Args:
        payload: uint8 `[nbytes]`, dense.
        sums: from `new_sums(nbytes)`; added to.

    Raises:
        ValueError: `sums` is too short.
    """
    if sums.numel() < COPIES * COLUMNS + -(-payload.numel() // ROW_BYTES):
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
    """The sums of a payload, in torch."""
    rows = -(-payload.numel() // ROW_BYTES)
    matrix = payload.new_zeros(rows * ROW_BYTES)
    matrix[: payload.numel()] = payload
    words = matrix.view(torch.int64).view(rows, COLUMNS)
    columns = payload.new_zeros((COPIES, COLUMNS), dtype=torch.int64)
    columns[0] = words.sum(0)
    return torch.cat([columns.flatten(), words.sum(1)])
