# SPDX-License-Identifier: Apache-2.0
"""Names of parts. A name tells the rank that wrote the part, the codec in which its KV may have passed, and the draft
model. A look-up knows only the name."""

import functools
import re

from pd_connector.kv.coding import RAW
from pd_connector.kv.geometry import Shard

_PART = re.compile(
    r"(\d{1,10})-(\d{1,10})\.(\d{1,10})of(\d{1,10})(?:\.([a-z0-9_]+))?(?:-d([0-9a-f]{8}))?"
)
_MARK_BYTES = 4


def draft_mark(draft: bytes) -> str:
    """A draft model in names of parts; empty for none.

    Args:
        draft: its fingerprint (`ModelFacts.draft`).
    """
    return draft[:_MARK_BYTES].hex()


def part_name(shard: Shard, codec: str = RAW.name, draft: bytes = b"") -> str:
    """The name of this rank's part of each chunk.

    Args:
        codec: the coarsest codec in which its KV may have passed. It is in the name, so a look-up need not open the
            file.
        draft: fingerprint of the draft model, if its layers are in the chunk, too; empty for none.

    >>> part_name(Shard(first_layer=0, stop_layer=32, tp_rank=1, tp_size=2), "int8")
    '0-32.1of2.int8'
    """
    name = f"{shard.first_layer}-{shard.stop_layer}.{shard.tp_rank}of{shard.tp_size}"
    name = name if codec == RAW.name else f"{name}.{codec}"
    return f"{name}-d{draft_mark(draft)}" if draft else name


@functools.lru_cache(maxsize=4096)
def part_codec(name: str) -> str:
    """The codec in the name of a part."""
    match = _PART.fullmatch(name)
    return (match[5] if match else None) or RAW.name


@functools.lru_cache(maxsize=4096)
def part_draft(name: str) -> str:
    """The `draft_mark` in the name of a part; empty without a draft model."""
    match = _PART.fullmatch(name)
    return (match[6] if match else None) or ""


def part_shard(name: str) -> Shard | None:
    """The shard of the rank that wrote the part with this name; None if it is not a part's name."""
    match = _PART.fullmatch(name)
    if match is None:
        return None
    first, stop, rank, size = map(int, match.groups()[:4])
    return Shard(first, stop, rank, size) if first < stop and rank < size else None
