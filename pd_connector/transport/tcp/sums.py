# SPDX-License-Identifier: Apache-2.0
"""Records with a checksum, for connections without a key.

A record's tag is XXH3 of its prefix and body, with its number in its direction as the seed. A record that was
changed by accident, repeated, left out or reordered does not open. The tag does not stop an attacker.

A record is summed right after it was copied, while it is in the processor's cache. A checksum of the
whole chunk reads all of it from memory once more, on both sides.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import xxhash

from pd_connector.transport.tcp.frames import TAG_BYTES, FrameError, prefix
from pd_connector.transport.tcp.sealing import NOT_NEXT


class SumSealer:
    """A `Sealer`."""

    in_parts = in_clear = True

    def __init__(self) -> None:
        self._records = 0

    def seal(self, head: bytes, body: bytes | memoryview, out: memoryview) -> None:
        out[-TAG_BYTES:] = self.seal_parts(head, [body], out[:-TAG_BYTES])

    def seal_parts(self, head: bytes, parts: Iterable[Any], out: memoryview) -> bytes:
        to, at = np.frombuffer(out, np.uint8), 0
        for part in parts:  # numpy's copies leave Python's lock to others
            data = np.frombuffer(part, np.uint8)
            to[at : at + len(data)] = data
            at += len(data)
        self._records += 1
        return _tag(self._records, head, out)

    def record(self, kind: int, body: bytes) -> bytes:
        head = prefix(kind, len(body))
        self._records += 1
        return head + body + _tag(self._records, head, body)


class SumOpener:
    """An `Opener`."""

    in_parts = in_clear = True

    def __init__(self) -> None:
        self._records = 0

    def open(self, head: memoryview, sealed: memoryview, out: memoryview) -> None:
        self.open_parts(head, sealed, [out])

    def open_parts(self, head: memoryview, sealed: memoryview, parts: Iterable[memoryview]) -> None:
        body, tag = sealed[:-TAG_BYTES], sealed[-TAG_BYTES:]
        self._records += 1
        if _tag(self._records, head, body) != tag:
            raise FrameError(NOT_NEXT)
        data, at = np.frombuffer(body, np.uint8), 0
        for part in parts:
            np.frombuffer(part, np.uint8)[:] = data[at : at + len(part)]
            at += len(part)


def _tag(number: int, head: bytes | memoryview, body: bytes | memoryview) -> bytes:
    digest = xxhash.xxh3_128(head, seed=number)
    digest.update(body)
    return digest.digest()
