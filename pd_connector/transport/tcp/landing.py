# SPDX-License-Identifier: Apache-2.0
"""Memory that chunks land in."""

from pd_connector.memory.destination import Destination
from pd_connector.memory.slab import Slab
from pd_connector.transport.base import Destinations
from pd_connector.transport.tcp.frames import ChunkHead


class Landing:
    """Slots of a slab that only this process writes, lent to connections.

    A slot here belongs to the connection that fills it and not to the landing slot that a chunk
    names: a peer that was given up, or lies, cannot write over what another one sends. The slot used
    last is lent first, because it is still in the processor's cache.

    Attributes:
        starved: whether a connection needed a slot and got none, since this was last set to False.
        destinations: see `Transport.destinations`.
    """

    destinations: Destinations | None = None

    def __init__(self, slab: Slab) -> None:
        self._slab = slab
        self._free = list(reversed(range(slab.slots)))
        self._landed: list[int] = []
        self.starved = False

    @property
    def slot_bytes(self) -> int:
        return self._slab.slot_bytes

    def destination(self, head: ChunkHead) -> Destination | None:
        """Where this chunk belongs, if that is known before it has landed."""
        if self.destinations is None or not head.nbytes:
            return None
        return self.destinations(head.header, head.slot, head.nbytes)

    def lend(self) -> int | None:
        """Lend a slot, if one is free."""
        if self._free:
            return self._free.pop()
        self.starved = True
        return None

    def memory(self, slot: int, nbytes: int) -> memoryview:
        """The first bytes of a slot."""
        return self._slab.slot(slot, nbytes)

    def landed(self, slot: int) -> None:
        """A chunk lies in the slot; it stays there until `recycle`."""
        self._landed.append(slot)

    def give_back(self, slot: int) -> None:
        """No chunk will lie in the slot."""
        self._free.append(slot)

    def recycle(self) -> None:
        """What has landed so far has been handled."""
        self._free += self._landed
        self._landed.clear()
