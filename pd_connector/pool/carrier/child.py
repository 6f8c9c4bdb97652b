# SPDX-License-Identifier: Apache-2.0
"""The process that has the far store's client. The carrier kills it when a call passes its deadline.

It sees sealed objects only, and no key. Objects pass through memory that it shares with the carrier.
"""

import contextlib
import ctypes
import mmap
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Annotated
from urllib.parse import urlsplit

import msgspec

from pd_connector.pool.far.base import NAME_BYTES, FarStore
from pd_connector.pool.far.registry import far_class

_PR_SET_PDEATHSIG = 1
MOST_NAMES = 256
"""Names in a call."""
MOST_MESSAGE = 64 << 10
Name = Annotated[str, msgspec.Meta(max_length=NAME_BYTES)]
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class Open(msgspec.Struct, frozen=True, tag="open"):
    """The first message: which store to open."""

    address: str
    deadline_s: float


class Call(msgspec.Struct, frozen=True, tag="call"):
    """A call of the store. The objects lie one after another in the shared memory, from `start` on, each with room of its
    `size`."""

    number: int
    method: str
    names: Annotated[list[Name], msgspec.Meta(max_length=MOST_NAMES)]
    sizes: list[Size] = []
    start: Size = 0


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """What a call has returned; 0 is the answer to `Open`."""

    number: int
    values: list[Size] = []
    problem: str = ""


_requests = msgspec.msgpack.Decoder(Open | Call)


class _Shared:
    """The memory that is shared with the carrier. It stays mapped between calls, because a new mapping is slow: the
    kernel fills it page by page."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._memory: mmap.mmap | None = None

    def room(self, start: int, nbytes: int) -> memoryview:
        """Its bytes from `start` on."""
        # The carrier cuts the file off after a large call: what is mapped beyond it must not be touched.
        length = os.fstat(self._descriptor).st_size
        if self._memory is None or len(self._memory) != length:
            self._memory = mmap.mmap(self._descriptor, length)
        return memoryview(self._memory)[start : start + nbytes]


def serve(channel: socket.socket, descriptor: int) -> None:
    """Answer calls until the carrier closes the channel."""
    store: FarStore | None = None
    shared = _Shared(descriptor)
    while data := channel.recv(MOST_MESSAGE):
        message = _requests.decode(data)
        number, values, problem = 0, [], ""
        try:
            if isinstance(message, Open):
                address = urlsplit(message.address)
                store = far_class(address.scheme)(address, message.deadline_s)
            else:
                assert store is not None
                number = message.number
                values = _called(store, message, shared)
        except Exception as error:  # a client of another package can raise anything
            problem = f"{type(error).__name__}: {error}"[:1000]
        channel.sendall(msgspec.msgpack.encode(Answer(number, values, problem)))
    if store is not None:
        store.close()


def _called(store: FarStore, call: Call, shared: _Shared) -> list[int]:
    if call.method == "has":
        return store.has(call.names)
    if call.method == "remove":
        store.remove(call.names)
        return []
    if not (nbytes := sum(call.sizes)):
        return [0] * len(call.names)
    with shared.room(call.start, nbytes) as room:
        places = _places(room, call.sizes)
        try:
            if call.method == "get":
                return store.get(call.names, places)
            return list(map(int, store.put(call.names, places)))
        finally:
            for place in places:
                place.release()


def _places(room: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    places, start = [], 0
    for size in sizes:
        places.append(room[start : start + size])
        start += size
    return places


def main() -> None:
    """The program: `python -m pd_connector.pool.carrier.child CHANNEL MEMORY`, two descriptors."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the carrier ends it
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # also if that is killed
    channel = socket.socket(fileno=int(sys.argv[1]))
    with contextlib.suppress(OSError):  # the carrier is gone
        serve(channel, int(sys.argv[2]))
    os._exit(0)  # clients may have threads that do not end


if __name__ == "__main__":
    main()
