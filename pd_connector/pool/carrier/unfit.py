# SPDX-License-Identifier: Apache-2.0
"""Chunks of a host that cannot be put into a far store."""

from collections import OrderedDict
from typing import NamedTuple

from pd_connector.pool.store.base import Chunk

GONE, TOO_LARGE = "gone", "too_large"
"""It could not be read; it is larger than the far store takes."""


class _Reason(NamedTuple):
    """Why a chunk is unfit."""

    cause: str
    nbytes: int
    """Bytes of the chunk: with other bytes it is another chunk of the same key."""


class UnfitChunks:
    """Each is noted once. Used by one thread.

    Args:
        most: chunks that are remembered. The oldest are forgotten first.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._reasons: OrderedDict[bytes, _Reason] = OrderedDict()

    def note(self, chunk: Chunk, cause: str) -> bool:
        """Whether this is new."""
        reason = _Reason(cause, chunk.nbytes)
        if self._reasons.get(chunk.key) == reason:
            return False
        self._reasons[chunk.key] = reason
        while len(self._reasons) > self._most:
            self._reasons.popitem(last=False)
        return True

    def is_too_large(self, chunk: Chunk) -> bool:
        """Whether it was found to be too large for the far store, and has not changed since."""
        return self._reasons.get(chunk.key) == _Reason(TOO_LARGE, chunk.nbytes)

    def forget(self, key: bytes) -> None:
        """It was put, or is no longer on this host."""
        self._reasons.pop(key, None)
