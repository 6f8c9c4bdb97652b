# SPDX-License-Identifier: Apache-2.0
"""The contents of one object of a far store: a chunk, all its parts with a table in front, so no chunk is torn between ranks."""

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, NamedTuple

import msgspec

from pd_connector.errors import Miss, PoolError
from pd_connector.pool.store.base import Chunk, Reading, Store
from pd_connector.pool.store.entry import MOST_PARTS, MOST_TENANT

_LENGTH = struct.Struct("<I")
_MOST_TABLE = 64 << 10
Key = Annotated[bytes, msgspec.Meta(max_length=64)]
PartName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.-]{1,32}$")]
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What lies in front of the parts."""

    key: Key
    parent: Key
    tenant: Annotated[str, msgspec.Meta(max_length=MOST_TENANT)]
    parts: Annotated[list[tuple[PartName, Size]], msgspec.Meta(min_length=1, max_length=MOST_PARTS)]


class Opened(NamedTuple):
    """The contents of an object."""

    table: Table
    parts: list[memoryview]


_tables = msgspec.msgpack.Decoder(Table)


class Packed:
    """A chunk of this host, open to be read as one object. Leave its `with` block to close it.

    Raises:
        PoolError: it is gone, or damaged.
    """

    def __init__(self, store: Store, chunk: Chunk) -> None:
        self._readings: list[Reading] = []
        try:
            for part in chunk.parts:
                self._readings.append(store.read(chunk.key, part))
        except PoolError:
            self.close()
            raise
        named = [
            (name, reading.nbytes)
            for name, reading in zip(chunk.parts, self._readings, strict=True)
        ]
        table = msgspec.msgpack.encode(Table(chunk.key, chunk.parent, chunk.tenant, named))
        self._head = _LENGTH.pack(len(table)) + table
        self.nbytes = len(self._head) + sum(nbytes for _, nbytes in named)

    def into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` with the bytes of the object from `offset` on. Raises PoolError: a part is damaged."""
        place, start = 0, 0  # in the buffer, and where a piece begins in the object
        for nbytes, read in self._pieces():
            first = offset + place - start
            if place < len(buffer) and first < nbytes:
                piece = buffer[place : place + nbytes - first]
                read(piece, first)
                place += len(piece)
            start += nbytes

    def _pieces(self) -> Iterator[tuple[int, Callable[[memoryview, int], None]]]:
        yield len(self._head), self._head_into
        for reading in self._readings:
            yield reading.nbytes, reading.into

    def _head_into(self, buffer: memoryview, offset: int) -> None:
        buffer[:] = self._head[offset : offset + len(buffer)]

    def close(self) -> None:
        """Close the parts."""
        for reading in self._readings:
            reading.close()


def unpacked(key: bytes, contents: bytearray) -> Opened:
    """The parts of an object that was opened.

    Raises:
        PoolError: DAMAGED, it is not a chunk, or another one.
    """
    data = memoryview(contents)
    try:
        (length,) = _LENGTH.unpack_from(data)
        if length > _MOST_TABLE:
            raise ValueError(f"a table of {length} bytes")
        at = _LENGTH.size + length
        table = _tables.decode(data[_LENGTH.size : at])
    except (struct.error, ValueError, msgspec.MsgspecError) as error:
        raise PoolError(Miss.DAMAGED, f"the far store's object is not a chunk: {error}") from None
    if table.key != key or len({name for name, _ in table.parts}) < len(table.parts):
        raise PoolError(Miss.DAMAGED, "the far store's object is another chunk")
    if at + sum(size for _, size in table.parts) != len(data):
        raise PoolError(
            Miss.DAMAGED, "the far store's object has another length than its table says"
        )
    return Opened(table, _cut(data[at:], [size for _, size in table.parts]))


def _cut(data: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    parts, start = [], 0
    for size in sizes:
        parts.append(data[start : start + size])
        start += size
    return parts
