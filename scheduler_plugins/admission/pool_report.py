# SPDX-License-Identifier: Apache-2.0
"""An engine's report to a router about the KV pool of its host: `GET /pd/pool`. With `?after=N` it has a page of the
store's journal, with `?after=N&of=far` a page of the far store that the host's carrier reaches. The middleware of the
engine's API server answers it."""

from __future__ import annotations

from typing import Annotated

import msgspec

PATH = "/pd/pool"
MOST_EVENTS = 1 << 14
"""The most events of a page."""
MOST_BYTES = 2 << 20
"""The most bytes of an answer. A page of the journal has about 0.7 MB."""

Number = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
Speed = Annotated[float, msgspec.Meta(gt=0)]


class PoolEvent(msgspec.Struct, frozen=True, array_like=True):
    """A change of where a chunk is."""

    number: Number
    key: Digest
    tier: Annotated[str, msgspec.Meta(max_length=32)]
    """The fastest tier that has the chunk from now on; empty: none has it."""


class PoolReport(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's place in a pool, and a page of the journal if the query has `after`."""

    store: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{8,64}$")]
    """The store, the same at every engine of the host."""
    model: Digest
    """The model's part of the keys of this engine's chunks."""
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    chunk_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 0
    """Bytes of a chunk of this model; 0: not known."""
    bytes_per_s: Annotated[dict[str, Speed], msgspec.Meta(max_length=8)] = {}
    """How fast this engine loads chunks, by tier."""
    far: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{32})?$")] = ""
    """The far store that the host's carrier reaches, the same at every host; empty: there is no carrier, or it does not know."""
    events: Annotated[tuple[PoolEvent, ...], msgspec.Meta(max_length=MOST_EVENTS)] = ()
    next: Number = 0
    """Pass it as `after` to get the next page."""
    whole: bool = False
    """The page starts the journal again from its beginning: drop the pages before it."""
    more: bool = False
    """More is there already."""

    def encode(self) -> bytes:
        """As JSON."""
        return _ENCODER.encode(self)


def decode(raw: bytes) -> PoolReport:
    """Read what `PoolReport.encode` wrote. Raises msgspec.MsgspecError if the data is something else."""
    return _DECODER.decode(raw)


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(PoolReport)
