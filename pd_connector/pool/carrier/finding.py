# SPDX-License-Identifier: Apache-2.0
"""Finds how many chunks of a chain a far store has, without asking for each. Pure.

A chunk is put after its parent, and an LRU forgets the end of a chain first. So a store usually has the first chunks of
a chain. Their end is found by doubling steps, then by bisection. If an earlier chunk is missing after all, the load
ends there."""

from collections.abc import Callable, Sequence

_CUTS = 15
"""Places asked for in one call, between the last that is there and the first that is missing."""


def gallop(chunks: int, sizes_of: Callable[[Sequence[int]], Sequence[int]]) -> list[int]:
    """The bytes of each of the first chunks, up to the first missing chunk.

    Args:
        chunks: chunks of the chain.
        sizes_of: returns the bytes of the chunks at these ascending places; 0 for a missing chunk. A chunk that was not
            queried counts as large as the last queried chunk before it.
    """
    hits: dict[int, int] = {}
    first_missing, places = chunks, _doubling(chunks)
    while places:
        for place, size in zip(places, sizes_of(places), strict=True):
            if not size:
                first_missing = place
                break
            hits[place] = size
        last = max(hits, default=-1)
        if last < 0:
            return []
        places = _between(last, first_missing)
    sizes: list[int] = []
    for place in range(first_missing):
        sizes.append(hits[place] if place in hits else sizes[-1])
    return sizes


def _doubling(chunks: int) -> list[int]:
    """0, 1, 3, 7, and the last place."""
    places, place = [], 0
    while place < chunks:
        places.append(place)
        place = 2 * place + 1
    return sorted({*places, chunks - 1}) if chunks else []


def _between(last: int, missing: int) -> list[int]:
    gap = missing - last
    return sorted({last + gap * cut // (_CUTS + 1) for cut in range(1, _CUTS + 1)} - {last})
