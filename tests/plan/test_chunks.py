# SPDX-License-Identifier: Apache-2.0
"""Every element a consumer wants arrives once, from some rank, in chunks that fit."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.setups import LATENT, Layer, Model, Setup, pairs

from pd_connector.kv.geometry import Geometry, Group, Section, Shard, pages_for, state_group
from pd_connector.plan.chunks import Chunk, chunk_limit, plan, planes
from pd_connector.plan.coverage import uncovered
from pd_connector.plan.route import Route, meet, routes
from pd_connector.plan.rules import NEWEST_RULES, PlanRules
from pd_connector.plan.sizes import bytes_per_token, layer_bytes, page_part_bytes

CODECS = ("fp8_e4m3", "int8", "raw")
MIB = 1 << 20

Counts = dict[int, npt.NDArray[np.int64]]


class Request(NamedTuple):
    """Tokens [first, stop) of a prompt are wanted."""

    first: int
    stop: int


@st.composite
def requests(draw: st.DrawFn) -> Request:
    stop = draw(st.integers(1, 400))
    return Request(draw(st.integers(0, stop - 1)), stop)


def kept_from(group: Group, stop: int) -> int:
    """The first token that a group's window still needs when token `stop` comes."""
    return max(0, stop - group.window + 1) if group.window else 0


def least_chunk(paths: Iterable[Route]) -> int:
    """Bytes that a chunk must have to hold one token, or one page, of one layer."""
    return max((page_part_bytes(route) + 4096 for route in paths), default=1)


def arrivals(paths: Sequence[Route], chunks: Sequence[Chunk], destination: Geometry) -> Counts:
    """How often each `[head, token]` of each layer is written by these chunks.

    Heads are counted as in the destination's cache, tokens are those of 2,048.
    """
    written = {
        layer: np.zeros((len(destination.heads(group)), 2048), np.int64)
        for group in destination.groups
        for layer in group.layers
    }
    for chunk in chunks:
        route = paths[chunk.route]
        heads = slice(route.destination_head, route.destination_head + len(route.heads))
        first, stop = chunk.first_token, chunk.stop_token
        if chunk.verbatim:
            size = route.destination.page_size
            first, stop = first // size * size, pages_for(stop, size) * size
        for layer in chunk.layers(route):
            written[layer][heads, first:stop] += 1
    return written


def assert_sent_by_its_holder(route: Route, source: Geometry, request: Request) -> None:
    assert route.source in source.groups
    assert set(route.layers) <= set(route.source.layers) & set(route.destination.layers)
    own = source.heads(route.source)
    assert own[route.source_head : route.source_head + len(route.heads)] == route.heads
    size, first = route.source.page_size, route.first_token(*request)
    # Pages that lie before the producer's window are given up.
    assert first // size >= kept_from(route.source, request.stop) // size


Meddle = Callable[[tuple[Chunk, ...]], Sequence[Chunk]]


def assert_exact(
    pair: tuple[Model, Setup, Setup],
    request: Request,
    accepted: tuple[str, ...],
    tightness: int,
    meddle: Meddle = lambda chunks: chunks,
    rules: PlanRules = NEWEST_RULES,
) -> bool:
    """Every rank of the consumer gets what it wants, once, and nothing else.

    Args:
        tightness: pages of one layer for which a chunk has room.
        meddle: changes what each producer rank sends.
        rules: by which both sides plan.

    Returns:
        Whether whole pages passed.
    """
    model, ours, theirs = pair
    any_whole = False
    for destination in theirs.geometries(model):
        heads = {group.heads for group in destination.groups}
        asked = [s for s in ours.geometries(model) if meet(s.shard, destination.shard, heads)]
        known = tuple(routes(source, destination, CODECS, accepted, rules) for source in asked)
        assert uncovered(known, destination) == ""
        total: Counts = {}
        whole: set[int] = set()
        for source, paths in zip(asked, known, strict=True):
            chunk_bytes = least_chunk(paths) * tightness
            chunks = meddle(plan(paths, *request, chunk_bytes))
            assert [chunk.sequence for chunk in chunks] == list(range(len(chunks)))
            for route in paths:
                assert_sent_by_its_holder(route, source, request)
            for chunk in chunks:
                route = paths[chunk.route]
                assert chunk.tokens > 0
                assert chunk.layers(route)
                assert 0 < chunk.nbytes(route) <= chunk_bytes
                if chunk.verbatim:
                    whole.update(chunk.layers(route))
            for layer, counts in arrivals(paths, chunks, destination).items():
                total[layer] = total.get(layer, 0) + counts
        for group in destination.groups:
            for layer in group.layers:
                assert_only_wanted(total[layer], group, request, layer in whole)
        any_whole |= bool(whole)
    return any_whole


