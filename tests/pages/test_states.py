# SPDX-License-Identifier: Apache-2.0
"""States between the ranks of two engines: every element of every section arrives where it belongs, and once."""

from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.state_caches import (
    KINDS,
    ORDERS,
    Order,
    Sections,
    StateRank,
    gdn,
    mamba2,
    sections,
    state_ranks,
)

from pd_connector.errors import UnsupportedGeometryError
from pd_connector.kv.geometry import Section, Shard
from pd_connector.pages.paged_cache import PagedCache, StatePages
from pd_connector.plan.chunks import Chunk, plan
from pd_connector.plan.coverage import uncovered
from pd_connector.plan.route import Route, routes

POSITION = 1299
CHUNK_BYTES = 4096


def hand_over(
    sources: Sequence[StateRank],
    destinations: Sequence[StateRank],
    *,
    leave_out: tuple[str, int] | None = None,
) -> Counter[tuple[int, int, str, int]]:
    """Move the states of all ranks to all ranks; counts the units that each rank got.

    Args:
        leave_out: a section that the source with this number does not send.
    """
    got: Counter[tuple[int, int, str, int]] = Counter()
    for i, source in enumerate(sources):
        for j, destination in enumerate(destinations):
            pair = routes(source.geometry, destination.geometry, ("int8", "raw"), ("int8", "raw"))
            for chunk in plan(pair, 0, 0, CHUNK_BYTES, state_token=POSITION):
                route = pair[chunk.route]
                assert route.section is not None
                assert route.codec == "raw"
                if (route.section.name, i) == leave_out:
                    continue
                slot = memoryview(bytearray(chunk.nbytes(route)))
                payload = source.cache.gather(route, chunk, [source.page], slot)
                destination.cache.scatter(route, chunk, [destination.page], payload)
                units = len(route.heads)
                for place in range(chunk.first_layer, chunk.stop_layer):
                    layer, unit = route.layers[place // units], route.heads[place % units]
                    got[j, layer, route.section.name, unit] += 1
    return got


def wanted(destinations: Sequence[StateRank]) -> Counter[tuple[int, int, str, int]]:
    return Counter(
        (j, layer, section.name, unit)
        for j, rank in enumerate(destinations)
        for group in rank.geometry.groups
        for layer in group.layers
        for section in group.sections
        for unit in rank.geometry.shard.heads(section.units)
    )


TP = st.sampled_from([1, 2, 4, 8])
STARTS = st.sampled_from([(0,), (0, 1), (0, 2), (0, 1, 3)])


@given(sections(), TP, TP, STARTS, STARTS, st.sampled_from(ORDERS), st.sampled_from(ORDERS))
@settings(max_examples=60)
def test_every_element_of_every_section_arrives_once(
    kept: Sections,
    ours: int,
    theirs: int,
    starts: tuple[int, ...],
    others: tuple[int, ...],
    order: Order,
    other: Order,
) -> None:
    sources = state_ranks(kept, ours, starts, 4, order)
    destinations = state_ranks(kept, theirs, others, 4, other, page=2)
    for source in sources:
        source.fill()
    assert hand_over(sources, destinations) == wanted(destinations)
    for destination in destinations:
        assert destination.problem() == ""


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_layers_between_orders(kind: str) -> None:
    pairs: list[tuple[Order, Order]] = [("SD", "DS"), ("DS", "SD"), ("apart", "SD"), ("DS", "DS")]
    for order, other in pairs:
        for ours, theirs in ((1, 1), (2, 1), (1, 2), (4, 2), (2, 4)):
            sources = state_ranks(KINDS[kind], ours, (0, 2), 3, order)
            destinations = state_ranks(KINDS[kind], theirs, (0,), 3, other)
            for source in sources:
                source.fill()
            assert hand_over(sources, destinations) == wanted(destinations)
            assert [one.problem() for one in destinations] == [""] * theirs


def test_a_rank_that_leaves_out_a_section_is_found_by_the_elements() -> None:
    sources, destinations = state_ranks(gdn(2, 4), 2, (0,), 2), state_ranks(gdn(2, 4), 1, (0,), 2)
    for source in sources:
        source.fill()
    hand_over(sources, destinations, leave_out=("conv.k", 1))
    assert destinations[0].problem() == "layer 0 conv.k"


def test_a_convolution_cut_as_one_run_is_found_by_the_elements() -> None:
    """As if Q, K and V were one: each rank then sends a run that crosses their borders."""
    kept = gdn(2, 4)
    run = Section("conv.x", 8, 3, 8, "bfloat16")
    sources, destinations = state_ranks(kept, 2, (0,), 1), state_ranks(kept, 1, (0,), 1)
    for source in sources:
        source.fill()
    joined = [_joined(rank, run, kept[3]) for rank in (*sources, *destinations)]
    for source in joined[:2]:
        pair = routes(source.geometry, joined[2].geometry, ("raw",), ("raw",))
        for chunk in plan(pair, 0, 0, CHUNK_BYTES, state_token=1):
            route = pair[chunk.route]
            slot = memoryview(bytearray(chunk.nbytes(route)))
            payload = source.gather(route, chunk, [1], slot)
            joined[2].scatter(route, chunk, [1], payload)
    assert destinations[0].problem() == "layer 0 conv.q"


def _joined(rank: StateRank, run: Section, ssm: Section) -> PagedCache:
    """The rank's cache as if its convolution had one section; in the order SD its sections lie side by side."""
    (group,) = rank.geometry.groups
    (layer,) = rank.layers.values()
    first, units = layer.sections[0], len(rank.geometry.shard.heads(run.units))
    shape, strides = (len(first), units, *first.shape[2:]), first.stride()
    whole = first.as_strided(shape, strides, first.storage_offset())
    geometry = msgspec.structs.replace(
        rank.geometry, groups=(msgspec.structs.replace(group, sections=(run, ssm)),)
    )
    return PagedCache({0: StatePages((whole, layer.sections[3]))}, geometry)


def test_b_and_c_swapped_are_found_by_the_elements() -> None:
    kept = mamba2(8, 2)
    sources, destinations = state_ranks(kept, 1, (0,), 1), state_ranks(kept, 2, (0,), 1)
    sources[0].fill()
    for layer, pages in sources[0].layers.items():
        x, b, c, ssm = pages.sections
        sources[0].layers[layer] = StatePages((x, c, b, ssm))
    sources[0].cache = PagedCache(sources[0].layers, sources[0].geometry)
    hand_over(sources, destinations)
    assert destinations[0].problem() == "layer 0 conv.b"


@given(sections(), TP, TP)
@settings(max_examples=60)
def test_what_a_missing_rank_would_have_brought_is_found(
    kept: Sections, ours: int, theirs: int
) -> None:
    sources = [Shard(0, 3, rank, ours) for rank in range(ours)]
    geometries = [StateRank(shard, range(3), kept).geometry for shard in sources]
    for rank in range(theirs):
        destination = StateRank(Shard(0, 3, rank, theirs), range(3), kept).geometry
        found = [routes(one, destination, ("raw",), ("raw",)) for one in geometries]
        assert uncovered(tuple(found), destination) == ""
        for missing, paths in enumerate(found):
            told = uncovered(tuple(found[:missing] + found[missing + 1 :]), destination)
            gone = {
                f"layer {layer} {route.section.name} unit {unit}"
                for route in paths
                if route.section is not None
                for layer in route.layers
                for unit in route.heads
            }
            assert told in gone if gone else told == ""


def _one(kept: Sections, **shard: int) -> StateRank:
    return StateRank(Shard(0, 2, 0, 1, **shard), range(2), kept)


PLAIN = gdn(2, 4)


def _changed(place: int, **changes: object) -> Sections:
    return tuple(
        msgspec.structs.replace(one, **changes) if n == place else one
        for n, one in enumerate(PLAIN)
    )


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        (_changed(0, rows=5), "rows of conv.q 3 / 5; .*number of speculative tokens"),
        (_changed(2, units=2), "units of conv.v 4 / 2"),
        (_changed(1, dim=4), "dim of conv.k 8 / 4"),
        (
            _changed(3, dtype="bfloat16"),
            "dtype of ssm float32 / bfloat16; states are not converted",
        ),
        (PLAIN[:3], "conv.q, conv.k, conv.v, ssm / conv.q, conv.k, conv.v: must be alike"),
        (_changed(1, name="conv.b"), "sections conv.q, conv.k, .* / conv.q, conv.b"),
    ],
    ids=str,
)
def test_unlike_states_are_refused_with_both_values(theirs: Sections, told: str) -> None:
    ours, other = _one(PLAIN).geometry, msgspec.structs.replace(_one(PLAIN).geometry)
    (group,) = other.groups
    other = msgspec.structs.replace(
        other, groups=(msgspec.structs.replace(group, sections=theirs),)
    )
    with pytest.raises(UnsupportedGeometryError, match=told):
        routes(ours, other, ("raw",), ("raw",))


