# SPDX-License-Identifier: Apache-2.0
"""What a cache looks like, and which part of a model a rank holds."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.setups import Layer, Setup

from pd_connector.kv.geometry import Geometry, Shard, pages_for

HEADS = st.sampled_from([1, 2, 4, 8, 16])
RANKS = st.sampled_from([1, 2, 4, 8, 16])


@given(st.integers(1, 1024), st.integers(0, 100_000))
def test_pages_for_is_the_least_number_that_holds_the_tokens(page_size: int, tokens: int) -> None:
    pages = pages_for(tokens, page_size)
    assert pages * page_size >= tokens
    assert tokens == 0 or (pages - 1) * page_size < tokens


@given(HEADS, RANKS)
def test_ranks_hold_every_head_equally_often(heads: int, ranks: int) -> None:
    shards = [Shard(0, 1, rank, ranks) for rank in range(ranks)]
    held = Counter(head for shard in shards for head in shard.heads(heads))
    assert held == dict.fromkeys(range(heads), max(1, ranks // heads))
    assert {len(shard.heads(heads)) for shard in shards} == {max(1, heads // ranks)}


@given(HEADS, RANKS)
def test_replicas_of_a_head_are_neighbours_and_are_numbered(heads: int, ranks: int) -> None:
    by_heads: dict[range, list[Shard]] = {}
    for rank in range(ranks):
        shard = Shard(0, 1, rank, ranks)
        by_heads.setdefault(shard.heads(heads), []).append(shard)
    for replicas in by_heads.values():
        first = replicas[0].tp_rank
        assert [shard.tp_rank - first for shard in replicas] == list(range(len(replicas)))
        assert [shard.replica(heads) for shard in replicas] == list(range(len(replicas)))
        assert {shard.replicas(heads) for shard in replicas} == {len(replicas)}


def test_a_geometry_does_not_differ_from_its_copy_on_the_wire() -> None:
    model = (Layer(8), Layer(4, window=32), Layer(8))
    for geometry in Setup(2, (0, 2), dtype="fp8_e4m3", scales=(0.5, 2.0)).geometries(model):
        copy = msgspec.msgpack.decode(msgspec.msgpack.encode(geometry), type=Geometry)
        assert copy == geometry
        assert hash(copy) == hash(geometry)


def test_scales_are_found_by_the_layers_number_in_the_model() -> None:
    (group,) = Setup(dtype="fp8_e4m3").geometries((Layer(), Layer()))[0].groups
    moved = msgspec.structs.replace(group, layers=(7, 9), scales=((1.0, 2.0), (3.0, 4.0)))
    assert [moved.scale(7), moved.scale(9)] == [(1.0, 2.0), (3.0, 4.0)]
    assert msgspec.structs.replace(moved, scales=()).scale(9) == (1.0, 1.0)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "other"},
        {"layers": []},
        {"layers": list(range(5000))},
        {"layers": [-1]},
        {"heads": 0},
        {"key_dim": 0},
        {"page_size": 0},
        {"window": -1},
        {"layout": "x" * 129},
        {"scales": [[1.0]]},
        {"table": -1},
        {"more": 1},
    ],
    ids=str,
)
def test_a_peers_geometry_that_cannot_be_is_no_geometry(change: dict[str, object]) -> None:
    plain = msgspec.to_builtins(Setup().geometries((Layer(),))[0])
    assert msgspec.convert(plain, Geometry, strict=True)
    plain["groups"] = [plain["groups"][0] | change]
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(plain, Geometry, strict=True)
