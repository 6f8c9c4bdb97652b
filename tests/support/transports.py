# SPDX-License-Identifier: Apache-2.0
"""A transport that hands everything on, and lets a test meddle with what a producer writes."""

from collections.abc import Callable

from chaos.wrapping import WrappingTransport
from pd_connector.transport.base import Landed, Link, Transport, Written

Meddle = Callable[[bytes, bytes, int], tuple[bytes, bytes, int] | None]
"""Takes a chunk's header, payload and slot; returns what is written, None for nothing at all."""


class MeddlingTransport(WrappingTransport):
    """`Written` comes as it would, whether or not anything was written.

    Args:
        inner: what moves the bytes.
        meddle: sees each chunk before it is written.
        ends: whether writes that were swallowed end; if not, only `disconnect` ends them.
    """

    def __init__(self, inner: Transport, meddle: Meddle, ends: bool = True) -> None:
        super().__init__(inner)
        # What is meddled with here is found by its checksum, and gathered into a slot first.
        self.copies = False  # type: ignore[misc]
        self.verifies = self.prepares = False
        self.sends_from = None
        self._meddle = meddle
        self._ends = ends
        self._swallowed: dict[int, Link] = {}
        self._written: list[Written] = []

    def disconnect(self, link: Link) -> None:
        self.inner.disconnect(link)
        for token in [token for token, to in self._swallowed.items() if to == link]:
            del self._swallowed[token]
            self._written.append(Written(token, False, "disconnected"))

    def write(self, link: Link, header: bytes, payload: memoryview, slot: int) -> int:
        written = self._meddle(header, bytes(payload), slot)
        if written is not None:
            header, data, slot = written
            return self.inner.write(link, header, memoryview(data), slot)
        token = -1 - len(self._swallowed) - len(self._written)
        if self._ends:
            self._written.append(Written(token, True, ""))
        else:
            self._swallowed[token] = link
        return token

    def poll(self) -> tuple[list[Written], list[Landed]]:
        written, landed = self.inner.poll()
        own, self._written = self._written, []
        return written + own, landed

    @property
    def restless(self) -> bool:
        return bool(self._written) or self.inner.restless