def test_the_order_of_sections_is_no_matter() -> None:
    source = _one(PLAIN)
    source.fill()
    destination = StateRank(Shard(0, 2, 0, 1), range(2), PLAIN[::-1])
    hand_over([source], [destination])
    by_name = {}
    for section, view in zip(PLAIN[::-1], destination.layers[1].sections, strict=True):
        by_name[section.name] = view[1]
    for section, view in zip(PLAIN, source.layers[1].sections, strict=True):
        assert by_name[section.name].equal(view[1])


@pytest.mark.parametrize(
    ("kept", "told"),
    [
        ((), "sections none"),
        ((PLAIN[0], PLAIN[0]), "conv.q, conv.q.*must differ"),
        ((Section("ssm", 4, 1, 1, "int4"),), "ssm of int4.*must be one of bfloat16"),
        ((Section("ssm", 3, 1, 1, "float32"),), "shares 3 units of a state among 2 ranks"),
    ],
    ids=str,
)
def test_states_that_cannot_be_are_refused(kept: Sections, told: str) -> None:
    geometry = _one(PLAIN).geometry
    (group,) = geometry.groups
    wrong = msgspec.structs.replace(
        geometry,
        shard=Shard(0, 2, 0, 2),
        groups=(msgspec.structs.replace(group, sections=kept),),
    )
    with pytest.raises(UnsupportedGeometryError, match=told):
        routes(wrong, geometry, ("raw",), ("raw",))


