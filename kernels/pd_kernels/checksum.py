# SPDX-License-Identifier: Apache-2.0
"""The checksum of a chunk."""

import numpy as np
import numpy.typing as npt
import xxhash

COLUMNS = 256
"""Words of a row of the matrix that is summed."""
ROW_BYTES = 8 * COLUMNS

_ROWS_AT_ONCE = 256
"""Rows that are summed at a time, 512 KiB. Their row sums are formed first, then their column sums,
which find the rows in the core's cache."""


def checksum_of(data: memoryview) -> bytes:
    """Checksum of a contiguous buffer: 8 bytes. It finds accidents; it does not stop forgery.

    The buffer is padded with zeros and read as a matrix of 64-bit little-endian words, 256 to a
    row. The row sums, the column sums (modulo 2^64) and the length are hashed with XXH3, which takes
    4 us for those of 16 MiB. Sums can be formed in any order, so a GPU forms them in the pass that
    gathers. One changed word changes its row sum; words that change places change a row sum or a
    column sum.

    Args:
        data: contiguous bytes, any length.
    """
    flat = np.frombuffer(data, dtype=np.uint8)
    whole = len(flat) // ROW_BYTES * ROW_BYTES
    body = flat[:whole].view("<u8").reshape(-1, COLUMNS)
    rows: npt.NDArray[np.uint64] = np.empty(len(body), np.uint64)
    columns: npt.NDArray[np.uint64] = np.zeros(COLUMNS, np.uint64)
    for first in range(0, len(body), _ROWS_AT_ONCE):
        some = body[first : first + _ROWS_AT_ONCE]
        some.sum(axis=1, dtype=np.uint64, out=rows[first : first + _ROWS_AT_ONCE])
        columns += some.sum(axis=0, dtype=np.uint64)
    if whole < len(flat):
        tail = np.zeros(ROW_BYTES, dtype=np.uint8)
        tail[: len(flat) - whole] = flat[whole:]
        last = tail.view("<u8")
        rows = np.append(rows, last.sum(dtype=np.uint64))
        columns = columns + last
    return digest_of(len(flat), rows, columns)


def digest_of(nbytes: int, rows: npt.NDArray[np.uint64], columns: npt.NDArray[np.uint64]) -> bytes:
    """The checksum, from the sums of a buffer of `nbytes` bytes: what kernels that sum on a device call.

    Args:
        rows: uint64 `[rows]`, the sum of each row of 256 words, modulo 2^64.
        columns: uint64 `[256]`, the sum of each column.
    """
    hashed = xxhash.xxh3_64(nbytes.to_bytes(8, "little"))
    hashed.update(rows.tobytes())
    hashed.update(columns.tobytes())
    return hashed.digest()
