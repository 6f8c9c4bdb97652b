# SPDX-License-Identifier: Apache-2.0
"""Chunks kept in INT8: what any engine wrote, any other engine reads as the codec has it, in half the bytes.

What must arrive is computed with the codec from the writer's elements, head by head. No plan and no run is asked.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.caches import Rank
from support.filled import bits, converted, ranks, snapshot
from support.pool_ranks import Dense, Files, fill_all, read, seen, write
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
from support.pool_records import GEOMETRY, record
from support.setups import LATENT, Layer, Model, Setup, pairs

from pd_connector.codec import CODECS, DTYPES
from pd_connector.errors import PoolError
from pd_connector.kv.coding import Elements, Part
from pd_connector.pool import copy_plan as plans
from pd_connector.pool.chunk_layout import Run, coded_run, form_problem, places
from pd_connector.pool.codecs import CODED_DTYPES
from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.pool.record import Writer, decode, encode, payload_problem

INT8 = CODECS["int8"]


def as_read(
    dense: Dense, ours: Setup, theirs: Setup, number: int, held: dict[int, int] | None = None
) -> Dense:
    """The bits that a chunk must have in the reader's cache; zeros beside the chunk.

    Args:
        held: the first token of each layer that the writer holds; 0 for all.
    """
    found: Dense = {}
    stop = (number + 1) * CHUNK_TOKENS
    for (layer, v), stored in dense.items():
        first = max(number * CHUNK_TOKENS, (held or {}).get(layer, 0))
        x = stored.view(DTYPES[ours.dtype])
        whole = torch.zeros(x.shape, dtype=DTYPES[theirs.dtype])
        part = x[:, first:stop].contiguous()
        if ours.dtype in CODED_DTYPES:
            whole[:, first:stop] = through_int8(part, ours, theirs, v)
        else:
            whole[:, first:stop] = converted(part, ours, theirs, v)
        found[layer, v] = bits(whole)
    return found


def through_int8(x: torch.Tensor, ours: Setup, theirs: Setup, v: bool) -> torch.Tensor:
    part = Part.VALUE if v else Part.KEY
    source, wanted = Elements(ours.dtype), Elements(theirs.dtype, theirs.scales[v])
    shape = (x.shape[0], x.shape[1], x.shape[2])
    coded = torch.empty(INT8.coding.coded_bytes(part, shape, source), dtype=torch.uint8)
    INT8.encode(part, x, source, wanted, coded)
    return INT8.decode(part, coded, shape, source, wanted)


def pass_through(model: Model, ours: Setup, theirs: Setup, number: int = 1) -> Dense:
    """One chunk, from the ranks of one engine to those of the other; returns what the writer had."""
    sources = ranks(model, ours, TOKENS, 1)
    dense = fill_all(sources, TOKENS, 2, spread=True)
    files = write(sources, number, codec="int8")
    expected = as_read(dense, ours, theirs, number)
    chunk = slice(number * CHUNK_TOKENS, (number + 1) * CHUNK_TOKENS)
    for rank in ranks(model, theirs, TOKENS, 3):
        before = snapshot(rank)
        read(rank, files, number, (0, TOKENS))
        assert_loaded(rank, before, expected, dict.fromkeys(rank.groups, chunk))
    return dense


@pytest.mark.parametrize("ours", WRITERS, ids=str)
@pytest.mark.parametrize("theirs", READERS, ids=str)
def test_any_engine_reads_what_any_other_wrote_in_int8(ours: Setup, theirs: Setup) -> None:
    pass_through(MODEL, ours, theirs)


@pytest.mark.parametrize("layout", ["NHD", "HND in parts", "K, V", "tiled"])
def test_any_layout_is_written_and_read_in_int8(layout: str) -> None:
    ours = Setup(page_sizes=(32,), layout=layout)
    for theirs in (ours, replace(ours, tp=2), Setup(page_sizes=(64,), layout="NHD")):
        pass_through(MODEL, ours, theirs)
        pass_through(MODEL, theirs, ours, 2)


def test_a_latent_is_kept_in_int8_too() -> None:
    pass_through((LATENT,) * 8, Setup(tp=8), Setup(tp=4, page_sizes=(64,)))
    pass_through((LATENT,) * 4, Setup(), Setup(tp=8, page_sizes=(96,), starts=(0, 3)))


@given(pairs(), st.data())
@settings(max_examples=25, deadline=None)
def test_of_a_coded_chunk_exactly_what_may_be_written_and_is_held_arrives(
    pair: tuple[Model, Setup, Setup], data: st.DataObject
) -> None:
    """Unlike layouts, parallelism, page sizes and dtypes; windows have passed some of the writer's pages."""
    model, ours, theirs = pair
    scales = st.sampled_from([(1.0, 1.0), (0.25, 2.0)])
    ours = replace(ours, windows=data.draw(st.booleans()), scales=data.draw(scales))
    theirs = replace(theirs, scales=data.draw(scales))
    wants = data.draw(readings(), "reading")
    sources = writers(model, ours)
    dense = fill_all(sources, TOKENS, 2, spread=True)
    tables = [after_windows(rank, wants.computed) for rank in sources]
    files = write(sources, wants.number, tables, codec="int8")
    held = {
        layer: next((n for n, page in enumerate(table[group.table]) if page >= 0), 0)
        * group.page_size
        for rank, table in zip(sources, tables, strict=True)
        for layer, group in rank.groups.items()
    }
    expected = as_read(dense, ours, theirs, wants.number, held)
    for rank in ranks(model, theirs, TOKENS, 3):
        loaded = arrives(rank, files, wants, expected, model, ours)
        event(f"{ours.dtype} into {theirs.dtype}" if loaded else "not all is held")


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.25, 2.0), (0.01, 1 / 64)])
@pytest.mark.parametrize("dtype", CODED_DTYPES)
@pytest.mark.parametrize("tp", [1, 2])
def test_int8_read_into_an_fp8_cache_has_the_norm_that_was_written(
    dtype: str, scales: tuple[float, float], tp: int
) -> None:
    """FP8 codes for another scale than the cache's would be wrong by that factor, without an error."""
    theirs = Setup(tp=tp, dtype="fp8_e4m3", scales=scales, page_sizes=(64,))
    model = (Layer(2, 64, 64),) * 2
    dense = pass_through(model, Setup(dtype=dtype), theirs, 0)
    files = write(filled(model, Setup(dtype=dtype)), 0, codec="int8")
    for rank in ranks(model, theirs, TOKENS, 3):
        read(rank, files, 0, (0, TOKENS))
        for layer, group in rank.groups.items():
            heads = rank.geometry.heads(group)
            for v in (False, True):
                wrote = dense[layer, v].view(DTYPES[dtype])[heads.start : heads.stop, :CHUNK_TOKENS]
                found = values(rank, layer, v)[:, :CHUNK_TOKENS] * scales[v]
                apart = (found - wrote.float()).norm() / wrote.float().norm()
                assert apart < 0.05


