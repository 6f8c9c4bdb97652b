# SPDX-License-Identifier: Apache-2.0
"""A form that passes describes bytes that lie within a part, of heads that its rank holds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.pool_records import GEOMETRY, pages_run

from pd_connector.errors import UnsupportedGeometryError
from pd_connector.kv.geometry import Geometry, Group, Shard
from pd_connector.pool.chunk_layout import (
    PagePlane,
    Run,
    View,
    form_problem,
    kept_layers,
    places,
    wire_run,
)
from pd_connector.pool.part_names import draft_mark, part_codec, part_draft, part_name, part_shard

RUN = pages_run()
BYTES = RUN.planes[0].nbytes
"""A head in a page of 32 tokens: rows of 16 elements, K and then V."""


def group(**fields: Any) -> Geometry:
    """The geometry with another first group."""
    first, *others = GEOMETRY.groups
    return msgspec.structs.replace(
        GEOMETRY, groups=(msgspec.structs.replace(first, **fields), *others)
    )


def run(**fields: Any) -> Run:
    return msgspec.structs.replace(RUN, **fields)


def seen(shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> View:
    return View(0, shape, strides, offset)


def test_the_form_that_others_differ_from_is_one() -> None:
    assert form_problem((RUN,), GEOMETRY) == ""
    assert [place.layer for place in places((RUN,), GEOMETRY)] == [0, 2]


@pytest.mark.parametrize(
    ("geometry", "text"),
    [
        (msgspec.structs.replace(GEOMETRY, shard=Shard(0, 3, 2, 2)), "rank 2 of 2"),
        (msgspec.structs.replace(GEOMETRY, shard=Shard(0, 3, 0, 3)), "whole heads"),
        (group(scales=((1.0, 1.0),)), "scales"),
        (group(scales=((1.0, 1.0),) * 3), "scales"),
    ],
    ids=["no such rank", "parts of heads", "too few scales", "too many scales"],
)
def test_a_geometry_that_cannot_be_is_named(geometry: Geometry, text: str) -> None:
    assert text in form_problem((RUN,), geometry)


@pytest.mark.parametrize(
    ("changed", "geometry", "text"),
    [
        (run(page_size=96, planes=(PagePlane(2, 3 * BYTES),)), group(page_size=96), "pages of 96"),
        (run(key=seen((2, 32, 8), (1024, 512, 16, 1, 1))), GEOMETRY, "strides"),
        (run(key=seen((2, 32, 2, 4), (1024, 512, 16, 4, 1))), GEOMETRY, "4 axes"),
        (run(value=seen((2, 16, 8), (1024, 512, 16, 1))), GEOMETRY, "shape"),
        (
            run(
                key=seen((2, 24, 8), (1024, 512, 16, 1)),
                value=seen((2, 24, 8), (1024, 512, 16, 1), 8),
            ),
            GEOMETRY,
            "shape",
        ),
        (run(key=seen((1, 32, 8), (1024, 512, 16, 1))), GEOMETRY, "shape"),
        (run(key=seen((2, 32, 4), (1024, 512, 16, 1))), GEOMETRY, "dims"),
        (run(planes=(PagePlane(2, 2 * BYTES),)), GEOMETRY, "planes"),
    ],
    ids=[
        "pages that do not divide a chunk",
        "too many strides",
        "four axes",
        "V of other tokens",
        "tokens that do not divide a page",
        "too few heads",
        "too few dims",
        "too many bytes",
    ],
)
def test_a_run_that_does_not_fit_its_cache_is_named(
    changed: Run, geometry: Geometry, text: str
) -> None:
    assert text in form_problem((changed,), geometry)


def test_planes_of_half_elements_are_named_even_if_all_bytes_are_right() -> None:
    halves = (PagePlane(1, BYTES - 1), PagePlane(1, BYTES + 1))
    key = View(1, (2, 32, 8), (BYTES // 2, 0, 8, 1), 0)
    changed = run(planes=halves, key=key, value=key)
    assert "planes" in form_problem((changed,), GEOMETRY)


def test_the_name_of_a_part_is_read_as_it_is_written_and_no_other_is_one() -> None:
    shard = Shard(0, 32, 1, 2)
    assert part_shard(part_name(shard)) == shard
    for codec, draft in (("raw", b"d" * 16), ("int8", b""), ("int8", b"d" * 16)):
        name = part_name(shard, codec, draft)
        assert part_shard(name) == shard
        assert part_codec(name) == codec
        assert part_draft(name) == draft_mark(draft)
        assert len(name) <= 32
    for name in ("0-32.1of2x", "x0-32.1of2", "32-32.1of2", "33-32.1of2", "0-32.2of2", "0-32.1of"):
        assert part_shard(name) is None, name


def test_of_ranks_with_the_same_heads_each_writes_a_share_of_the_layers() -> None:
    one = Group("attention", tuple(range(6)), 2, 8, 8, 32, 0, "bfloat16", "HND", True)
    shares = [kept_layers(Shard(0, 6, rank, 4), one) for rank in range(4)]
    assert shares[0] == (0, 2, 4)
    for first in (0, 2):
        assert sorted(shares[first] + shares[first + 1]) == list(range(6))


def test_pages_of_an_unknown_dtype_that_do_not_divide_a_chunk_are_refused() -> None:
    odd = msgspec.structs.replace(GEOMETRY.groups[0], dtype="odd", page_size=96)
    with pytest.raises(UnsupportedGeometryError, match="--block-size"):
        wire_run((0,), odd, 2)
