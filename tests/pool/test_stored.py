# SPDX-License-Identifier: Apache-2.0
"""What any engine wrote, any other engine reads: every element bit for bit, and nothing else is touched.

Where each element lies is told by `support.caches`; no view is trusted.
"""

import random
from dataclasses import replace

import msgspec
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.caches import LAYOUTS, ON_THE_HOST, Rank
from support.filled import bits, converted, ranks, snapshot
from support.pool_ranks import fill_all, read, write
from support.pool_reads import (
    MODEL,
    READERS,
    TOKENS,
    WRITERS,
    Opaque,
    after_windows,
    arrives,
    assert_loaded,
    assert_right,
    by_kernels,
    opaque,
    readings,
    writers,
)
from support.pool_records import FACTS, mutated, summed
from support.setups import LATENT, Layer, Model, Setup, pairs

from pd_connector.codec import DTYPES
from pd_connector.errors import Miss, PoolError, UnsupportedGeometryError
from pd_connector.kv.geometry import Geometry, Group, Shard
from pd_connector.pool.copy_plan import plan_load, plan_save
from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.pool.record import HEADER, decode, read_header
from pd_connector.pool.stored import describe


def pass_through(model: Model, ours: Setup, theirs: Setup, number: int = 1) -> None:
    """One chunk, from the ranks of one engine to those of the other."""
    sources = ranks(model, ours, TOKENS, 1)
    dense = fill_all(sources, TOKENS, 2)
    files = write(sources, number)
    for rank in ranks(model, theirs, TOKENS, 3):
        before = snapshot(rank)
        read(rank, files, number, (0, TOKENS))
        chunk = slice(number * CHUNK_TOKENS, (number + 1) * CHUNK_TOKENS)
        assert_loaded(rank, before, dense, dict.fromkeys(rank.groups, chunk))


@pytest.mark.parametrize("ours", WRITERS, ids=str)
@pytest.mark.parametrize("theirs", READERS, ids=str)
def test_any_engine_reads_what_any_other_wrote(ours: Setup, theirs: Setup) -> None:
    pass_through(MODEL, ours, theirs)


@pytest.mark.parametrize("layout", [*LAYOUTS, *ON_THE_HOST])
def test_a_layout_is_read_alike_by_heads_and_by_any_other(layout: str) -> None:
    ours = Setup(page_sizes=(32,), layout=layout)
    for theirs in (ours, replace(ours, tp=2), Setup(page_sizes=(64,), layout="NHD")):
        pass_through(MODEL, ours, theirs)
        pass_through(MODEL, theirs, ours, 2)


@given(pairs(), st.data())
@settings(max_examples=40, deadline=None)
def test_of_a_chunk_exactly_what_may_be_written_and_is_held_arrives(
    pair: tuple[Model, Setup, Setup], data: st.DataObject
) -> None:
    """The writer's windows have passed some pages when it saves. The reader has some pages already, and its windows
    want only the last ones."""
    model, ours, theirs = pair
    ours, theirs = (
        replace(ours, windows=data.draw(st.booleans())),
        replace(theirs, dtype=ours.dtype),
    )
    wants = data.draw(readings(), "reading")
    sources = writers(model, ours)
    dense = fill_all(sources, TOKENS, 2)
    tables = [after_windows(rank, wants.computed) for rank in sources]
    files = write(sources, wants.number, tables)
    for rank in ranks(model, theirs, TOKENS, 3):
        event(f"loaded: {arrives(rank, files, wants, dense, model, ours)}")


