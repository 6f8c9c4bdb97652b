# SPDX-License-Identifier: Apache-2.0
"""Small objects by which a carrier notices that a far store was emptied or has lost a part. A client does not report
this: it just connects again."""

import contextlib

from pd_connector.pool.carrier.client import FarClient, SilentError
from pd_connector.pool.far.seal import Seal

_MARKERS = 64
"""A store of several nodes spreads them: the loss of one of 16 nodes is noticed with 98 %."""
_LOOKS_S = 5.0
"""How often they are looked for, in seconds. That also keeps them from being evicted."""
_CONTENTS = b"marker"


class Markers:
    """The markers of one host. Used by one thread.

    Args:
        host: a name that distinguishes this host's markers from those of other hosts.
    """

    def __init__(self, seal: Seal, host: str, client: FarClient) -> None:
        self._seal, self._client = seal, client
        keys = [f"marker {number} of {host}".encode() for number in range(_MARKERS)]
        self._names = [seal.names(key)[0] for key in keys]
        self._kept: set[str] = set()
        self._looks_at_s = 0.0

    def are_lost(self, now_s: float) -> bool:
        """Whether the store has lost markers since the last look. Puts all missing markers. Raises SilentError."""
        if now_s < self._looks_at_s:
            return False
        self._looks_at_s = now_s + _LOOKS_S
        sizes = dict(zip(self._names, self._client.has(self._names), strict=True))
        missing = [name for name, size in sizes.items() if not size]
        lost = not self._kept.isdisjoint(missing)
        self._kept = {name for name, size in sizes.items() if size}
        if missing:
            size = self._seal.sealed_bytes(len(_CONTENTS))

            def fill(place: int, room: memoryview) -> None:
                self._seal.seal(missing[place], len(_CONTENTS), _contents_into, room)

            # Looked for once more: for 30 s after a client has died in mid-put, Mooncake takes objects of the same name and keeps
            # nothing.
            with contextlib.suppress(SilentError):
                self._client.put(missing, [size] * len(missing), fill)
                there = self._client.has(missing)
                self._kept.update(name for name, size in zip(missing, there, strict=True) if size)
        return lost


def _contents_into(buffer: memoryview, offset: int) -> None:
    buffer[:] = _CONTENTS[offset : offset + len(buffer)]