def assert_only_wanted(
    counts: npt.NDArray[np.int64], group: Group, request: Request, whole: bool
) -> None:
    first = max(request.first, kept_from(group, request.stop))
    assert (counts[:, first : request.stop] == 1).all(), "wanted, once"
    spare = counts.copy()
    spare[:, first : request.stop] = 0
    if whole:
        # The rest of the first and the last page may come with them.
        size = group.page_size
        begin, end = first // size * size, pages_for(request.stop, size) * size
        assert spare.max() <= 1
        spare[:, max(request.first, begin) : first] = 0
        spare[:, request.stop : end] = 0
    assert not spare.any(), "nothing else, above all nothing the consumer has"


@given(
    pairs(),
    requests(),
    st.sampled_from([CODECS, ("int8", "raw"), ("raw",)]),
    st.integers(1, 40),
    st.sampled_from([1, 2000, NEWEST_RULES.spare_bytes]),
)
@settings(max_examples=300)
def test_every_wanted_element_arrives_once_and_no_other_does(
    pair: tuple[Model, Setup, Setup],
    request: Request,
    accepted: tuple[str, ...],
    tightness: int,
    spare_bytes: int,
) -> None:
    rules = replace(NEWEST_RULES, spare_bytes=spare_bytes)
    event(f"whole pages: {assert_exact(pair, request, accepted, tightness, rules=rules)}")


@pytest.mark.parametrize(
    "meddle",
    [
        lambda chunks: chunks[:-1],
        lambda chunks: (*chunks, chunks[0]._replace(sequence=len(chunks))),
        lambda chunks: (chunks[0]._replace(first_token=32), *chunks[1:]),
        lambda chunks: (*chunks[:-1], chunks[-1]._replace(stop_token=130)),
        lambda chunks: (*chunks[:-1], chunks[-1]._replace(stop_layer=1)),
        lambda chunks: chunks[::-1],
    ],
    ids=["lost", "twice", "too early", "too late", "layers", "order"],
)
@pytest.mark.parametrize("page_size", [16, 32])
def test_a_wrong_plan_would_be_noticed(meddle: Meddle, page_size: int) -> None:
    pair = (Layer(),) * 3, Setup(), Setup(tp=2, page_sizes=(page_size,))
    request = Request(48, 100)
    assert_exact(pair, request, ("raw",), 2)
    with pytest.raises(AssertionError):
        assert_exact(pair, request, ("raw",), 2, meddle)


@given(pairs(), requests(), st.data())
def test_a_rank_that_is_not_asked_would_send_nothing(
    pair: tuple[Model, Setup, Setup], request: Request, data: st.DataObject
) -> None:
    model, ours, theirs = pair
    destination = data.draw(st.sampled_from(theirs.geometries(model)))
    heads = {group.heads for group in destination.groups}
    for source in ours.geometries(model):
        if not meet(source.shard, destination.shard, heads):
            assert routes(source, destination, CODECS, CODECS) == ()