@pytest.mark.parametrize("gone", [(), (0, 1), (3,), (1, 4)])
@pytest.mark.parametrize("pages", [16, 32, 96])
@pytest.mark.parametrize("layout", ["HND", "NHD in parts", ""])
def test_kernels_move_chunks_as_the_host_does_around_pages_that_must_not_be_written(
    gone: tuple[int, ...], pages: int, layout: str
) -> None:
    """No page -1 reaches `PagedCache.scatter`, which would refuse it, and a kernel would write before the cache."""
    pytest.importorskip("triton")
    model = Layer(4, 8, 8), Layer(2, 4, 4)
    ours, theirs = Setup(page_sizes=(32,), layout=layout), Setup(page_sizes=(pages,), layout=layout)
    (source,) = ranks(model, ours, TOKENS, 1)
    dense = fill_all([source], TOKENS, 2)
    files = write([source], 1)
    source.cache = by_kernels(source.cache)
    assert write([source], 1) == files
    (rank,) = ranks(model, theirs, TOKENS, 3)
    rank.cache = by_kernels(rank.cache)
    before, own = snapshot(rank), [list(table) for table in rank.tables]
    for group in rank.geometry.groups:
        for page in gone:
            own[group.table][min(CHUNK_TOKENS // pages + page, len(own[0]) - 1)] = -1
    read(rank, files, 1, (0, TOKENS), own)
    assert_right(
        rank, before, dense, dict.fromkeys(rank.groups, range(CHUNK_TOKENS, 2 * CHUNK_TOKENS)), own
    )


@pytest.mark.parametrize("ours", list(DTYPES))
@pytest.mark.parametrize("theirs", list(DTYPES))
@pytest.mark.parametrize("pages", [32, 96])
def test_a_cache_of_another_dtype_gets_what_converting_each_element_gives(
    ours: str, theirs: str, pages: int
) -> None:
    """Each with scales of its own: the record has the writer's."""
    model = (Layer(2),) * 2
    source = Setup(dtype=ours, scales=(0.5, 2.0), page_sizes=(pages,))
    setup = Setup(tp=2, dtype=theirs, layout="packed", page_sizes=(32,), scales=(0.25, 1.0))
    sources = ranks(model, source, TOKENS, 1)
    dense = fill_all(sources, TOKENS, 2, spread=True)
    expected = {
        key: bits(converted(each.view(DTYPES[ours]), source, setup, key[1]))
        for key, each in dense.items()
    }
    files = write(sources, 1)
    for rank in ranks(model, setup, TOKENS, 3):
        before = snapshot(rank)
        read(rank, files, 1, (0, TOKENS))
        assert_loaded(
            rank,
            before,
            expected,
            dict.fromkeys(rank.groups, slice(CHUNK_TOKENS, 2 * CHUNK_TOKENS)),
        )


def test_a_flipped_byte_of_any_layer_that_is_read_is_found() -> None:
    """The reader reads two of four layers: only a sum of each layer can say that these are right."""
    ((name, whole),) = write(ranks(MODEL, Setup(), TOKENS, 1), 0).items()
    found = decode(whole)
    offset = len(whole) - found.payload_bytes
    rank, _ = ranks(MODEL, Setup(starts=(0, 2)), TOKENS, 3)
    for layer in found.layers:
        flipped = bytearray(whole)
        flipped[offset + layer.offset + layer.nbytes // 3] ^= 4
        files = {name: bytes(flipped)}
        if layer.layer < 2:
            with pytest.raises(AssertionError, match=f"bytes of layer {layer.layer} of {name}"):
                read(rank, files, 0, (0, TOKENS))
        else:
            read(rank, files, 0, (0, TOKENS))


@pytest.mark.parametrize("pages", [32, 96])
def test_a_reader_reads_only_the_layers_that_it_holds(pages: int) -> None:
    setup = Setup(page_sizes=(pages,))
    files = write(ranks(MODEL, setup, TOKENS, 1), 0)
    whole = sum(decode(each).payload_bytes for each in files.values())
    for rank in ranks(MODEL, replace(setup, starts=(0, 1)), TOKENS, 3):
        assert read(rank, files, 0, (0, TOKENS)) == whole * len(rank.groups) // 4


def test_a_reader_takes_only_the_parts_that_have_its_heads() -> None:
    files = write(ranks(MODEL, Setup(tp=4), TOKENS, 1), 0)
    whole = sum(decode(each).payload_bytes for each in files.values())
    for rank in ranks(MODEL, Setup(tp=2, page_sizes=(64,)), TOKENS, 3):
        assert read(rank, files, 0, (0, TOKENS)) == whole // 2


def test_ranks_that_hold_the_same_heads_store_them_once() -> None:
    sizes = []
    for tp in (1, 2, 8):
        files = write(ranks((LATENT,) * 8, Setup(tp=tp), TOKENS, 1), 0)
        assert len(files) == tp
        sizes.append(sum(decode(each).payload_bytes for each in files.values()))
    assert len(set(sizes)) == 1
    pass_through((LATENT,) * 8, Setup(tp=8), Setup(tp=4, page_sizes=(64,)))
    pass_through(
        (LATENT,) * 8, Setup(tp=2, starts=(0, 3)), Setup(tp=8, page_sizes=(96,), starts=(0, 5))
    )


def test_two_groups_with_unlike_pages_pass_to_an_engine_with_one_page_table() -> None:
    model = (Layer(4, 4, 4), Layer(2, 8, 8, window=40)) * 2
    two = Setup(labels=(0, 1, 0, 1), page_sizes=(32, 64))
    for other in (
        replace(two, tp=2, page_sizes=(16, 128)),
        replace(two, page_sizes=(16, 96), windows=False),
        Setup(page_sizes=(64,), windows=False, starts=(0, 3)),
    ):
        pass_through(model, two, other, 0)
        pass_through(model, other, two, 2)


def test_layers_that_a_reader_keeps_in_two_groups_are_not_taken_for_neighbours() -> None:
    """Pages are alike, so that their bytes pass as they are; but of each group every second layer."""
    pass_through(MODEL, Setup(), Setup(labels=(0, 1, 0, 1), page_sizes=(16, 16)))


def test_a_chunk_without_a_layer_that_is_wanted_is_not_loaded() -> None:
    """Its window had passed when the chunk was saved."""
    model = Layer(2), Layer(2, window=40)
    sources = ranks(model, Setup(), TOKENS, 1)
    files = write(sources, 0, [after_windows(rank, TOKENS) for rank in sources])
    assert [one.layer for one in decode(files["0-2.0of1"]).layers] == [0]
    (rank,) = ranks(model, Setup(), TOKENS, 3)
    before = snapshot(rank)
    with pytest.raises(PoolError, match="without token 80 of layer 1"):
        read(rank, files, 0, (0, CHUNK_TOKENS - 2))
    assert all(torch.equal(bits(now), bits(before[layer])) for layer, now in rank.storage.items())
    read(rank, files, 0, (0, TOKENS), after_windows(rank, TOKENS))


def test_a_page_is_loaded_whole_though_its_first_tokens_are_before_the_window() -> None:
    """Engines keep the page for other requests, whose windows begin earlier in it."""
    model = Layer(2), Layer(2, window=40)
    sources = ranks(model, Setup(page_sizes=(16,)), TOKENS, 1)
    files = write(sources, 0, [after_windows(rank, CHUNK_TOKENS) for rank in sources])
    for page_size, loads in ((16, True), (64, False)):
        (rank,) = ranks(model, Setup(page_sizes=(page_size,)), TOKENS, 3)
        before, span = snapshot(rank), (0, CHUNK_TOKENS)
        own = after_windows(rank, CHUNK_TOKENS)
        if loads:
            read(rank, files, 0, span, own)  # control
            continue
        with pytest.raises(PoolError, match="without token 64 of layer 1"):
            read(rank, files, 0, span, own)
        assert all(
            torch.equal(bits(now), bits(before[layer])) for layer, now in rank.storage.items()
        )


def test_a_part_that_is_missing_is_noticed_before_a_page_is_written() -> None:
    files = write(ranks(MODEL, Setup(tp=2), TOKENS, 1), 0)
    (rank,) = ranks(MODEL, Setup(), TOKENS, 3)
    before = snapshot(rank)
    with pytest.raises(PoolError, match="head 4"):
        read(rank, {"0-4.0of2": files["0-4.0of2"]}, 0, (0, TOKENS))
    assert all(torch.equal(bits(now), bits(before[layer])) for layer, now in rank.storage.items())


def with_draft(page_size: int, layers: tuple[int, ...] = (0, 1, 2048)) -> Rank:
    """One rank with two layers and one of a draft model."""
    group = Group("attention", layers, 2, 4, 4, page_size, 0, "bfloat16", "HND", heads_apart=True)
    return Rank(Geometry(Shard(0, 2, 0, 1), (group,)), TOKENS, random.Random(page_size))


def test_layers_of_a_draft_model_pass_and_engines_without_one_leave_them() -> None:
    source = with_draft(32)
    dense = fill_all([source], TOKENS, 2)
    drafting = msgspec.structs.replace(FACTS, draft=b"d" * 16)
    chunk = slice(0, CHUNK_TOKENS)
    for rank in (with_draft(32), with_draft(64), with_draft(32, (0, 1))):
        before = snapshot(rank)
        read(rank, write([source], 0, facts=drafting), 0, (0, TOKENS))
        assert_loaded(rank, before, dense, dict.fromkeys(rank.storage, chunk))


def test_a_chunk_without_the_drafts_layers_does_not_pass_for_one_with_them() -> None:
    source = with_draft(32, (0, 1))
    fill_all([source], TOKENS, 2)
    with pytest.raises(PoolError, match="layer 2048"):
        read(with_draft(32), write([source], 0), 0, (0, TOKENS))


def test_pages_that_nobody_can_read_pass_between_alike_caches_only() -> None:
    source = opaque()
    files = write([Opaque(source)], 1)
    alike = opaque()
    read(Opaque(alike), files, 1, (130, TOKENS - 1))
    for layer in (0, 1):
        ours, theirs = source.layer(layer).key, alike.layer(layer).key
        assert torch.equal(ours[4:8], theirs[4:8])
        assert not torch.equal(ours[:4], theirs[:4])
    for other in (opaque(64), opaque(tp=2), opaque(dtype="other")):
        with pytest.raises(PoolError) as error:
            read(Opaque(other), files, 1, (0, TOKENS))
        assert error.value.cause is Miss.UNLIKE


def test_pages_that_nobody_can_read_and_no_chunk_is_made_of_are_not_kept() -> None:
    with pytest.raises(UnsupportedGeometryError, match="of odd with 192 tokens"):
        describe(opaque(192))


def test_a_chunk_of_which_a_rank_holds_nothing_is_not_saved() -> None:
    (rank,) = ranks((Layer(2, window=40),), Setup(), TOKENS, 1)
    form = describe(rank.cache)
    assert plan_save(form, rank.geometry, after_windows(rank, TOKENS), 0) is None
    assert plan_save(form, rank.geometry, [rank.tables[0][:7]], 0) is None, (
        "a table that ends within the chunk"
    )
    assert plan_save(form, rank.geometry, rank.tables, 0) is not None


def test_nothing_is_planned_for_tokens_that_are_not_loaded() -> None:
    assert (
        plan_load(
            [], ranks(MODEL, Setup(), TOKENS, 1)[0].geometry, [[]], 1, CHUNK_TOKENS * 2, TOKENS
        )
        == []
    )


@given(st.data(), st.sampled_from(["HND", "K, V", "tiled"]))
@settings(max_examples=200, deadline=None)
def test_whatever_a_record_says_nothing_but_its_bytes_is_read_and_nothing_but_pages_written(
    data: st.DataObject, layout: str
) -> None:
    """Records whose sums are right, but which no writer has made."""
    (source,) = ranks((Layer(2, 4, 4),), Setup(layout=layout), CHUNK_TOKENS, 1)
    ((name, whole),) = write([source], 0).items()
    header, found = read_header(whole), decode(whole)
    plain = msgspec.msgpack.decode(whole[HEADER.size : HEADER.size + header.record_bytes])
    for _ in range(data.draw(st.integers(1, 2))):
        where = data.draw(st.sampled_from(["form", "geometry"]))
        plain[where] = mutated(data, plain[where])
    head = summed(found, msgspec.msgpack.encode(plain)).ljust(header.payload_offset, b"\0")
    (rank,) = ranks((Layer(2, 4, 4),), Setup(page_sizes=(32,)), CHUNK_TOKENS, 2)
    try:
        read(rank, {name: head + whole[header.payload_offset :]}, 0, (0, CHUNK_TOKENS))
    except PoolError as error:
        event(error.cause)
    else:
        event("read")


def test_a_rank_that_has_nothing_to_write_has_a_part_without_layers() -> None:
    """Two ranks hold the only layer of a latent: the first one writes it."""
    every = ranks((LATENT,), Setup(tp=2), TOKENS, 1)
    files = write(every, 0)
    assert [bool(describe(rank.cache)) for rank in every] == [True, False]
    assert [len(decode(data).layers) for data in files.values()] == [1, 0]
    for setup in (Setup(), Setup(tp=2, page_sizes=(32,))):
        for reader in ranks((LATENT,), setup, TOKENS, 2):
            read(reader, files, 0, (0, CHUNK_TOKENS))
    whole, empty = files.items()
    (reader,) = ranks((LATENT,), Setup(), TOKENS, 2)
    with pytest.raises(PoolError):
        read(reader, dict([empty]), 0, (0, CHUNK_TOKENS))
    assert whole


def test_a_table_that_ends_too_early_is_an_error() -> None:
    """Its missing pages must not pass for pages that are there already."""
    files = write(ranks(MODEL, Setup(), TOKENS, 1), 1)
    (rank,) = ranks(MODEL, Setup(), TOKENS, 3)
    before = snapshot(rank)
    with pytest.raises(
        IndexError, match="page table 0 ends at token 240: tokens up to 256 are loaded"
    ):
        read(rank, files, 1, (0, TOKENS), [rank.tables[0][:15]])
    assert all(torch.equal(bits(now), bits(before[layer])) for layer, now in rank.storage.items())
