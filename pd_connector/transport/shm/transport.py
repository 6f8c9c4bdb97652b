# SPDX-License-Identifier: Apache-2.0
"""The transport between processes of one user on one machine: each maps the other's slab.

The consumer listens on a Unix socket (`rendezvous.py`). Over it the producer hands over its sending slab, for
reading, and the consumer its landing slab. A producer elsewhere fails to connect, and the agent tries its next
transport. A written chunk is copied by the producer (`producer_half.py`), which then sends a note. A chunk that is
read is not copied at all: the consumer looks at it where it lies (`consumer_half.py`). Leased pages are copied by
the kernel (`memory/pieces.py`), where it permits that.

The kernel vouches for the peer's user; the token that names an expected producer has come over the control channel.
"""

import secrets
from collections.abc import Hashable
from typing import Self

import msgspec
import numpy as np

from pd_connector.memory.pieces import Pieces
from pd_connector.memory.pins import Pins
from pd_connector.memory.slab import Slab
from pd_connector.transport.base import Landed, Link, Transport, TransportParts, Written
from pd_connector.transport.shm.address import ShmAddress, read_address
from pd_connector.transport.shm.consumer_half import ConsumerHalf
from pd_connector.transport.shm.producer_half import ProducerHalf
from pd_connector.transport.shm.rendezvous import TOKEN_BYTES


class ShmTransport(Transport):
    """See the module.

    Args:
        landing: slab that peers write into; must be shared (`Slab(..., shared=True)`).
        sending: slab that peers may read from, if it is shared.
        pins: pins the producers' slabs, out of which chunks are copied to a GPU.
    """

    name = "shm"
    one_sided = True
    copies = True
    readable = True
    reads_first = True
    maps_slots = True

    def __init__(self, landing: Slab, sending: Slab, pins: Pins | None = None) -> None:
        self._landing = landing
        self._sending = sending
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._token_memory = np.frombuffer(self._token, np.uint8)  # which a peer tries to read
        self._producing = ProducerHalf(self._token, sending)
        self._consuming = ConsumerHalf(landing, pins or Pins())

    @classmethod
    def make(cls, parts: TransportParts) -> Self:
        buffers = parts.buffers
        return cls(buffers.landing, buffers.sending, buffers.pins)

    def address(self) -> bytes:
        landing, sending = self._landing, self._sending
        return msgspec.msgpack.encode(
            ShmAddress(
                listener=self._consuming.listener_name,
                token=self._token,
                slots=landing.slots,
                slot_bytes=landing.slot_bytes,
                send_slots=sending.slots if sending.handle >= 0 else 0,
                send_slot_bytes=sending.slot_bytes,
                token_address=self._token_memory.ctypes.data,
            )
        )

    def connect(self, consumer: bytes) -> Link:
        return self._producing.connect(read_address(consumer))

    def disconnect(self, link: Link) -> None:
        self._producing.disconnect(link)

    def broken(self, link: Link) -> bool:
        return self._producing.broken(link)

    def expect(self, producer: bytes) -> Hashable:
        return self._consuming.expect(read_address(producer))

    def dismiss(self, source: Hashable) -> None:
        self._consuming.dismiss(source)

    def write(self, link: Link, header: bytes, payload: memoryview, slot: int) -> int:
        return self._producing.write(link, header, payload, slot)

    def read(self, source: Hashable, send_slot: int, nbytes: int, slot: int, header: bytes) -> None:
        self._consuming.read(source, send_slot, nbytes, slot, header)

    def direct(self, source: Hashable) -> bool:
        return self._consuming.direct(source)

    def pull(self, source: Hashable, theirs: Pieces, ours: Pieces) -> bytes:
        return self._consuming.pull(source, theirs, ours)

    def silenced(self, source: Hashable, *, waits: bool = False) -> bool:
        return self._consuming.silenced(source, waits=waits)

    def poll(self) -> tuple[list[Written], list[Landed]]:
        return self._producing.poll(), self._consuming.poll()

    @property
    def pollables(self) -> list[object]:
        return [*self._consuming.pollables, *self._producing.pollables]

    @property
    def restless(self) -> bool:
        return self._producing.restless or self._consuming.restless

    def close(self) -> None:
        self._producing.close()
        self._consuming.close()
