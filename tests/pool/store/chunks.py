# SPDX-License-Identifier: Apache-2.0
"""Chunks whose bytes follow from their keys."""

import hashlib
import random
import time
from collections.abc import Sequence

from pd_connector.pool.store.base import Refusal, Store, Why, Writing


def chain(name: str, chunks: int) -> list[bytes]:
    """Keys of a chain."""
    keys = [hashlib.blake2b(name.encode(), digest_size=32).digest()]
    for _ in range(chunks - 1):
        keys.append(hashlib.blake2b(keys[-1], digest_size=32).digest())
    return keys[:chunks]


def content(key: bytes, part: str, nbytes: int) -> bytes:
    """The bytes of a part."""
    return random.Random(key + part.encode()).randbytes(nbytes)


def begin(
    store: Store, key: bytes, parent: bytes = b"", nbytes: int = 10_000, **more: object
) -> Writing | Refusal:
    """Reserve room for the only part of a chunk."""
    given = {"part": "r0", "parts": 1, **more}
    return store.begin(key, parent=parent, nbytes=nbytes, **given)  # type: ignore[arg-type]


def save(
    store: Store,
    keys: Sequence[bytes],
    parent: bytes = b"",
    nbytes: int = 10_000,
    patience_s: float = 10.0,
    **more: object,
) -> int:
    """Save a chain; returns how many chunks were taken.

    Args:
        patience_s: on a busy machine another process may hold the catalog for longer than a save waits.
    """
    saved, until = 0, time.monotonic() + patience_s
    for key in keys:
        while (taken := _taken(store, key, parent, nbytes, **more)) is None:
            if time.monotonic() >= until:
                break
            time.sleep(0.01)
        saved += bool(taken)
        parent = key
    return saved


def _taken(store: Store, key: bytes, parent: bytes, nbytes: int, **more: object) -> bool | None:
    """Whether a chunk was taken; None if the catalog was held for too long."""
    writing = begin(store, key, parent, nbytes, **more)
    if isinstance(writing, Refusal):
        return None if writing.why is Why.UNWELL else False
    with writing:
        writing.write(0, memoryview(content(key, str(more.get("part", "r0")), nbytes)))
        return writing.publish() or None


def there(store: Store, keys: Sequence[bytes]) -> int:
    """How many chunks of a chain are found."""
    return sum(found is not None for found in store.find(keys))


def loads(store: Store, key: bytes, part: str = "r0") -> bool:
    """Whether the bytes of a part are those that were saved. Raises PoolError."""
    with store.read(key, part) as reading:
        return reading.take(0, reading.nbytes) == content(key, part, reading.nbytes)
