# SPDX-License-Identifier: Apache-2.0
"""Seals and opens records by tags: a record opens only if it is the peer's next record, unchanged.

Tags come from ciphers (`cipher.py`) or, if no key is set, from checksums (`sums.py`).
"""

from collections.abc import Iterable
from typing import Any, Protocol

NOT_NEXT = "a record that does not open: not the peer's next one"


class Sealer(Protocol):
    """Seals the records of one direction of one connection.

    Attributes:
        in_parts: whether a record's body can be sealed part by part (`seal_parts`).
        in_clear: whether a chunk may also pass as it is, without tags, with a checksum of its own.
    """

    in_parts: bool
    in_clear: bool

    def seal(self, head: bytes, body: bytes | memoryview, out: memoryview) -> None:
        """Write the sealed body and its tag into `out`, which is TAG_BYTES longer than the body. The
        tag covers the record's prefix `head`, too."""

    def seal_parts(self, head: bytes, parts: Iterable[Any], out: memoryview) -> bytes:
        """Like `seal`, for a body that lies in parts (contiguous buffers); returns the tag.

        Args:
            out: as long as the body.
        """

    def record(self, kind: int, body: bytes) -> bytes:
        """A whole small record."""


class Opener(Protocol):
    """Opens the records of one direction of one connection.

    Attributes:
        in_parts: whether a record's body can be opened part by part (`open_parts`).
        in_clear: the same as for the peer's `Sealer`.
    """

    in_parts: bool
    in_clear: bool

    def open(self, head: memoryview, sealed: memoryview, out: memoryview) -> None:
        """Open into `out`, which is TAG_BYTES shorter than `sealed`.

        Raises FrameError if this is not the record that the peer sealed next; `out` is undefined
        then.
        """

    def open_parts(self, head: memoryview, sealed: memoryview, parts: Iterable[memoryview]) -> None:
        """Like `open`, but into several parts of memory, which together are as long as the body.
        Without parts the record is only counted, not opened.

        Raises FrameError as `open` does; the parts are undefined then.
        """
