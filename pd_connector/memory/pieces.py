# SPDX-License-Identifier: Apache-2.0
"""Pieces of memory in this process and in another of the same machine, and how they come from there to
here: by the kernel (`process_vm_readv`, Linux' cross-memory attach), or from where the other's memory is
mapped.
"""

import ctypes
import os
from types import ModuleType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from pd_connector.compiler import Compiler

Addresses = npt.NDArray[np.uint64]

LOOPS = Compiler("pd_connector.memory.piece_loops", "sums of pages")

_VECTORS = 1024
"""Vectors to a call: the kernel's limit."""
_BATCH_BYTES = 1 << 20
"""Copied before the sum is taken, which then finds it in the core's cache."""

_readv = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
if _readv is not None:
    _readv.restype = ctypes.c_ssize_t
    _pointer, _count = ctypes.c_void_p, ctypes.c_ulong
    _readv.argtypes = [ctypes.c_int, _pointer, _count, _pointer, _count, _count]


class Pieces(NamedTuple):
    """Memory in the order of a payload, in pieces of one size.

    Attributes:
        addresses: uint64 `[pieces]`.
        piece_bytes: bytes of each.
        lanes: whether their checksum is formed by compiled loops (`piece_loops.py`), and not by XXH3.
    """

    addresses: Addresses
    piece_bytes: int
    lanes: bool = False

    def __bool__(self) -> bool:
        return len(self.addresses) > 0

    @property
    def nbytes(self) -> int:
        return len(self.addresses) * self.piece_bytes

    def in_lanes(self) -> "Pieces":
        """The same, with `lanes` if that can be done here: it takes no time beside a copy."""
        loops = LOOPS.loops
        return self._replace(lanes=loops is not None and self.piece_bytes % loops.ROW_BYTES == 0)

    def checksum(self) -> bytes:
        """Of all bytes, which must be this process': 16 bytes, for accidents and not against
        forgery, and nothing that a GPU could form on the way. Raises OSError if it cannot be formed."""
        summing = _summing(self)
        summing.add(self)
        return summing.digest()


def read_memory(pid: int, theirs: Pieces, ours: Pieces) -> bytes:
    """Copy pieces of another process into those of this one; returns the checksum, as `theirs` is
    summed, of what lies here afterwards. Python's lock is free while memory is copied.

    Args:
        pid: the process, as this process numbers it.
        ours: as many pieces of the same size.

    Raises:
        OSError: the kernel forbids it, the process is gone, or its memory is not there. Some of
            the pieces may have been filled.
        ValueError: pieces differ in number or size.
    """
    _check_alike(theirs, ours)
    summing = _summing(theirs)
    step = min(_VECTORS, max(1, _BATCH_BYTES // ours.piece_bytes))
    scratch = _Scratch(step, ours.piece_bytes) if theirs.lanes else None
    there, here = _vectors(theirs), _vectors(ours)
    for first in range(0, len(here), step):
        part = slice(first, first + step)
        to = ours._replace(addresses=ours.addresses[part])
        if scratch is None:
            _copy(pid, there[part], here[part])
            summing.add(to)
        else:  # the loops write past the cache, which the kernel does not
            between = scratch.pieces(len(to.addresses))
            _copy(pid, there[part], _vectors(between))
            summing.copy(between, to)
    return summing.digest()


def copy_memory(theirs: Pieces, ours: Pieces) -> bytes:
    """As `read_memory`, from memory that is mapped in this process."""
    _check_alike(theirs, ours)
    summing = _summing(theirs)
    summing.copy(theirs, ours)
    return summing.digest()


class _Scratch:
    """Memory for a few pieces, which stays in the core's cache."""

    def __init__(self, count: int, piece_bytes: int) -> None:
        self._memory = np.empty(count * piece_bytes, np.uint8)
        self._piece_bytes = piece_bytes

    def pieces(self, count: int) -> Pieces:
        offsets = np.arange(count, dtype=np.uint64) * np.uint64(self._piece_bytes)
        return Pieces(offsets + np.uint64(self._memory.ctypes.data), self._piece_bytes)


class _Xxh3:
    """XXH3 of the bytes in order."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()

    def add(self, pieces: Pieces) -> None:
        piece = ctypes.c_uint8 * pieces.piece_bytes
        for address in pieces.addresses.tolist():
            self._digest.update(piece.from_address(address))

    def copy(self, there: Pieces, here: Pieces) -> None:
        _move(there, here)
        self.add(here)

    def digest(self) -> bytes:
        return self._digest.digest()


class _Lanes:
    """XXH3 of lanes' sums, for pieces of whole rows."""

    def __init__(self, loops: ModuleType) -> None:
        self._loops = loops
        self._nbytes = 0
        self._sums = np.zeros(2 * loops.LANES, np.uint64)

    def add(self, pieces: Pieces) -> None:
        self._nbytes += pieces.nbytes
        self._loops.sum_pieces(pieces.addresses, pieces.piece_bytes, self._sums)

    def copy(self, there: Pieces, here: Pieces) -> None:
        if (here.addresses % self._loops.VECTOR_BYTES).any():
            _move(there, here)
            self.add(here)
        else:
            self._nbytes += here.nbytes
            size = here.piece_bytes
            self._loops.copy_pieces(there.addresses, here.addresses, size, self._sums)

    def digest(self) -> bytes:
        summed = self._nbytes.to_bytes(8, "little") + self._sums.tobytes()
        return xxhash.xxh3_128(summed).digest()


def _summing(pieces: Pieces) -> _Xxh3 | _Lanes:
    """What forms the checksum of these. Raises OSError if this process cannot."""
    if not pieces.lanes:
        return _Xxh3()
    loops = LOOPS.loops
    if loops is None or pieces.piece_bytes % loops.ROW_BYTES:
        raise OSError(f"pieces of {pieces.piece_bytes} bytes cannot be summed in lanes here")
    return _Lanes(loops)


def _check_alike(theirs: Pieces, ours: Pieces) -> None:
    if len(theirs.addresses) != len(ours.addresses) or theirs.piece_bytes != ours.piece_bytes:
        raise ValueError(
            f"{len(theirs.addresses)} pieces of {theirs.piece_bytes} bytes there, "
            f"{len(ours.addresses)} of {ours.piece_bytes} here"
        )


def _move(there: Pieces, here: Pieces) -> None:
    for source, target in zip(there.addresses.tolist(), here.addresses.tolist(), strict=True):
        ctypes.memmove(target, source, here.piece_bytes)


def _vectors(pieces: Pieces) -> Addresses:
    """As `iovec` has them: `[pieces, (address, bytes)]`."""
    found = np.empty((len(pieces.addresses), 2), np.uint64)
    found[:, 0] = pieces.addresses
    found[:, 1] = pieces.piece_bytes
    return found


def _copy(pid: int, there: Addresses, here: Addresses) -> None:
    if _readv is None:
        raise OSError("this C library has no process_vm_readv")
    count = len(here)
    copied = _readv(pid, here.ctypes.data, count, there.ctypes.data, count, 0)
    if copied < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"process_vm_readv of process {pid}: {os.strerror(code)}")
    if copied != (wanted := int(here[:, 1].sum())):
        raise OSError(f"process_vm_readv of process {pid}: {copied} bytes of {wanted}")
