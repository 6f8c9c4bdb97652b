# SPDX-License-Identifier: Apache-2.0
"""Slabs, which are buffers of equal slots, and pools, which record the holder of each slot."""

import fcntl
import mmap
import os
from collections import deque
from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

SLAB_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""A shared slab keeps its size: a process that maps it would be killed by an access past its end."""


class Slab:
    """One contiguous buffer of equal slots. Transports register it once, at the start.

    Memory is reserved but not touched: untouched slots cost no physical memory.

    Attributes:
        handle: descriptor of the memory, for another process to map; -1 if the slab is not shared, or is
            closed.

    Args:
        slots: number of slots.
        slot_bytes: size of each.
        shared: whether another process may map the slab.
    """

    def __init__(self, slots: int, slot_bytes: int, *, shared: bool = False) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.handle = -1
        if shared:
            self.handle = os.memfd_create("pd-slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.handle, self.nbytes)
            fcntl.fcntl(self.handle, fcntl.F_ADD_SEALS, SLAB_SEALS)
            self._buffer = np.frombuffer(mmap.mmap(self.handle, self.nbytes), dtype=np.uint8)
        else:
            self._buffer = np.empty(self.nbytes, dtype=np.uint8)

    @property
    def address(self) -> int:
        """Address of the first byte; valid while the slab lives."""
        return int(self._buffer.ctypes.data)

    @property
    def nbytes(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """The whole slab, uint8 `[nbytes]`; empty once a shared slab is closed."""
        return self._buffer

    def close(self) -> None:
        """Close the handle. The memory is freed when the last slot taken from it is released."""
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1
            self._buffer = np.empty(0, dtype=np.uint8)  # the mapping has its own descriptor

    def slot(self, index: int, nbytes: int | None = None) -> memoryview:
        """The first `nbytes` bytes of a slot (all of it by default), writable."""
        start = index * self.slot_bytes
        stop = start + (self.slot_bytes if nbytes is None else nbytes)
        return self._buffer.data[start:stop]


class SlotPool:
    """Records the holder of each slot. A slot is free, held by an owner, or quarantined.

    A quarantined slot may still be written by a peer that no longer answers. It is lent again only when that peer
    has confirmed, or can no longer write.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._free = deque(range(slots))
        self._holder: dict[int, Hashable] = {}
        self._quarantine: dict[int, float] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def held(self) -> int:
        """Number of slots that are not free, including quarantined slots."""
        return len(self._holder) + len(self._quarantine)

    def lend(self, owner: Hashable) -> int | None:
        """Lend the slot that has been free longest to `owner`; None if no slot is free."""
        if not self._free:
            return None
        slot = self._free.popleft()
        self._holder[slot] = owner
        return slot

    def holds(self, owner: Hashable, slot: int) -> bool:
        return self._holder.get(slot) == owner

    def give_back(self, slot: int) -> None:
        """Free a held slot. Raises KeyError if it is not held: a double free."""
        del self._holder[slot]
        self._free.append(slot)

    def quarantine(self, slot: int, until: float) -> None:
        """Keep a held slot out of use until `until` (seconds on the caller's clock)."""
        del self._holder[slot]
        self._quarantine[slot] = until

    def release_quarantined(self, slots: list[int]) -> None:
        """Free quarantined slots now: their writer has confirmed that it has stopped."""
        for slot in slots:
            if self._quarantine.pop(slot, None) is not None:
                self._free.append(slot)

    def tick(self, now: float) -> None:
        """Free the quarantined slots whose time has passed."""
        self.release_quarantined([slot for slot, until in self._quarantine.items() if until <= now])

    def check_integrity(self) -> None:
        """Raises AssertionError unless every slot is free, held or quarantined exactly once, and the counts
        agree."""
        tracked = sorted([*self._free, *self._holder, *self._quarantine])
        assert tracked == list(range(self._slots)), (
            f"slots free {sorted(self._free)}, held {self._holder}, quarantined {self._quarantine}: "
            f"each of {self._slots} slots must be there once"
        )
        assert self.free + self.held == self._slots, (
            f"{self.free} slots free, {self.held} not: {self._slots} wanted"
        )
