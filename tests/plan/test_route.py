# SPDX-License-Identifier: Apache-2.0
"""Which rank sends what to which: work is shared, and geometries that do not fit are refused."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.setups import LATENT, Layer, Model, Setup, pairs

from pd_connector.errors import UnsupportedGeometryError
from pd_connector.kv.geometry import DRAFT_LAYERS, Geometry, Shard
from pd_connector.plan.coverage import uncovered
from pd_connector.plan.route import Route, meet, routes, served, shared_layers

CODECS = ("fp8_e4m3", "int8", "raw")
MODEL: Model = (Layer(8),) * 4


def table(model: Model, ours: Setup, theirs: Setup) -> dict[tuple[int, int], tuple[Route, ...]]:
    """What passes raw from each rank to each, where anything does."""
    return {
        (i, j): paths
        for i, source in enumerate(ours.geometries(model))
        for j, destination in enumerate(theirs.geometries(model))
        if (paths := routes(source, destination, ("raw",), ("raw",)))
    }


def parts(paths: Sequence[Route]) -> int:
    """Layers times heads."""
    return sum(len(route.layers) * len(route.heads) for route in paths)


SIZES = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16])


@given(SIZES, SIZES, SIZES, st.integers(1, 40))
@settings(max_examples=200)
def test_each_head_of_each_layer_is_sent_once_by_one_of_its_holders(
    heads: int, ours: int, theirs: int, layers: int
) -> None:
    assume(all(heads % tp == 0 or tp % heads == 0 for tp in (ours, theirs)))
    numbers = tuple(range(layers))
    for rank in range(theirs):
        destination = Shard(0, layers, rank, theirs)
        sent = []
        for other in range(ours):
            source = Shard(0, layers, other, ours)
            given_heads = served(source, destination, heads)
            assert set(given_heads) <= set(source.heads(heads))
            shared = shared_layers(source, destination, heads, numbers) if given_heads else ()
            sent += [(layer, head) for layer in shared for head in given_heads]
        assert sorted(sent) == [(n, head) for n in numbers for head in destination.heads(heads)]


@pytest.mark.parametrize("theirs", [1, 2, 4])
def test_all_replicas_of_the_producers_heads_have_a_part(theirs: int) -> None:
    """TP 8 of 2 KV heads has each head four times: all eight ranks' links are used."""
    model = (Layer(2),) * 32
    sent = table(model, Setup(tp=8), Setup(tp=theirs))
    by_rank = [sum(parts(sent.get((i, j), ())) for j in range(theirs)) for i in range(8)]
    wanted = sum(parts(paths) for paths in sent.values())
    assert wanted == 32 * 2 * max(1, theirs // 2)
    assert set(by_rank) == {wanted // 8}


@pytest.mark.parametrize("theirs", [2, 4, 8, 16])
def test_the_consumers_replicas_spread_over_the_producers(theirs: int) -> None:
    model = (Layer(1),) * 8
    sent = table(model, Setup(tp=2), Setup(tp=theirs))
    by_rank = [sum(parts(sent.get((i, j), ())) for j in range(theirs)) for i in range(2)]
    assert by_rank == [4 * theirs, 4 * theirs]


def test_mla_layers_of_eight_like_ranks_are_shared_among_them() -> None:
    sent = table((LATENT,) * 16, Setup(tp=8), Setup())
    layers = [sent[i, 0][0].layers for i in range(8)]
    assert layers == [(2 * i, 2 * i + 1) for i in range(8)]


def test_equal_ranks_of_equal_engines_talk_one_to_one() -> None:
    setup = Setup(tp=4, starts=(0, 2))
    sent = table(MODEL, setup, setup)
    assert set(sent) == {(i, i) for i in range(8)}
    assert all(route.verbatim for paths in sent.values() for route in paths)


@given(pairs())
def test_what_a_missing_rank_would_have_brought_is_found(pair: tuple[Model, Setup, Setup]) -> None:
    model, ours, theirs = pair
    for destination in theirs.geometries(model):
        found = [routes(source, destination, CODECS, CODECS) for source in ours.geometries(model)]
        assert uncovered(tuple(found), destination) == ""
        for missing, paths in enumerate(found):
            told = uncovered(tuple(found[:missing] + found[missing + 1 :]), destination)
            gone = {
                f"layer {layer} head {head}"
                for route in paths
                for layer in route.layers
                for head in route.heads
            }
            assert told in gone if gone else told == ""


def test_layers_of_a_draft_that_nobody_brings_are_found() -> None:
    (plain,) = Setup().geometries(MODEL)
    groups = [
        msgspec.structs.replace(group, layers=(*group.layers, DRAFT_LAYERS))
        for group in plain.groups
    ]
    drafting = msgspec.structs.replace(plain, groups=tuple(groups))
    found = routes(plain, drafting, CODECS, CODECS)
    assert uncovered((found,), drafting) == f"layer {DRAFT_LAYERS} head 0"
    assert uncovered((found,), plain) == ""


def test_ranks_of_another_stage_or_of_other_heads_need_not_be_asked() -> None:
    own = Shard(0, 16, 0, 2)
    assert meet(Shard(0, 32, 0, 2), own, [8])
    assert not meet(Shard(16, 32, 0, 2), own, [8])
    assert not meet(Shard(0, 32, 1, 2), own, [8])
    assert meet(Shard(15, 32, 1, 4), own, [8])


@pytest.mark.parametrize(
    ("ours", "theirs", "verbatim"),
    [
        (Setup(), Setup(), True),
        (Setup(layout="NHD"), Setup(layout="NHD"), True),
        (Setup(), Setup(tp=2), True),
        (Setup(tp=8), Setup(tp=2), True),
        (Setup(layout="NHD"), Setup(layout="NHD", tp=2), False),
        (Setup(), Setup(layout="NHD"), False),
        (Setup(layout=""), Setup(layout=""), False),
        (Setup(), Setup(page_sizes=(32,)), False),
        (Setup(), Setup(dtype="float16"), False),
        (Setup(dtype="fp8_e4m3"), Setup(dtype="fp8_e4m3"), True),
        (Setup(dtype="fp8_e4m3", scales=(2.0, 1.0)), Setup(dtype="fp8_e4m3"), False),
        (Setup(), Setup(starts=(0, 2)), True),
    ],
    ids=str,
)
def test_whole_pages_pass_where_they_are_the_same_bytes(
    ours: Setup, theirs: Setup, verbatim: bool
) -> None:
    source, destination = ours.geometries(MODEL)[0], theirs.geometries(MODEL)[0]
    (route,) = routes(source, destination, ("raw",), ("raw",))
    assert route.codec == "raw"
    assert route.verbatim is verbatim


def test_a_codec_that_both_permit_comes_before_whole_pages() -> None:
    (source,) = Setup().geometries(MODEL)
    (route,) = routes(source, source, ("int8", "raw"), CODECS)
    assert (route.codec, route.verbatim) == ("int8", False)
    assert routes(source, source, ["raw"], CODECS)[0].verbatim


@pytest.mark.parametrize(("dtype", "error_of"), [("bfloat16", "int8"), ("fp8_e4m3", "raw")])
def test_a_codec_adds_no_error_to_what_an_fp8_cache_would_store(dtype: str, error_of: str) -> None:
    (source,), (destination,) = Setup().geometries(MODEL), Setup(dtype=dtype).geometries(MODEL)
    (route,) = routes(source, destination, ("int8", "raw"), ("int8", "raw"))
    assert route.error_of == error_of


def test_routes_are_made_once() -> None:
    source, destination = Setup().geometries(MODEL)[0], Setup(tp=2).geometries(MODEL)[1]
    assert routes(source, destination, ["raw"], CODECS) is routes(
        source, destination, ("raw",), list(CODECS)
    )


def changed(geometry: Geometry, **fields: Any) -> Geometry:
    group = msgspec.structs.replace(geometry.groups[0], **fields)
    return msgspec.structs.replace(geometry, groups=(group,))


(ONE,) = Setup().geometries(MODEL)


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [
        ({}, {"kind": "latent"}, "layers 0-3.*kind attention / latent"),
        ({}, {"heads": 4}, "heads 8 / 4"),
        ({"key_dim": 64}, {}, "key_dim 64 / 8"),
        ({}, {"value_dim": 16}, "value_dim 8 / 16"),
        ({"interleave": 16, "state_tokens": 4}, {"state_tokens": 2}, "state_tokens 4 / 2"),
        ({"window": 64}, {}, "window of 64 tokens, consumer wants all.*hybrid KV cache manager"),
        ({"window": 64}, {"window": 65}, "window of 64 tokens, consumer wants 65"),
        ({"dtype": "nvfp4"}, {}, "cache dtype nvfp4 / bfloat16.*fp8_e4m3"),
        ({}, {"dtype": "nvfp4"}, "cache dtype bfloat16 / nvfp4"),
        ({"dtype": "nvfp4"}, {"dtype": "nvfp4", "page_size": 32}, "page size 16 / 32"),
        ({"dtype": "nvfp4", "layout": "a"}, {"dtype": "nvfp4", "layout": "b"}, "layout a / b"),
        ({"heads": 3}, {"heads": 3}, None),
        ({"scales": ((1.0, 1.0),)}, {}, "producer has 1 scales for 4 layers"),
        ({}, {"scales": ((1.0, 1.0),)}, "consumer has 1 scales for 4 layers"),
        (
            {},
            {"dtype": "fp8_e4m3", "scales": ((1.0, 0.0),) * 4},
            r"consumer has scales.*1.0, 0.0.*above 0",
        ),
        ({"dtype": "fp8_e4m3", "scales": ((-1.0, 1.0),) * 4}, {}, r"producer has scales.*-1.0"),
        (
            {"dtype": "fp8_e4m3", "scales": ((1.0, float("nan")),) * 4},
            {},
            "producer has scales.*nan",
        ),
        ({"dtype": "fp8_e4m3"}, {"scales": ((1.0, float("inf")),) * 4}, "consumer has scales.*inf"),
    ],
    ids=str,
)
def test_what_cannot_be_brought_together_is_told_with_both_sides_values(
    ours: dict[str, Any], theirs: dict[str, Any], told: str | None
) -> None:
    source, destination = changed(ONE, **ours), changed(ONE, **theirs)
    if told is None:
        assert routes(source, destination, CODECS, CODECS)
        return
    with pytest.raises(UnsupportedGeometryError, match=told):
        routes(source, destination, CODECS, CODECS)


@pytest.mark.parametrize(
    ("shard", "told"),
    [
        (Shard(0, 4, 2, 2), "producer is rank 2 of 2"),
        (Shard(0, 4, 0, 3), "producer shares 8 KV heads among 3 ranks"),
        (Shard(0, 4, 0, 12), "producer shares 8 KV heads among 12 ranks"),
    ],
    ids=str,
)
def test_a_rank_that_cannot_be_is_refused(shard: Shard, told: str) -> None:
    with pytest.raises(UnsupportedGeometryError, match=told):
        routes(msgspec.structs.replace(ONE, shard=shard), ONE, CODECS, CODECS)
    swapped = told.replace("producer", "consumer")
    with pytest.raises(UnsupportedGeometryError, match=swapped):
        routes(ONE, msgspec.structs.replace(ONE, shard=shard), CODECS, CODECS)


def test_a_layer_in_two_groups_is_refused() -> None:
    """Two routes would write its pages twice."""
    twice = msgspec.structs.replace(ONE, groups=(ONE.groups[0], ONE.groups[0]))
    with pytest.raises(UnsupportedGeometryError, match="consumer has layer 0 twice"):
        routes(ONE, twice, CODECS, CODECS)


def test_heads_of_pages_that_nobody_can_read_are_not_taken_apart() -> None:
    model = (Layer(8),) * 2
    ours, theirs = Setup(tp=1).geometries(model)[0], Setup(tp=2).geometries(model)[1]
    opaque = {"dtype": "nvfp4", "layout": "x", "value_dim": 0}
    apart = routes(changed(ours, **opaque), changed(theirs, **opaque), CODECS, CODECS)
    assert all(route.verbatim for route in apart)
    dense = opaque | {"heads_apart": False}
    with pytest.raises(UnsupportedGeometryError, match=r"nvfp4.*8 / 4 heads"):
        routes(changed(ours, **dense), changed(theirs, **dense), CODECS, CODECS)
