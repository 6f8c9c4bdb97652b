# SPDX-License-Identifier: Apache-2.0
"""A plan carries every page of every layer once, in chunks that fit."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_connector.geometry import Geometry, Shard
from pd_connector.plan import MIN_CHUNK_TOKENS, plan, refusal


@st.composite
def _geometries(draw: st.DrawFn) -> Geometry:
    first_layer, first_head = draw(st.integers(0, 40)), draw(st.integers(0, 8))
    return Geometry(
        shard=Shard(
            first_layer,
            first_layer + draw(st.integers(1, 40)),
            first_head,
            first_head + draw(st.integers(1, 16)),
        ),
        page_size=draw(st.sampled_from([1, 8, 16, 32, 64, 128, 256])),
        token_bytes=draw(st.sampled_from([2, 128, 256, 512, 576])),
        dtype="bfloat16",
        layout="NHD",
    )


@given(
    _geometries(),
    st.integers(0, 50),
    st.integers(0, 300),
    st.floats(1.0, 200.0),
)
def test_every_page_of_every_layer_is_carried_once_in_chunks_that_fit(
    geometry: Geometry, first: int, pages: int, pages_per_slot: float
) -> None:
    slot_bytes = int(geometry.page_bytes * pages_per_slot)
    chunks = plan(geometry, first, first + pages, slot_bytes)
    carried = Counter(
        (layer, page)
        for chunk in chunks
        for layer in range(chunk.first_layer, chunk.stop_layer)
        for page in range(chunk.first_page, chunk.stop_page)
    )
    wanted = {
        (layer, page)
        for layer in range(geometry.shard.layers)
        for page in range(first, first + pages)
    }
    assert set(carried) == wanted
    assert set(carried.values()) <= {1}
    assert [chunk.sequence for chunk in chunks] == list(range(len(chunks)))
    for chunk in chunks:
        size = (chunk.stop_layer - chunk.first_layer) * chunk.pages * geometry.page_bytes
        assert chunk.nbytes(geometry) == size
        assert 0 < size <= slot_bytes


@given(_geometries(), st.integers(1, 300))
def test_chunks_are_no_smaller_than_the_slot_or_the_prompt_makes_them(
    geometry: Geometry, pages: int
) -> None:
    """Of two neighbours in a row of pages or layers, no two would have fitted in one slot."""
    slot_bytes = 4 << 20
    chunks = plan(geometry, 0, pages, slot_bytes)
    total = sum(chunk.nbytes(geometry) for chunk in chunks)
    least = -(-total // slot_bytes)
    enough = min(pages, max(1, MIN_CHUNK_TOKENS // geometry.page_size)) * geometry.page_bytes
    if enough * geometry.shard.layers <= slot_bytes:
        assert len(chunks) <= 2 * least
    for chunk in chunks[:-1]:
        if chunk.stop_page < pages:
            assert (
                chunk.pages * geometry.page_size
                >= min(MIN_CHUNK_TOKENS, slot_bytes // geometry.page_bytes * geometry.page_size)
                - geometry.page_size
            )


def test_no_pages_make_no_chunks() -> None:
    geometry = Geometry(Shard(0, 2, 0, 1), 16, 4, "bfloat16", "NHD")
    assert plan(geometry, 5, 5, 1 << 20) == ()


def test_a_page_that_does_not_fit_in_a_slot_names_the_key_to_raise() -> None:
    geometry = Geometry(Shard(0, 2, 0, 8), 128, 512, "bfloat16", "NHD")
    with pytest.raises(ValueError, match=r"slot of 1024 bytes.*524288; raise slot_mib"):
        plan(geometry, 0, 1, 1024)


def test_caches_that_look_alike_are_not_refused_and_others_are_by_name() -> None:
    geometry = Geometry(Shard(0, 2, 0, 8), 16, 512, "bfloat16", "NHD")
    assert refusal(geometry, geometry) == ""
    other = msgspec.structs.replace(geometry, layout="HND", page_size=32)
    assert "page_size 16 / 32, layout NHD / HND" in refusal(geometry, other)
