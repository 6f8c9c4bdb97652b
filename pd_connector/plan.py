# SPDX-License-Identifier: Apache-2.0
"""Which chunks carry a token range from one shard to another: pure functions.

Both sides compute the plan from the same inputs; a chunk that arrives is checked against it.
"""

import functools
from typing import NamedTuple

from pd_connector.geometry import Geometry

MIN_CHUNK_TOKENS = 128


class Chunk(NamedTuple):
    """Pages [first_page, stop_page) of the prompt in layers [first_layer, stop_layer).

    Pages count from the start of the prompt, layers from the start of the shard. In a slot the
    bytes lie as `[layer][page][page bytes]`: a `verbatim` plan, for caches that look alike.
    """

    sequence: int
    first_layer: int
    stop_layer: int
    first_page: int
    stop_page: int

    @property
    def pages(self) -> int:
        return self.stop_page - self.first_page

    def nbytes(self, geometry: Geometry) -> int:
        return (self.stop_layer - self.first_layer) * self.pages * geometry.page_bytes


def refusal(source: Geometry, destination: Geometry) -> str:
    """Why no plan leads from `source` to `destination`; empty when one does."""
    unlike = source.difference(destination)
    return f"caches must look alike; producer / consumer differ in {unlike}" if unlike else ""


@functools.lru_cache(maxsize=512)
def plan(geometry: Geometry, first_page: int, stop_page: int, slot_bytes: int) -> tuple[Chunk, ...]:
    """Chunks that carry pages [first_page, stop_page) of all layers, in sending order.

    A chunk takes as many layers as leave room for `MIN_CHUNK_TOKENS` tokens in a slot, then as
    many pages as fit. Cached, so that repeated lengths cost nothing.

    Raises:
        ValueError: one page of one layer does not fit in a slot.
    """
    if geometry.page_bytes > slot_bytes:
        raise ValueError(
            f"slot of {slot_bytes} bytes: one page of one layer has {geometry.page_bytes}; "
            "raise slot_mib (config)"
        )
    layers = geometry.shard.layers
    pages = min(max(1, stop_page - first_page), max(1, MIN_CHUNK_TOKENS // geometry.page_size))
    group = max(1, min(layers, slot_bytes // (pages * geometry.page_bytes)))
    per_chunk = slot_bytes // (group * geometry.page_bytes)
    chunks: list[Chunk] = []
    for page in range(first_page, stop_page, per_chunk):
        for layer in range(0, layers, group):
            stop = min(page + per_chunk, stop_page)
            chunks.append(Chunk(len(chunks), layer, min(layer + group, layers), page, stop))
    return tuple(chunks)
