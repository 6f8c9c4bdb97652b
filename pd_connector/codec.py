# SPDX-License-Identifier: Apache-2.0
"""How elements are coded on the wire. The two sides agree on a codec by name when they open."""

from collections.abc import Sequence
from typing import Protocol


class Codec(Protocol):
    """One way to code a chunk. Gathering writes coded bytes, scattering reads them."""

    name: str

    def coded_bytes(self, nbytes: int) -> int:
        """Bytes on the wire for `nbytes` bytes of cache, scales included."""
        ...


class Raw:
    """The cache's own bytes: exact, for caches of the same element type."""

    name = "raw"

    def coded_bytes(self, nbytes: int) -> int:
        return nbytes


CODECS: dict[str, Codec] = {codec.name: codec for codec in (Raw(),)}


def negotiate(accepted: Sequence[str]) -> Codec | None:
    """The first codec of `accepted` (best first) that this side has, or None."""
    return next((CODECS[name] for name in accepted if name in CODECS), None)
