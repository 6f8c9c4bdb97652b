# SPDX-License-Identifier: Apache-2.0
"""A transport that hands everything on, and lets a test meddle with what a producer writes."""

from collections.abc import Callable, Hashable

from pd_connector.memory.pieces import Pieces
from pd_connector.transport.base import Landed, Link, Transport, Written

Meddle = Callable[[bytes, bytes, int], tuple[bytes, bytes, int] | None]
"""Takes a chunk's header, payload and slot; returns what is written, None for nothing at all."""


class MeddlingTransport(Transport):
    """`Written` comes as it would, whether or not anything was written.

    Args:
        inner: what moves the bytes.
        meddle: sees each chunk before it is written.
        ends: whether writes that were swallowed end; if not, only `disconnect` ends them.
    """

    name = "set by the instance"
    one_sided = True

    def __init__(self, inner: Transport, meddle: Meddle, ends: bool = True) -> None:
        self._inner = inner
        self._meddle = meddle
        self._ends = ends
        self._swallowed: dict[int, Link] = {}
        self._written: list[Written] = []
        self.name = inner.name  # type: ignore[misc]
        self.one_sided = inner.one_sided  # type: ignore[misc]
        self.readable = inner.readable  # type: ignore[misc]

    def address(self) -> bytes:
        return self._inner.address()

    def connect(self, consumer: bytes) -> Link:
        return self._inner.connect(consumer)

    def disconnect(self, link: Link) -> None:
        self._inner.disconnect(link)
        for token in [token for token, to in self._swallowed.items() if to == link]:
            del self._swallowed[token]
            self._written.append(Written(token, False, "disconnected"))

    def expect(self, producer: bytes) -> Hashable:
        return self._inner.expect(producer)

    def dismiss(self, source: Hashable) -> None:
        self._inner.dismiss(source)

    def write(self, link: Link, header: bytes, payload: memoryview, slot: int) -> int:
        written = self._meddle(header, bytes(payload), slot)
        if written is not None:
            header, data, slot = written
            return self._inner.write(link, header, memoryview(data), slot)
        token = -1 - len(self._swallowed) - len(self._written)
        if self._ends:
            self._written.append(Written(token, True, ""))
        else:
            self._swallowed[token] = link
        return token

    def read(self, source: Hashable, send_slot: int, nbytes: int, slot: int, header: bytes) -> None:
        self._inner.read(source, send_slot, nbytes, slot, header)

    def direct(self, source: Hashable) -> bool:
        return self._inner.direct(source)

    def pull(self, source: Hashable, theirs: Pieces, ours: Pieces) -> bytes:
        return self._inner.pull(source, theirs, ours)

    def silenced(self, source: Hashable) -> bool:
        return self._inner.silenced(source)

    def poll(self) -> tuple[list[Written], list[Landed]]:
        written, landed = self._inner.poll()
        own, self._written = self._written, []
        return written + own, landed

    @property
    def pollables(self) -> list[object]:
        return self._inner.pollables

    @property
    def restless(self) -> bool:
        return bool(self._written) or self._inner.restless

    def close(self) -> None:
        self._inner.close()