@given(pairs(), requests(), st.integers(16, 64), st.none() | st.floats(1e5, 1e10))
@settings(max_examples=150)
def test_a_slot_that_holds_a_page_of_a_layer_always_suffices(
    pair: tuple[Model, Setup, Setup], request: Request, slot_pages: int, rate: float | None
) -> None:
    """Whatever the link and the prompt, `chunk_limit` gives what `plan` can work with."""
    model, ours, theirs = pair
    for source in ours.geometries(model)[:2]:
        for destination in theirs.geometries(model)[:2]:
            paths = routes(source, destination, CODECS, CODECS)
            slot_bytes = least_chunk(paths) * slot_pages
            limit = chunk_limit(paths, request.stop - request.first, slot_bytes, rate)
            assert 0 < limit <= slot_bytes
            for chunk in plan(paths, *request, limit):
                assert chunk.nbytes(paths[chunk.route]) <= limit


@given(pairs(), requests(), st.integers(1, 20))
def test_blocks_lie_side_by_side_and_fill_the_payload(
    pair: tuple[Model, Setup, Setup], request: Request, tightness: int
) -> None:
    model, ours, theirs = pair
    paths = routes(ours.geometries(model)[0], theirs.geometries(model)[0], CODECS, CODECS)
    for chunk in plan(paths, *request, least_chunk(paths) * tightness):
        if chunk.verbatim:
            continue
        route, end = paths[chunk.route], 0
        seen = []
        for plane in planes(route, chunk):
            assert plane.offset == end
            assert plane.shape[:2] == (len(route.heads), chunk.tokens)
            seen.append((plane.layer, plane.part))
            end += plane.nbytes
        assert end == chunk.nbytes(route)
        assert (
            len(set(seen))
            == len(seen)
            == len(chunk.layers(route)) * (2 if route.source.value_dim else 1)
        )


@given(pairs(), requests(), st.integers(1, 20))
def test_chunks_are_sent_by_token_and_then_by_layer(
    pair: tuple[Model, Setup, Setup], request: Request, tightness: int
) -> None:
    """What a prefill computes first goes first, and both sides number alike."""
    model, ours, theirs = pair
    paths = routes(ours.geometries(model)[0], theirs.geometries(model)[0], CODECS, CODECS)
    chunks = plan(paths, *request, least_chunk(paths) * tightness)
    assert chunks == plan(paths, *request, least_chunk(paths) * tightness)
    order = [(chunk.first_token, chunk.route, chunk.first_layer) for chunk in chunks]
    # The first chunk is cut into pieces, which go first even where they are of several tokens.
    rest = order[1 + NEWEST_RULES.edge_cuts * (NEWEST_RULES.edge_pieces - 1) :]
    assert rest == sorted(rest)


def one_route(
    model: Model, ours: Setup, theirs: Setup, accepted: tuple[str, ...] = ("raw",)
) -> tuple[Route, ...]:
    paths = routes(ours.geometries(model)[0], theirs.geometries(model)[0], CODECS, accepted)
    assert len(paths) == 1
    return paths


PIECES = 2 * NEWEST_RULES.edge_cuts * (NEWEST_RULES.edge_pieces - 1)
"""More chunks than there were, where the first and the last are cut up."""

