# SPDX-License-Identifier: Apache-2.0
"""Pieces of memory in this process and in another of the same machine, and the kernel's copy from
there to here (`process_vm_readv`, Linux' cross-memory attach).
"""

import ctypes
import os
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

Addresses = npt.NDArray[np.uint64]

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
    """

    addresses: Addresses
    piece_bytes: int

    def __bool__(self) -> bool:
        return len(self.addresses) > 0

    @property
    def nbytes(self) -> int:
        return len(self.addresses) * self.piece_bytes

    def checksum(self) -> bytes:
        """Of all bytes, which must be this process': 16 bytes, for accidents and not against
        forgery. XXH3: a fifth of the time of `integrity.checksum` where pages lie scattered, and
        nothing that a GPU could form on the way."""
        digest = xxhash.xxh3_128()
        _add(digest, self)
        return digest.digest()


def read_memory(pid: int, theirs: Pieces, ours: Pieces) -> bytes:
    """Copy pieces of another process into those of this one; returns the checksum of what lies
    here afterwards. Python's lock is free while the kernel copies.

    Args:
        pid: the process, as this process numbers it.
        ours: as many pieces of the same size.

    Raises:
        OSError: the kernel forbids it, the process is gone, or its memory is not there. Some of
            the pieces may have been filled.
        ValueError: pieces differ in number or size.
    """
    if len(theirs.addresses) != len(ours.addresses) or theirs.piece_bytes != ours.piece_bytes:
        raise ValueError(
            f"{len(theirs.addresses)} pieces of {theirs.piece_bytes} bytes there, "
            f"{len(ours.addresses)} of {ours.piece_bytes} here"
        )
    digest = xxhash.xxh3_128()
    step = min(_VECTORS, max(1, _BATCH_BYTES // ours.piece_bytes))
    there, here = _vectors(theirs), _vectors(ours)
    for first in range(0, len(here), step):
        _copy(pid, there[first : first + step], here[first : first + step])
        _add(digest, ours._replace(addresses=ours.addresses[first : first + step]))
    return digest.digest()


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


def _add(digest: "xxhash.xxh3_128", pieces: Pieces) -> None:
    piece = ctypes.c_uint8 * pieces.piece_bytes
    for address in pieces.addresses.tolist():
        digest.update(piece.from_address(address))
