# SPDX-License-Identifier: Apache-2.0
"""KV events of engines. vLLM's and SGLang's events have the same fields.

A message has three frames: a topic, a sequence number (8 bytes, big-endian), and a batch in msgpack. Newer engines
send an event as a map; older engines and SGLang send an array. Both can be read. Unknown fields are skipped, so
engines can add fields.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

import msgspec

END_SEQUENCE = b"\xff" * 8
"""Sequence number of the frame that ends a replay."""
BlockName = int | bytes
"""An engine's name of a block."""
OWN_MEDIA = (None, "GPU")
"""Media whose blocks count as cached. Blocks of other tiers must be loaded first."""


class EventError(ValueError):
    """The message is not a batch of events."""


class Stored(msgspec.Struct, tag="BlockStored"):
    """Consecutive blocks were computed."""

    block_hashes: list[BlockName]
    parent_block_hash: BlockName | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class Removed(msgspec.Struct, tag="BlockRemoved"):
    """Blocks were evicted."""

    block_hashes: list[BlockName]
    medium: str | None = None
    group_idx: int | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    """The cache is empty."""


class _StoredArray(Stored, tag="BlockStored", array_like=True):
    pass


class _RemovedArray(Removed, tag="BlockRemoved", array_like=True):
    pass


class _ClearedArray(Cleared, tag="AllBlocksCleared", array_like=True):
    pass


Event = Stored | Removed | Cleared


class Batch(msgspec.Struct, array_like=True):
    """Events of one step."""

    ts: float
    """Time in seconds, by the engine's clock."""
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


class _ArrayBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_StoredArray | _RemovedArray | _ClearedArray]
    data_parallel_rank: int | None = None


_DECODER = msgspec.msgpack.Decoder(Batch)
_ARRAY_DECODER = msgspec.msgpack.Decoder(_ArrayBatch)


def decode(payload: bytes) -> Batch:
    """Read a batch.

    Raises:
        EventError: the payload is not a batch.
    """
    batch = _decoded(payload)
    if not isfinite(batch.ts):
        raise EventError(f"its time is {batch.ts}")  # it would break comparisons with later times
    return batch


def _decoded(payload: bytes) -> Batch:
    try:
        return _DECODER.decode(payload)
    except msgspec.MsgspecError as error:
        first = error
    try:
        batch = _ARRAY_DECODER.decode(payload)
    except msgspec.MsgspecError:
        raise EventError(f"not a batch of KV events: {first}") from None
    return Batch(batch.ts, list(batch.events), batch.data_parallel_rank)
