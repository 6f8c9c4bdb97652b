# SPDX-License-Identifier: Apache-2.0
"""Pieces of memory, copied from another process of the same machine into this one, and their checksum.

The kernel copies (`process_vm_readv`, Linux's cross-memory attach). Both processes need the same user. Some systems
forbid it: containers without CAP_SYS_PTRACE, or `kernel.yama.ptrace_scope`.
"""

import ctypes
import math
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import xxhash

Addresses = npt.NDArray[np.uint64]

_MAX_VECTORS = 1024
"""Most pieces that the kernel takes in one call."""
_MAX_CUTS = 1 << 18
"""Most pieces that memory is cut into, if the two sides' piece sizes differ. A peer could send any sizes, but
the sizes of real pages differ at most by the number of tokens in a page."""
_BLOCK_BYTES = 1 << 20
"""Bytes that are copied before they are hashed, so that the hash finds them in the processor's cache."""

_readv = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
if _readv is not None:
    _readv.restype = ctypes.c_ssize_t
    _pointer, _count = ctypes.c_void_p, ctypes.c_ulong
    _readv.argtypes = [ctypes.c_int, _pointer, _count, _pointer, _count, _count]


class Pieces(NamedTuple):
    """Memory in the order of a payload, in pieces of equal size.

    Attributes:
        addresses: uint64 `[pieces]`, each in the memory of the process that the pieces belong to.
        piece_bytes: bytes of each piece.
    """

    addresses: Addresses
    piece_bytes: int

    @classmethod
    def together(cls, pieces: Sequence[Self]) -> Self:
        """Several concatenated; cut into smaller pieces if their sizes differ."""
        size = math.gcd(*(each.piece_bytes for each in pieces))
        return cls(np.concatenate([each.cut(size).addresses for each in pieces]), size)

    def __bool__(self) -> bool:
        return len(self.addresses) > 0

    @property
    def nbytes(self) -> int:
        return len(self.addresses) * self.piece_bytes

    def cut(self, piece_bytes: int) -> "Pieces":
        """The same memory in pieces of this size, which must divide the present size."""
        if piece_bytes == self.piece_bytes:
            return self
        steps = np.arange(0, self.piece_bytes, piece_bytes, dtype=np.uint64)
        return Pieces((self.addresses[:, None] + steps).reshape(-1), piece_bytes)

    def buffers(self, start: int, stop: int) -> Iterator[memoryview]:
        """Bytes [start, stop) in order. The pieces must be memory of this process, and stay so."""
        size = self.piece_bytes
        first, skip = divmod(start, size)
        for address in self.addresses[first : -(-stop // size)].tolist():
            nbytes = min(size - skip, stop - start)
            yield memoryview((ctypes.c_uint8 * nbytes).from_address(address + skip)).cast("B")
            start, skip = start + nbytes, 0

    def joined(self) -> "Pieces":
        """The same memory in the largest possible pieces of equal size. Neighbours are joined if they come in runs of
        equal length, such as the one-token pages of a fresh request."""
        starts = self._runs()
        if len(starts) == len(self.addresses):  # no two are neighbours
            return self
        lengths = np.diff(np.append(starts, len(self.addresses)))
        count = int(np.gcd.reduce(lengths))
        return Pieces(self.addresses[::count], self.piece_bytes * count)

    def _runs(self) -> npt.NDArray[np.int64]:
        """Indices of the pieces that do not begin where the previous piece ends."""
        steps = self.addresses[1:] - self.addresses[:-1] != np.uint64(self.piece_bytes)
        starts: npt.NDArray[np.int64] = np.flatnonzero(np.append(True, steps))
        return starts[: len(self.addresses)]

    def checksum(self) -> bytes:
        """XXH3 of all bytes in order: 16 bytes. The pieces must be memory of this process.

        It finds accidents, not forgery. A GPU could not compute it during a copy, so only pages in host memory have
        it (`pd_kernels.checksum` is that of payloads).
        """
        digest = xxhash.xxh3_128()
        self._add_to(digest)
        return digest.digest()

    def _add_to(self, digest: xxhash.xxh3_128) -> None:
        for address, nbytes in _vectors(self).tolist():
            digest.update((ctypes.c_uint8 * nbytes).from_address(address))


def read_memory(pid: int, theirs: Pieces, ours: Pieces) -> bytes:
    """Copy pieces of another process into pieces of this one. Releases Python's lock during the copy.

    Args:
        pid: the other process, as this process numbers it.
        theirs: memory of that process.
        ours: memory of this process, with the same number of bytes, in pieces of any size.

    Returns:
        The checksum of `ours` after the copy (see `Pieces.checksum`).

    Raises:
        OSError: the kernel forbids the copy, the process has ended, or its memory is gone. Some pieces may
            have been filled.
        ValueError: the two sides differ in bytes.
    """
    if theirs.nbytes != ours.nbytes:
        raise ValueError(
            f"{len(theirs.addresses)} pieces of {theirs.piece_bytes} bytes there, "
            f"{len(ours.addresses)} of {ours.piece_bytes} here"
        )
    digest = xxhash.xxh3_128()
    size = math.gcd(theirs.piece_bytes, ours.piece_bytes)
    if ours.nbytes > _MAX_CUTS * size:
        raise ValueError(
            f"pieces of {theirs.piece_bytes} and {ours.piece_bytes} bytes: their common divisor {size} is too small"
        )
    there, here = theirs.cut(size).addresses, ours.cut(size).addresses
    step = min(_MAX_VECTORS, max(1, _BLOCK_BYTES // size))
    for first in range(0, len(here), step):
        to = Pieces(here[first : first + step], size)
        _copy(pid, _vectors(Pieces(there[first : first + step], size)), _vectors(to))
        to._add_to(digest)
    return digest.digest()


def _vectors(pieces: Pieces) -> Addresses:
    """Pieces as the kernel's `iovec`, with neighbours joined: uint64 `[runs, (address, bytes)]`."""
    starts = pieces._runs()
    lengths = np.diff(np.append(starts, len(pieces.addresses)))
    return np.stack(
        [pieces.addresses[starts], lengths * pieces.piece_bytes],
        1,
        dtype=np.uint64,
        casting="unsafe",
    )


def _copy(pid: int, there: Addresses, here: Addresses) -> None:
    if _readv is None:
        raise OSError("this C library has no process_vm_readv")
    copied = _readv(pid, here.ctypes.data, len(here), there.ctypes.data, len(there), 0)
    if copied < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"process_vm_readv of process {pid}: {os.strerror(code)}")
    if copied != (expected := int(here[:, 1].sum())):
        raise OSError(f"process_vm_readv of process {pid}: {copied} bytes of {expected}")