LLAMA_8B: Model = (Layer(8, 128, 128),) * 32
WAYS = {
    "whole pages": (Setup(), Setup(), ("raw",)),
    "other page size": (Setup(), Setup(page_sizes=(128,)), ("raw",)),
    "fp8": (Setup(), Setup(), CODECS),
    "int8": (Setup(), Setup(), ("int8", "raw")),
    "to an fp8 cache": (Setup(), Setup(dtype="fp8_e4m3"), ("raw",)),
    "half the heads": (Setup(), Setup(tp=2), ("raw",)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tokens", [512, 2000, 8192, 8191])
def test_chunks_of_a_usual_model_are_long_and_few(way: str, tokens: int) -> None:
    paths = one_route(LLAMA_8B, *WAYS[way])
    limit = chunk_limit(paths, tokens, 16 * MIB, None)
    chunks = plan(paths, 0, tokens, limit)
    total = sum(chunk.nbytes(paths[0]) for chunk in chunks)
    assert len(chunks) <= max(16, 1.1 * total / limit + 1) + PIECES
    assert len(chunks) <= 70 + PIECES
    assert all(c.tokens >= NEWEST_RULES.min_chunk_tokens for c in chunks if c.stop_token < tokens)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("tokens", [1, 10, 100])
def test_a_short_prompt_is_a_few_chunks_whatever_the_page_size(page_size: int, tokens: int) -> None:
    for theirs in (Setup(page_sizes=(page_size,)), Setup(page_sizes=(2 * page_size,))):
        paths = one_route(LLAMA_8B, Setup(page_sizes=(page_size,)), theirs)
        limit = chunk_limit(paths, tokens, 16 * MIB, None)
        chunks = plan(paths, 0, tokens, limit)
        sent = sum(chunk.nbytes(paths[0]) for chunk in chunks)
        assert len(chunks) <= max(8, 2 * sent / limit + 1) + PIECES


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("page_size", "tokens", "sent"),
    [(128, 1000, 1000), (128, 100, 100), (16, 8190, 8190), (16, 8191, 8192)],
)
def test_a_last_page_passes_as_its_tokens_where_that_spares_much(
    page_size: int, tokens: int, sent: int, streamed: bool
) -> None:
    alike = Setup(page_sizes=(page_size,))
    paths = one_route(LLAMA_8B, alike, alike)
    chunks = plan(paths, 0, tokens, 4 * MIB, streamed=streamed)
    assert sum(chunk.nbytes(paths[0]) for chunk in chunks) == sent * 32 * 8 * 256 * 2
    last = [chunk for chunk in chunks if not chunk.verbatim]
    assert bool(last) == (sent == tokens)
    assert all(chunk.first_token == tokens // page_size * page_size for chunk in last)


@pytest.mark.parametrize(("page_size", "tokens"), [(1056, 3499), (96, 3499), (32, 31)])
def test_beside_states_no_unwanted_tokens_pass(page_size: int, tokens: int) -> None:
    """Pages are as large as states there: a whole last page from each pipeline stage made a sixth of a small model's bytes."""
    (kv,) = Setup(page_sizes=(page_size,)).geometries((Layer(2, 32, 32),))[0].groups
    state = state_group((1,), (Section("ssm", 4, 128, 128, "float32"),), table=1)
    for groups, sent in (((kv,), -(-tokens // page_size) * page_size), ((kv, state), tokens)):
        rank = Geometry(Shard(0, 2, 0, 1), groups)
        paths = routes(rank, rank, CODECS, ("raw",))
        chunks = plan(paths, 0, tokens, 4 * MIB, state_token=tokens)
        of_kv = [chunk for chunk in chunks if paths[chunk.route].section is None]
        assert sum(chunk.nbytes(paths[chunk.route]) for chunk in of_kv) == sent * 2 * 64 * 2


@pytest.mark.parametrize(
    ("way", "limit_bytes", "tokens"),
    [
        ("whole pages", 256 * 4096, 256),
        ("whole pages", 160 * 4096, 128),
        ("other page size", 40_000, 8),
    ],
)
def test_chunks_have_half_of_their_tokens_until_one_layer_fits(
    way: str, limit_bytes: int, tokens: int
) -> None:
    """A token of one layer has 4,096 bytes."""
    paths = one_route((Layer(8, 128, 128),), *WAYS[way])
    chunks = plan(paths, 0, 2048, limit_bytes, streamed=True)
    assert max(chunk.tokens for chunk in chunks) == tokens, "but for the pieces at the edges"


def test_a_slow_link_has_smaller_chunks_and_a_fast_one_whole_slots() -> None:
    paths = one_route(LLAMA_8B, Setup(), Setup())
    limits = [chunk_limit(paths, 8192, 16 * MIB, rate) for rate in (1e6, 1e8, 1e9, 1e11)]
    assert limits == sorted(limits)
    assert limits[0] >= NEWEST_RULES.min_chunk_tokens * 4096
    assert limits[-1] == 16 * MIB


def test_chunks_that_are_read_are_small_enough_for_a_processors_cache() -> None:
    paths = one_route(LLAMA_8B, Setup(), Setup())
    assert chunk_limit(paths, 8192, 16 * MIB, None, read=True) == 4 * MIB
    assert chunk_limit(paths, 8192, 16 * MIB, 1e6, read=True) < 4 * MIB, "the link is slower"
    assert chunk_limit(paths, 8192, 16 * MIB, None, read=True, direct=True) == 8 * MIB, "in pages"
    unlike = one_route(LLAMA_8B, Setup(), Setup(page_sizes=(128,)))
    assert chunk_limit(unlike, 8192, 16 * MIB, None, read=True, direct=True) == 4 * MIB
    huge = one_route((Layer(8, 8192, 8192),), Setup(), Setup())
    assert (
        chunk_limit(huge, 8192, 64 * MIB, None, read=True)
        == NEWEST_RULES.min_chunk_tokens * 8 * 2 * 2 * 8192
    )


def test_bytes_per_token_are_those_of_all_layers_and_tell_the_codec() -> None:
    raw = bytes_per_token(one_route(LLAMA_8B, Setup(), Setup()))
    assert raw == 32 * 8 * 256 * 2
    assert 0.5 < bytes_per_token(one_route(LLAMA_8B, Setup(), Setup(), CODECS)) / raw < 0.53


def test_tokens_that_the_window_has_left_behind_are_not_sent() -> None:
    model = (Layer(8), Layer(8, window=64))
    paths = routes(
        Setup().geometries(model)[0], Setup(page_sizes=(32,)).geometries(model)[0], CODECS, ("raw",)
    )
    chunks = plan(paths, 0, 1000, MIB)
    first = dict.fromkeys(range(2), 1000)
    for chunk in chunks:
        for layer in chunk.layers(paths[chunk.route]):
            first[layer] = min(first[layer], chunk.first_token)
    assert first == {0: 0, 1: 1000 - 64 + 1}


def test_a_prefix_that_ends_within_a_page_is_not_written_over() -> None:
    paths = one_route((Layer(),), Setup(), Setup())
    assert all(chunk.verbatim for chunk in plan(paths, 32, 100, MIB))
    within = plan(paths, 33, 100, MIB)
    assert within[0].first_token == 33
    assert not any(chunk.verbatim for chunk in within)


def test_a_window_of_one_token_needs_nothing_of_a_prompt() -> None:
    paths = one_route((Layer(window=1),), Setup(), Setup(page_sizes=(32,)))
    assert plan(paths, 0, 100, MIB) == ()


def test_a_page_that_does_not_fit_in_a_chunk_names_the_key_to_raise() -> None:
    paths = one_route((Layer(8, 256, 256),), Setup(page_sizes=(128,)), Setup(page_sizes=(128,)))
    with pytest.raises(ValueError, match=r"chunk of 1024 bytes.*1048576; raise slot_mib"):
        plan(paths, 0, 128, 1024)


def test_pages_of_an_unknown_dtype_are_refused_within_a_page() -> None:
    ours = Setup().geometries((Layer(),))[0]
    opaque = msgspec.structs.replace(
        ours, groups=(msgspec.structs.replace(ours.groups[0], dtype="nvfp4", value_dim=0),)
    )
    paths = routes(opaque, opaque, CODECS, CODECS)
    assert all(chunk.verbatim for chunk in plan(paths, 16, 100, MIB))
    assert layer_bytes(paths[0], 100) == 100 * len(paths[0].heads) * opaque.groups[0].key_dim
    with pytest.raises(ValueError, match=r"token 17 is inside a page.*nvfp4"):
        plan(paths, 17, 100, MIB)


def test_mla_spreads_one_request_over_all_ranks_of_the_producer() -> None:
    model = (LATENT,) * 61
    (destination,) = Setup().geometries(model)
    sent = [
        sum(c.nbytes(paths[c.route]) for c in plan(paths, 0, 1000, MIB))
        for source in Setup(tp=8).geometries(model)
        if (paths := routes(source, destination, CODECS, ("raw",)))
    ]
    assert len(sent) == 8
    assert max(sent) <= 1.15 * min(sent)
