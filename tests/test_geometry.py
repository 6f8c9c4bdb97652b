# SPDX-License-Identifier: Apache-2.0
"""What a cache looks like."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_connector.geometry import Geometry, Shard, pages_for

GEOMETRY = Geometry(
    shard=Shard(first_layer=4, stop_layer=8, first_head=2, stop_head=4),
    page_size=16,
    token_bytes=256,
    dtype="bfloat16",
    layout="NHD",
)


def test_sizes_follow_from_the_fields() -> None:
    assert GEOMETRY.shard.layers == 4
    assert GEOMETRY.shard.heads == 2
    assert GEOMETRY.page_bytes == 2 * 16 * 256


@given(st.integers(1, 1024), st.integers(0, 100_000))
def test_pages_for_is_the_least_number_that_holds_the_tokens(page_size: int, tokens: int) -> None:
    pages = pages_for(tokens, page_size)
    assert pages * page_size >= tokens
    assert tokens == 0 or (pages - 1) * page_size < tokens


def test_a_geometry_does_not_differ_from_its_copy_on_the_wire() -> None:
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(GEOMETRY), type=Geometry)
    assert copy == GEOMETRY
    assert GEOMETRY.difference(copy) == ""


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"page_size": 32}, "page_size 16 / 32"),
        ({"token_bytes": 128}, "token_bytes 256 / 128"),
        ({"dtype": "float16"}, "dtype bfloat16 / float16"),
        ({"layout": "HND"}, "layout NHD / HND"),
        ({"shard": Shard(0, 8, 2, 4)}, "shard layers 4-8 heads 2-4 / layers 0-8 heads 2-4"),
        ({"page_size": 32, "dtype": "fp8"}, "page_size 16 / 32, dtype bfloat16 / fp8"),
    ],
)
def test_every_field_in_which_another_differs_is_told(change: dict[str, Any], told: str) -> None:
    assert GEOMETRY.difference(msgspec.structs.replace(GEOMETRY, **change)) == told
