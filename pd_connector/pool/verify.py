# SPDX-License-Identifier: Apache-2.0
"""Reads all that a store holds, and says what cannot be used."""

from collections.abc import Iterator
from typing import NamedTuple

from pd_connector.errors import Miss, PoolError
from pd_connector.pool.loader import read_head
from pd_connector.pool.record import layer_sum
from pd_connector.pool.store.base import FAR, Reading, Store


class Checked(NamedTuple):
    """A chunk that was read."""

    key: bytes
    nbytes: int
    problem: str
    """Empty if all is well."""


def sound(key: bytes, part: str, reading: Reading) -> str:
    """What is wrong with a part: its header, record and the sum of each layer are checked. Whether an engine can use
    the part also depends on that engine."""
    header, record = read_head(reading)
    if (record.key, record.part) != (key, part):
        return f"is {record.part} of chunk {record.key.hex()}"
    end = header.payload_offset + header.payload_bytes
    if end != reading.nbytes:
        return f"has {reading.nbytes} bytes, {end} by its record"
    for layer in record.layers:
        data = reading.take(header.payload_offset + layer.offset, layer.nbytes)
        if layer_sum(data) != layer.sum:
            return f"the bytes of layer {layer.layer} differ from their sum"
    return ""


class InMemory(Reading):
    """A part that was read already."""

    tier = FAR

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.nbytes = len(data)

    def into(self, buffer: memoryview, offset: int) -> None:
        if offset + len(buffer) > self.nbytes:
            raise PoolError(Miss.DAMAGED, f"ends after {self.nbytes} bytes")
        buffer[:] = self._data[offset : offset + len(buffer)]

    def close(self) -> None:
        self._data.release()


def verify(store: Store) -> Iterator[Checked]:
    """Read all parts of all chunks. Chunks that go meanwhile are left out; damaged ones stay, unless a file is missing. Raises
    PoolError: this process cannot read on."""
    for chunk in store.chunks():
        problems = []
        for part in chunk.parts:
            try:
                with store.read(chunk.key, part) as reading:
                    if problem := sound(chunk.key, part, reading):
                        problems.append(f"{part}: {problem}")
            except PoolError as error:
                if error.cause is Miss.REFUSED:  # this process has no file handles or memory left
                    raise
                if error.cause is not Miss.EVICTED:
                    problems.append(f"{part}: {error}")
        yield Checked(chunk.key, chunk.nbytes, "; ".join(problems))
