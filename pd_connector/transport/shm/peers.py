# SPDX-License-Identifier: Apache-2.0
"""The peers of a shared-memory transport: what each has shared, and what it is told."""

import mmap
import socket
import struct
from collections import deque
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from pd_connector.errors import TransportError
from pd_connector.memory.shared_cache import MAX_SPANS, CacheWindow, Span
from pd_connector.transport.shm.lobby import map_shared, take

NOTE = struct.Struct("<IQ")
"""Slot and bytes of a chunk that has been copied; the chunk's header follows."""

_Slots = Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]
_SlotBytes = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
_Memory = npt.NDArray[np.uint8]
_Span = tuple[
    Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)],
    Annotated[int, msgspec.Meta(ge=1, le=1 << 48)],
]


class ShmAddress(msgspec.Struct, frozen=True, array_like=True):
    listener: str
    token: bytes
    slots: _Slots  # of the landing slab
    slot_bytes: _SlotBytes
    # Of the sending slab. It has no slots where it is not shared, as in versions without reads.
    send_slots: Annotated[int, msgspec.Meta(ge=0, le=1 << 32)] = 0
    send_slot_bytes: _SlotBytes = 1
    token_address: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0  # in the peer's memory
    # ShmAddress and bytes of the memory of its cache, in the order behind the descriptor it hands over.
    cache: Annotated[tuple[_Span, ...], msgspec.Meta(max_length=MAX_SPANS)] = ()


@dataclass(slots=True)
class ProducerPeer:
    """A producer that may write here, as long as a source names it.

    `window` is its sending slab once that has come; `problem` says why it will not come. `cache` is
    its cache, if it shares that. `pid` is its process where its memory can be read, 0 where it cannot,
    None before that was tried.
    """

    address: ShmAddress
    sources: set[int] = field(default_factory=set)
    links: list[socket.socket] = field(default_factory=list)
    window: _Memory | None = None
    problem: str = ""
    cache: CacheWindow | None = None
    pid: int | None = None

    def take(self, descriptors: tuple[int, ...]) -> None:
        """Map what it has handed over; the descriptors are closed."""
        address = self.address
        slab_bytes = address.send_slots * address.send_slot_bytes
        spans = [Span(*span) for span in address.cache]
        sizes = (slab_bytes, sum(span.nbytes for span in spans))
        mapped = [
            map_shared(descriptor, nbytes, mmap.ACCESS_READ)
            for descriptor, nbytes in zip(descriptors, sizes, strict=False)
        ]
        self.window = mapped[0] if mapped else None
        cache = mapped[1] if len(mapped) > 1 else None
        self.cache = CacheWindow(spans, cache) if cache is not None else None
        if self.window is None:
            self.problem = "shm: the producer has not handed over a slab as it announced"


@dataclass(slots=True)
class ConsumerPeer:
    """A consumer this producer writes to; without `window` until its memory has arrived."""

    link: socket.socket
    slots: int
    slot_bytes: int
    window: _Memory | None = None
    waiting: list[tuple[bytes, bytes, int]] = field(default_factory=list)
    notes: deque[bytes] = field(default_factory=deque)  # that the socket had no room for

    def copy(self, header: bytes, payload: memoryview, slot: int) -> str:
        """Copy a chunk into a landing slot and tell; returns what went wrong."""
        assert self.window is not None
        start = slot * self.slot_bytes
        target = self.window[start : start + len(payload)]
        np.copyto(target, np.frombuffer(payload, np.uint8))  # without the interpreter lock
        self.notes.append(NOTE.pack(slot, len(payload)) + header)
        return self.tell()

    def tell(self) -> str:
        """Send the notes for which there is room; returns what went wrong."""
        try:
            while self.notes:
                self.link.send(self.notes[0])
                self.notes.popleft()
        except BlockingIOError:
            pass  # it reads slowly: `poll` tries again
        except OSError as error:
            self.notes.clear()
            return f"shm: the consumer is gone ({error})"
        return ""

    def open_window(self) -> None:
        """Take the consumer's memory, if it has come, and copy what has waited for it."""
        try:
            _, descriptors = take(self.link, 1)
        except OSError:
            return
        nbytes = self.slots * self.slot_bytes
        for descriptor in descriptors:  # one or none
            self.window = map_shared(descriptor, nbytes, mmap.ACCESS_WRITE)
        if self.window is not None:
            for header, payload, slot in self.waiting:
                self.copy(header, memoryview(payload), slot)
        self.waiting.clear()


def read_address(address: bytes) -> ShmAddress:
    """A peer's `address()`. Raises TransportError if it is none."""
    try:
        return msgspec.msgpack.decode(address, type=ShmAddress)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TransportError(f"shm address of a peer cannot be read: {error}") from None
