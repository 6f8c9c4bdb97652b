# SPDX-License-Identifier: Apache-2.0
"""Reads all that a store holds, and says what cannot be used."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from pd_connector.errors import Miss, PoolError
from pd_connector.pool.store.base import Reading
from pd_connector.pool.store.local import LocalStore

Check = Callable[[bytes, str, Reading], str]
"""Key, name of the part, and the part: what is wrong with it; empty if nothing is. May raise PoolError."""
_READ_BYTES = 4 << 20


class Checked(NamedTuple):
    """A chunk that was read."""

    key: bytes
    nbytes: int
    problem: str
    """Empty if all is well."""


def reads(key: bytes, part: str, reading: Reading) -> str:
    """A check that reads every byte and believes it."""
    buffer = memoryview(bytearray(_READ_BYTES))
    for offset in range(0, reading.nbytes, _READ_BYTES):
        reading.into(buffer[: reading.nbytes - offset], offset)
    return ""


def verify(store: LocalStore, check: Check) -> Iterator[Checked]:
    """Read all parts of all chunks. Chunks that go meanwhile are left out; damaged ones stay, unless a file is missing."""
    for chunk in store.chunks():
        problems = []
        for part in chunk.parts:
            try:
                with store.read(chunk.key, part) as reading:
                    if problem := check(chunk.key, part, reading):
                        problems.append(f"{part}: {problem}")
            except PoolError as error:
                if error.cause is not Miss.EVICTED:
                    problems.append(f"{part}: {error}")
        yield Checked(chunk.key, chunk.nbytes, "; ".join(problems))
