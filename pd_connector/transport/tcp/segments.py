# SPDX-License-Identifier: Apache-2.0
"""Memory of sealed records on their way."""

from pd_connector.transport.tcp.frames import PREFIX_BYTES, RECORD_BYTES, TAG_BYTES

_MOST_KEPT = 4
"""Segments that are kept for the next chunk, at most: sessions are many, and few of them move chunks."""


class Segments:
    """Room for one sealed record each, lent to connections while they move a chunk.

    The segment used last is lent first, because it is still in the processor's cache.
    """

    def __init__(self) -> None:
        self._free: list[memoryview] = []

    def take(self) -> memoryview:
        """A segment. It is given back, or forgotten."""
        if self._free:
            return self._free.pop()
        return memoryview(bytearray(PREFIX_BYTES + RECORD_BYTES + TAG_BYTES))

    def give_back(self, segment: memoryview) -> None:
        """The segment is no longer used."""
        if len(self._free) < _MOST_KEPT:
            self._free.append(segment)
