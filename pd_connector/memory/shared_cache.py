# SPDX-License-Identifier: Apache-2.0
"""A cache in host memory that other processes of the machine may look at, but not write: its memory is
replaced, at the addresses where the engine has it, by memory that has a descriptor.

Only memory that malloc (glibc's) has mapped for one allocation alone is replaced, and all of it: nothing else
lies there, and it is given back to the kernel as a whole.
"""

import ctypes
import fcntl
import logging
import mmap
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from pd_connector.memory.pieces import Pieces
from pd_connector.memory.slab import SLAB_SEALS

logger = logging.getLogger("pd_connector.memory.shared_cache")

SEALS = SLAB_SEALS | 0x10
"""And F_SEAL_FUTURE_WRITE, which Python 3.11 does not know: nobody else writes."""
MAX_SPANS = 1 << 12
_MAP_FIXED = 0x10
_STEP_BYTES = 2 << 20
_PRIVATE = ("rw-p", "00000000", "00:00", "0")
"""Of a line of /proc/self/maps: memory without a file."""

# Of a chunk that malloc has mapped: before its memory lie the bytes that precede it in the mapping, and
# its own size, with this flag and no other.
_HEAD_BYTES = 16
_MAPPED, _FLAGS = 0b010, 0b111

_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


class Span(NamedTuple):
    """Memory of one process."""

    address: int
    nbytes: int

    @property
    def stop(self) -> int:
        return self.address + self.nbytes


class SharedCache:
    """Memory that has been replaced.

    Attributes:
        spans: where it lies, in the order in which it follows one another behind the descriptor.
        handle: the descriptor, until `close`.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = tuple(spans)
        self.handle = os.memfd_create("pd-cache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.handle, sum(span.nbytes for span in spans))
            place = 0
            for span in spans:
                self._replace(span, place)
                place += span.nbytes
            fcntl.fcntl(self.handle, fcntl.F_ADD_SEALS, SEALS)
        except BaseException:
            self.close()
            raise

    @classmethod
    def of(cls, storages: Iterable[Span]) -> Self | None:
        """Replace the memory in which these lie; None where that cannot be done, which is logged.
        Nobody may write there meanwhile."""
        try:
            private = private_memory()
            spans = [allocation_of(storage, private) for storage in storages]
            if len(spans) > MAX_SPANS:
                raise ValueError(f"it lies in {len(spans)} pieces of memory: {MAX_SPANS} at most")
            shared = cls(spans)
        except (OSError, ValueError) as error:
            logger.info("the cache cannot be shared, peers copy it by system calls: %s", error)
            return None
        nbytes = sum(span.nbytes for span in shared.spans)
        logger.info("%.1f MiB of cache can be read by engines of this machine", nbytes / (1 << 20))
        return shared

    def close(self) -> None:
        """Give up the descriptor; the memory stays what it is."""
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1

    def _replace(self, span: Span, place: int) -> None:
        """In steps, so that little is there twice. What is zero is left out: it will be zero."""
        for first in range(span.address, span.stop, _STEP_BYTES):
            size = min(_STEP_BYTES, span.stop - first)
            offset = place + first - span.address
            held = memoryview((ctypes.c_uint64 * (size // 8)).from_address(first))
            if np.frombuffer(held, np.uint64).any():
                written = os.pwrite(self.handle, held, offset)
                if written != size:
                    raise OSError(f"{written} bytes of {size} could be written")
            protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
            if _mmap(first, size, protection, flags, self.handle, offset) != first:
                code = ctypes.get_errno()
                raise OSError(code, f"{size} bytes cannot be mapped: {os.strerror(code)}")


class CacheWindow:
    """What a peer has shared, as it is mapped here.

    Args:
        spans: where it lies in the peer, in the order of `memory`.
        memory: uint8, all of them.
    """

    def __init__(self, spans: Sequence[Span], memory: npt.NDArray[np.uint8]) -> None:
        self._memory = memory
        sizes = np.array([span.nbytes for span in spans], np.uint64)
        starts = np.array([span.address for span in spans], np.uint64)
        here = np.cumsum(sizes) - sizes + np.uint64(memory.ctypes.data)
        order = np.argsort(starts)
        self._starts, self._sizes = starts[order], sizes[order]
        self._here = here[order]

    def find(self, theirs: Pieces) -> Pieces:
        """Where pieces of the peer lie here. Raises ValueError if one is not in what it has shared."""
        spans = np.searchsorted(self._starts, theirs.addresses, "right") - 1
        offsets = theirs.addresses - self._starts[spans]
        sizes, size = self._sizes[spans], np.uint64(theirs.piece_bytes)
        inside = (spans >= 0) & (sizes >= size) & (offsets <= sizes - np.minimum(sizes, size))
        if not inside.all():
            raise ValueError("pieces that are not in the memory that the producer has shared")
        return theirs._replace(addresses=self._here[spans] + offsets)


def allocation_of(storage: Span, private: Sequence[Span]) -> Span:
    """All that has been mapped for an allocation. Raises ValueError if that is not known."""
    page = mmap.PAGESIZE
    unknown = f"{storage.nbytes} bytes are not of glibc's malloc, or not mapped by it"
    if storage.address % page < _HEAD_BYTES:  # its head would be on another page, if it has one
        raise ValueError(unknown)
    head = (ctypes.c_uint64 * 2).from_address(storage.address - _HEAD_BYTES)
    before, size = int(head[0]), int(head[1])
    chunk = storage.address - _HEAD_BYTES
    found = Span(chunk - before, before + (size & ~_FLAGS))
    alone = size & _FLAGS == _MAPPED and found.stop >= storage.stop
    if not alone or found.address % page or found.nbytes % page:
        raise ValueError(unknown)
    if not any(span.address <= found.address and found.stop <= span.stop for span in private):
        raise ValueError(f"{storage.nbytes} bytes are not private memory of this process")
    return found


def private_memory() -> list[Span]:
    """Ranges of plain memory of this process, neighbours as one."""
    found: list[Span] = []
    with open("/proc/self/maps") as lines:
        for line in lines:
            fields = line.split()
            if tuple(fields[1:]) != _PRIVATE:
                continue
            first, stop = (int(text, 16) for text in fields[0].split("-"))
            if found and found[-1].stop == first:
                first = found.pop().address
            found.append(Span(first, stop - first))
    return found
