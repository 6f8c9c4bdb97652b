# SPDX-License-Identifier: Apache-2.0
"""A transport that passes everything on to another transport. Transports that change something override it."""

from collections.abc import Callable, Hashable

from pd_connector.memory.device_bytes import Payload
from pd_connector.memory.device_slab import DeviceSlab
from pd_connector.memory.pieces import Pieces
from pd_connector.transport.base import Destinations, Landed, Link, Transport, Written


class WrappingTransport(Transport):
    """Has the name and properties of `inner`."""

    name = "set by the instance"
    one_sided = True

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        # Other transports have class constants; here they are copied from the wrapped transport.
        self.name = inner.name  # type: ignore[misc]
        self.one_sided = inner.one_sided  # type: ignore[misc]
        self.copies = inner.copies  # type: ignore[misc]
        self.readable = inner.readable  # type: ignore[misc]
        self.reaches_devices = inner.reaches_devices  # type: ignore[misc]
        self.reads_first = inner.reads_first  # type: ignore[misc]
        self.maps_slots = inner.maps_slots  # type: ignore[misc]
        self.private_slots = inner.private_slots  # type: ignore[misc]
        self.label = inner.label
        self.port = inner.port
        self.verifies = inner.verifies
        self.prepares = inner.prepares
        self.sends_from = inner.sends_from

    def address(self) -> bytes:
        return self.inner.address()

    def connect(self, consumer: bytes) -> Link:
        return self.inner.connect(consumer)

    def device_slots(self, link: Link) -> DeviceSlab | None:
        return self.inner.device_slots(link)

    def disconnect(self, link: Link) -> None:
        self.inner.disconnect(link)

    def broken(self, link: Link) -> bool:
        return self.inner.broken(link)

    def expect(self, producer: bytes) -> Hashable:
        return self.inner.expect(producer)

    def dismiss(self, source: Hashable) -> None:
        self.inner.dismiss(source)

    def write(self, link: Link, header: bytes, payload: Payload, slot: int) -> int:
        return self.inner.write(link, header, payload, slot)

    def prepare(
        self, link: Link, header: bytes, pieces: Pieces, slot: int, into: memoryview
    ) -> Callable[[], int] | None:
        return self.inner.prepare(link, header, pieces, slot, into)

    @property
    def destinations(self) -> Destinations | None:
        return self.inner.destinations

    @destinations.setter
    def destinations(self, asked: Destinations | None) -> None:
        self.inner.destinations = asked

    def read(self, source: Hashable, send_slot: int, nbytes: int, slot: int, header: bytes) -> None:
        self.inner.read(source, send_slot, nbytes, slot, header)

    def direct(self, source: Hashable) -> bool:
        return self.inner.direct(source)

    def pull(self, source: Hashable, theirs: Pieces, ours: Pieces) -> bytes:
        return self.inner.pull(source, theirs, ours)

    def silenced(self, source: Hashable, *, waits: bool = False) -> bool:
        return self.inner.silenced(source, waits=waits)

    def poll(self) -> tuple[list[Written], list[Landed]]:
        return self.inner.poll()

    @property
    def pollables(self) -> list[object]:
        return self.inner.pollables

    @property
    def restless(self) -> bool:
        return self.inner.restless

    def close(self) -> None:
        self.inner.close()
