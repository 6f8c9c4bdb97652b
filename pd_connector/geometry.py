# SPDX-License-Identifier: Apache-2.0
"""What a cache looks like, and which part of the model one rank holds. Frozen and pure."""

import msgspec


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The layer range and KV-head range one rank holds, both half open, in model numbering."""

    first_layer: int
    stop_layer: int
    first_head: int
    stop_head: int

    @property
    def layers(self) -> int:
        return self.stop_layer - self.first_layer

    @property
    def heads(self) -> int:
        return self.stop_head - self.first_head


class Geometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's paged cache.

    Attributes:
        shard: the part of the model the rank holds.
        page_size: tokens of a page.
        token_bytes: bytes of one token of one head in one layer, K and V together.
        dtype: element type as the engine names it (`bfloat16`, `fp8_e4m3`, ...).
        layout: name of the order of elements within a page. Pages of unlike layouts differ
            even where all sizes agree.
    """

    shard: Shard
    page_size: int
    token_bytes: int
    dtype: str
    layout: str

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer."""
        return self.shard.heads * self.page_size * self.token_bytes

    def difference(self, other: "Geometry") -> str:
        """Every field in which `other` differs, as `name ours/theirs`; empty when alike."""
        mine, theirs = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        unlike = [name for name in mine if mine[name] != theirs[name]]
        return ", ".join(f"{name} {_show(mine[name])} / {_show(theirs[name])}" for name in unlike)


def pages_for(tokens: int, page_size: int) -> int:
    """Pages of `page_size` tokens that hold `tokens` tokens; the last may be partly filled."""
    return -(-tokens // page_size)


def _show(value: object) -> str:
    if isinstance(value, Shard):
        return (
            f"layers {value.first_layer}-{value.stop_layer} "
            f"heads {value.first_head}-{value.stop_head}"
        )
    return str(value)
