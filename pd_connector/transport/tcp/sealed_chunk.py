# SPDX-License-Identifier: Apache-2.0
"""A chunk whose records lie in landing memory as they came, until somebody wants them."""

import ctypes
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from pd_connector.errors import TransportError
from pd_connector.memory.pieces import Pieces
from pd_connector.memory.sealed import Sealed
from pd_connector.transport.tcp.cipher import Opener
from pd_connector.transport.tcp.frames import FrameError


class SealedRecord(NamedTuple):
    """All of a record but its body."""

    nonce: bytes
    head: bytes
    tag: bytes
    nbytes: int  # of its body


class SealedChunk(Sealed):
    """The bodies lie one after the other in `memory`.

    Args:
        spoiled: called when a record does not open: nothing more may be taken from its connection.
    """

    def __init__(
        self,
        memory: memoryview,
        records: list[SealedRecord],
        opener: Opener,
        spoiled: Callable[[], None],
    ) -> None:
        self.nbytes = memory.nbytes
        self._memory = memory
        self._records = records
        self._opener = opener
        self._spoiled = spoiled
        self._opened = False

    def open(self) -> memoryview:
        if not self._opened:
            self._open(lambda start, stop: [(self._memory[start:stop], self._memory[start:stop])])
            self._opened = True
        return self._memory

    def open_into(self, pieces: Pieces) -> None:
        if pieces.nbytes != self.nbytes:
            raise TransportError(
                f"a payload of {self.nbytes} bytes is to be opened into {pieces.nbytes}"
            )
        if self._opened:  # it came twice
            raise TransportError("a payload is to be opened into pages after it was opened")
        self._open(lambda start, stop: self._parts(pieces, start, stop))

    def _parts(self, pieces: Pieces, start: int, stop: int) -> Iterator[tuple[Any, Any]]:
        for out in parts(pieces, start, stop):
            yield self._memory[start : start + len(out)], out
            start += len(out)

    def _open(self, between: Callable[[int, int], Iterable[tuple[Any, Any]]]) -> None:
        start = 0
        for nonce, head, tag, nbytes in self._records:
            try:
                self._opener.open_parts(nonce, head, tag, between(start, start + nbytes))
            except FrameError as error:
                self._spoiled()
                raise TransportError(f"tcp transport: {error}") from None
            start += nbytes


def parts(pieces: Pieces, start: int, stop: int) -> Iterator[Any]:
    """Bytes [start, stop) of pieces that are memory of this process, as buffers."""
    size = pieces.piece_bytes
    first, skip = divmod(start, size)
    for address in pieces.addresses[first : -(-stop // size)].tolist():
        nbytes = min(size - skip, stop - start)
        buffer = (ctypes.c_uint8 * nbytes).from_address(address + skip)
        yield memoryview(buffer).cast("B")
        start, skip = start + nbytes, 0