def test_views_that_are_not_the_sections_are_refused() -> None:
    rank = _one(PLAIN)
    q, k, v, ssm = rank.layers[0].sections
    for views, told in (((q, k, v), "views of 3 sections"), ((q, k, ssm, v), r"conv.v of layer 0")):
        with pytest.raises(UnsupportedGeometryError, match=told):
            PagedCache({**rank.layers, 0: StatePages(views)}, rank.geometry)


def test_a_page_outside_the_cache_is_refused() -> None:
    rank = _one(PLAIN)
    (route, *_), chunk = _pair(rank)
    slot = memoryview(bytearray(chunk.nbytes(route)))
    for page in (-1, 3):
        with pytest.raises(IndexError, match=f"page {page} of a cache of 3"):
            rank.cache.gather(route, chunk, [page], slot)
        with pytest.raises(IndexError, match=f"page {page} of a cache of 3"):
            rank.cache.scatter(route, chunk, [page], slot)


def _pair(rank: StateRank) -> tuple[tuple[Route, ...], Chunk]:
    pair = routes(rank.geometry, rank.geometry, ("raw",), ("raw",))
    return pair, plan(pair, 0, 0, CHUNK_BYTES, state_token=3)[0]


def test_a_unit_larger_than_a_chunk_says_what_to_do() -> None:
    rank = _one((Section("conv.x", 1, 4, 4096, "float32"),))
    pair = routes(rank.geometry, rank.geometry, ("raw",), ("raw",))
    with pytest.raises(ValueError, match=r"a unit of conv\.x has 65536; raise slot_mib"):
        plan(pair, 0, 0, 32768, state_token=3)
    assert rank.cache.largest_page_bytes == 65536
