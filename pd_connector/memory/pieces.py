# SPDX-License-Identifier: Apache-2.0
"""Pieces of memory, copied from another process of the same machine into this one, and their checksum.

The kernel copies (`process_vm_readv`, Linux' cross-memory attach). Both processes need the same user, and some
systems forbid it: containers without CAP_SYS_PTRACE, `kernel.yama.ptrace_scope`.
"""

import ctypes
import os
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

Addresses = npt.NDArray[np.uint64]

_MAX_VECTORS = 1024
"""Pieces that the kernel takes in one call."""
_BLOCK_BYTES = 1 << 20
"""Bytes that are copied before they are summed: the sum then finds them in the processor's cache."""

_readv = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
if _readv is not None:
    _readv.restype = ctypes.c_ssize_t
    _pointer, _count = ctypes.c_void_p, ctypes.c_ulong
    _readv.argtypes = [ctypes.c_int, _pointer, _count, _pointer, _count, _count]


class Pieces(NamedTuple):
    """Memory in the order of a payload, in pieces of one size.

    Attributes:
        addresses: uint64 `[pieces]`, each in the memory of the process that the pieces belong to.
        piece_bytes: bytes of each piece.
    """

    addresses: Addresses
    piece_bytes: int

    def __bool__(self) -> bool:
        return len(self.addresses) > 0

    @property
    def nbytes(self) -> int:
        return len(self.addresses) * self.piece_bytes

    def checksum(self) -> bytes:
        """XXH3 of all bytes in order: 16 bytes. The pieces must be memory of this process.

        It finds accidents, it does not stop forgery; and no GPU could form it while it copies, so that
        only pages in host memory have it (`kv/checksum.py` is the checksum of payloads).
        """
        digest = xxhash.xxh3_128()
        self._add_to(digest)
        return digest.digest()

    def _add_to(self, digest: xxhash.xxh3_128) -> None:
        piece = ctypes.c_uint8 * self.piece_bytes
        for address in self.addresses.tolist():
            digest.update(piece.from_address(address))


def read_memory(pid: int, theirs: Pieces, ours: Pieces) -> bytes:
    """Copy pieces of another process into pieces of this one. Python's lock is free meanwhile.

    Args:
        pid: the process, as this process numbers it.
        theirs: memory of that process.
        ours: as many pieces of the same size, in this process.

    Returns:
        The checksum of what lies in `ours` afterwards (see `Pieces.checksum`).

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
    there, here = _vectors(theirs), _vectors(ours)
    step = min(_MAX_VECTORS, max(1, _BLOCK_BYTES // ours.piece_bytes))
    for first in range(0, len(here), step):
        block = slice(first, first + step)
        _copy(pid, there[block], here[block])
        ours._replace(addresses=ours.addresses[block])._add_to(digest)
    return digest.digest()


def _vectors(pieces: Pieces) -> Addresses:
    """Pieces as the kernel's `iovec`: uint64 `[pieces, (address, bytes)]`."""
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
