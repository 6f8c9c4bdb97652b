# SPDX-License-Identifier: Apache-2.0
"""Names of parts: which rank wrote a part, and in which codec its KV may have passed. Look-ups know no more of a part."""

import functools
import re

from pd_connector.kv.coding import RAW
from pd_connector.kv.geometry import Shard

_PART = re.compile(r"(\d{1,10})-(\d{1,10})\.(\d{1,10})of(\d{1,10})(?:\.([a-z0-9_]+))?")


def part_name(shard: Shard, codec: str = RAW.name) -> str:
    """The name of what this rank writes of each chunk.

    Args:
        codec: the coarsest one in which its KV may have passed. A look-up reads it here, and opens no file.

    >>> part_name(Shard(first_layer=0, stop_layer=32, tp_rank=1, tp_size=2), "int8")
    '0-32.1of2.int8'
    """
    name = f"{shard.first_layer}-{shard.stop_layer}.{shard.tp_rank}of{shard.tp_size}"
    return name if codec == RAW.name else f"{name}.{codec}"


@functools.lru_cache(maxsize=4096)
def part_codec(name: str) -> str:
    """The codec in the name of a part."""
    match = _PART.fullmatch(name)
    return (match[5] if match else None) or RAW.name


def part_shard(name: str) -> Shard | None:
    """The shard of the rank that wrote a part of this name; None if it is no such name."""
    match = _PART.fullmatch(name)
    if match is None:
        return None
    first, stop, rank, size = map(int, match.groups()[:4])
    return Shard(first, stop, rank, size) if first < stop and rank < size else None