def filled(model: Model, setup: Setup) -> list[Rank]:
    every = ranks(model, setup, TOKENS, 1)
    fill_all(every, TOKENS, 2, spread=True)
    return every


def values(rank: Rank, layer: int, v: bool) -> torch.Tensor:
    """Stored numbers, `[head, token, dim]`."""
    return seen(rank, layer, v).view(rank.storage[layer].dtype).float()


def test_the_codec_that_a_reader_would_ask_a_producer_for_is_not_that_of_a_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control of the test before: an FP8 cache asks producers for its own FP8 codes."""
    monkeypatch.setattr(plans, "replace", lambda route, **_: route)
    plans._routes.cache_clear()
    try:
        with pytest.raises((AssertionError, ValueError)):
            pass_through(MODEL, Setup(), Setup(dtype="fp8_e4m3", scales=(0.25, 2.0)))
    finally:
        plans._routes.cache_clear()


@pytest.mark.parametrize("pages", [16, 32, 96])
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
def test_kernels_write_and_read_int8_as_the_host_does(pages: int, dtype: str) -> None:
    pytest.importorskip("triton")
    model = Layer(4, 8, 8), Layer(2, 16, 16)
    ours = Setup(page_sizes=(32,))
    theirs = Setup(page_sizes=(pages,), dtype=dtype, scales=(0.5, 2.0))
    (source,) = ranks(model, ours, TOKENS, 1)
    dense = fill_all([source], TOKENS, 2, spread=True)
    files = write([source], 1, codec="int8")
    source.cache = by_kernels(source.cache)
    assert write([source], 1, codec="int8") == files
    (rank,) = ranks(model, theirs, TOKENS, 3)
    rank.cache = by_kernels(rank.cache)
    before = snapshot(rank)
    read(rank, files, 1, (0, TOKENS))
    chunk = slice(CHUNK_TOKENS, 2 * CHUNK_TOKENS)
    expected = as_read(dense, ours, theirs, 1)
    assert_loaded(rank, before, expected, dict.fromkeys(rank.groups, chunk))


def payload_bytes(files: Files) -> int:
    return sum(decode(each).payload_bytes for each in files.values())


@pytest.mark.parametrize(("dtype", "share"), [("bfloat16", 0.53), ("float32", 0.27)])
def test_int8_takes_half_the_bytes_of_bfloat16(dtype: str, share: float) -> None:
    every = filled((Layer(8, 128, 128),) * 2, Setup(dtype=dtype))
    raw, coded = write(every, 0), write(every, 0, codec="int8")
    assert payload_bytes(coded) <= share * payload_bytes(raw)
    assert [decode(each).writer.codec for each in coded.values()] == ["int8"]


def test_pages_of_fp8_stay_raw_and_are_named_so() -> None:
    every = filled(MODEL, Setup(dtype="fp8_e4m3", scales=(0.5, 2.0)))
    raw, coded = write(every, 0), write(every, 0, codec="int8")
    for one, other in zip(raw.values(), coded.values(), strict=True):
        assert decode(one).form == decode(other).form
        assert {run.codec for run in decode(other).form} == {"raw"}
    for theirs in (Setup(page_sizes=(64,)), Setup(dtype="fp8_e4m3", scales=(0.25, 1.0))):
        pass_through(MODEL, Setup(dtype="fp8_e4m3", scales=(0.5, 2.0)), theirs)


def test_pages_that_nobody_can_read_stay_raw() -> None:
    source, alike = opaque(), opaque()
    files = write([Opaque(source)], 1, codec="int8")
    read(Opaque(alike), files, 1, (128, TOKENS))
    for layer in (0, 1):
        assert torch.equal(source.layer(layer).key[4:8], alike.layer(layer).key[4:8])
    assert {run.codec for each in files.values() for run in decode(each).form} == {"raw"}


def test_each_flipped_byte_of_a_coded_payload_is_found() -> None:
    ((name, whole),) = coded_files().items()
    found = decode(whole)
    payload = memoryview(bytearray(whole[-found.payload_bytes :]))
    lie = places(found.form, found.geometry)
    assert payload_problem(found, lie, payload) == ""
    for place in range(len(payload)):
        payload[place] ^= 1 << place % 8
        wrong = next(one.layer for one in lie if place < one.offset + one.nbytes)
        assert payload_problem(found, lie, payload).startswith(f"bytes of layer {wrong} of {name}")
        payload[place] ^= 1 << place % 8


def coded_files() -> Files:
    return write(filled((Layer(2, 8, 8),) * 2, Setup()), 0, codec="int8")


def test_a_stage_that_reads_half_of_a_coded_run_verifies_it() -> None:
    files = write(filled(MODEL, Setup()), 0, codec="int8")
    for rank in ranks(MODEL, Setup(starts=(0, 1)), TOKENS, 3):
        assert read(rank, files, 0, (0, TOKENS)) == payload_bytes(files) * len(rank.groups) // 4


def test_a_record_that_keeps_int8_names_it_as_its_writers_codec() -> None:
    """Else engines would read it that do not permit INT8."""
    one = GEOMETRY.groups[0].layers
    made = record(form=(coded_run(one, "int8"),), writer=Writer("vllm 0.32.0", "e1", "int8"))
    assert decode(encode(made)) == made
    silent = msgspec.structs.replace(made, writer=Writer("vllm 0.32.0", "e1"))
    with pytest.raises(PoolError, match="layer 0 is kept in int8, and its writer names raw"):
        encode(silent)


RUN = coded_run((0, 2), "int8")


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (msgspec.structs.replace(RUN, page_size=32), "pages of 32 tokens"),
        (msgspec.structs.replace(RUN, planes=record().form[0].planes), "or of views"),
        (msgspec.structs.replace(RUN, key=record().form[0].key), "or of views"),
        (coded_run((1,), "int8"), "int8 of a cache of fp8_e4m3"),
        (msgspec.structs.replace(RUN, codec="raw"), "without a view"),
    ],
    ids=["page size", "planes", "views", "fp8", "no view"],
)
def test_a_coded_run_that_contradicts_itself_is_named(run: Run, text: str) -> None:
    assert text in form_problem((run,), GEOMETRY)


def test_of_a_chunk_whose_first_page_is_gone_all_tokens_of_the_next_one_are_kept() -> None:
    """Pages of 96 tokens do not begin where chunks begin."""
    model, ours = (Layer(2, 8, 8, window=40),), Setup(page_sizes=(96,))
    sources = ranks(model, ours, TOKENS, 1)
    dense = fill_all(sources, TOKENS, 2, spread=True)
    files = write(sources, 1, [after_windows(sources[0], 288)], codec="int8")
    ((run,),) = (decode(each).form for each in files.values())
    assert run.first_token == 192 - CHUNK_TOKENS
    (rank,) = ranks(model, Setup(page_sizes=(32,)), TOKENS, 3)
    before, own = snapshot(rank), after_windows(rank, 2 * CHUNK_TOKENS)
    read(rank, files, 1, (0, 2 * CHUNK_TOKENS), own)
    expected = as_read(dense, ours, Setup(page_sizes=(32,)), 1, {0: 192})
    assert_right(rank, before, expected, {0: range(2 * CHUNK_TOKENS - 39, 2 * CHUNK_TOKENS)}, own)


def test_a_coded_run_of_which_a_window_has_passed_the_beginning_has_fewer_bytes() -> None:
    whole, later = RUN, msgspec.structs.replace(RUN, first_token=96)
    assert form_problem((later,), GEOMETRY) == ""
    sizes = [places((run,), GEOMETRY)[0].nbytes for run in (whole, later)]
    # two heads: K has 16 bytes of scales each, V 2 a token; codes have 16 bytes a token
    assert sizes == [2 * (16 + 128 * (2 + 16)), 2 * (16 + 32 * (2 + 16))]
