# SPDX-License-Identifier: Apache-2.0
"""Two agents and one store: what one rank saved, another rank loads; what is wrong with it ends the load."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from support.agents import MODEL, SHORT, Rank, Ranks, geometry_of, ranks
from support.pool_stores import patient, store
from support.waits import until

from pd_bench.pool.faulty_store import FaultyStore
from pd_connector.agent import commands as commands_module
from pd_connector.agent import pool_loads, pool_saves
from pd_connector.agent.commands import ChangeModel, CommandQueue
from pd_connector.errors import Cause, Miss
from pd_connector.kv.geometry import DRAFT_LAYERS, Shard, page_span
from pd_connector.pool import record, saver
from pd_connector.pool.jobs import Fill, PromptChunk, Save, Saved
from pd_connector.pool.keys import CHUNK_TOKENS, extend, model_root, root, salt_digest, token_bytes
from pd_connector.pool.part_names import draft_mark, part_draft
from pd_connector.pool.store.local import LocalStore
from pd_connector.protocol.consuming.audit import Comparison
from pd_connector.protocol.consuming.incoming import Finished

__all__ = ["patient", "ranks", "store"]

FACTS = msgspec.structs.replace(MODEL, weights=b"all bytes")
DRAFTING = msgspec.structs.replace(FACTS, draft=b"d" * 16)
ROOT = model_root(FACTS)
PATIENT = SHORT | {"connect_timeout_s": 20.0, "session_timeout_s": 10.0, "stall_timeout_s": 20.0}
LATE = (Cause.SESSION_LOST, Cause.UNREACHABLE, Cause.UNKNOWN_TRANSFER, Cause.LEASE_EXPIRED)
PAGE, OTHER_PAGE = 16, 32
CHUNKS = 2
TOKENS = list(range(CHUNKS * CHUNK_TOKENS))


Make = Callable[..., Rank]


@pytest.fixture
def rank(ranks: Ranks, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes a rank by page size and name."""
    monkeypatch.setattr(pool_saves, "_WAITS_S", 60.0)  # on a busy machine, too

    def make(
        page_size: int, name: str, codec: str = "raw", at_rest: str = "raw", **options: Any
    ) -> Rank:
        drafts = (DRAFT_LAYERS,) if options.get("facts") is DRAFTING else ()
        geometry = geometry_of(Shard(0, 2, 0, 1), page_size=page_size, layers=(0, 1, *drafts))
        told = {"facts": FACTS, "seed": len(name), "engine_id": name, "store": store, **options}
        config = PATIENT | {"codec": codec, "pool": {"codec": at_rest}}
        return ranks(config, geometry=geometry, **told)

    return make


def chunks() -> list[PromptChunk]:
    assert ROOT is not None
    first = root(ROOT)
    keys = [first, *extend(first, TOKENS)]
    return [
        PromptChunk(
            number,
            keys[number + 1],
            keys[number],
            token_bytes(TOKENS[number * CHUNK_TOKENS : (number + 1) * CHUNK_TOKENS]),
            b"",
            "",
            salt_digest(""),
        )
        for number in range(CHUNKS)
    ]


def save(writer: Rank, store: LocalStore) -> list[int]:
    """Save both chunks from the writer's pages, in an order of their own; returns the pages."""
    pages = list(range(len(TOKENS) // PAGE))[::-1]
    tried = itertools.count()
    for chunk in chunks():
        span = page_span(chunk.first_token, chunk.stop_token, PAGE)

        def there(chunk: PromptChunk = chunk, span: range = span) -> bool:
            """A store on a busy machine may turn a part away."""
            name = f"save {next(tried)}"
            writer.agent.submit(Save(name, ROOT or b"", chunk, (pages[span.start : span.stop],)))
            assert isinstance(writer.end_of(name), Saved)
            with contextlib.suppress(TimeoutError, AssertionError):
                until(lambda: store.find([chunk.key])[0] is not None, "the chunk", 2.0)
                return True
            return False

        until(there, "a chunk in the store", 60.0)
    return pages


def fill(reader: Rank, name: str = "request", **changes: Any) -> Finished:
    pages = list(range(len(TOKENS) // OTHER_PAGE))
    job = Fill(name, ROOT or b"", tuple(chunks()), 0, len(TOKENS), (pages,))._replace(**changes)
    reader.agent.submit(job)
    found = reader.end_of(name)
    assert isinstance(found, Finished)
    return found


def kv(of: Rank, pages: list[int], page_size: int) -> torch.Tensor:
    """`[layer, token, head, K and V]`, as bits."""
    found = []
    for layer in of.layers.values():
        keys = layer[..., : page_size * 6].unflatten(2, (page_size, 6))
        values = layer[..., page_size * 6 :].unflatten(2, (page_size, 4))
        both = torch.cat([keys, values], 3)[pages].transpose(1, 2).flatten(0, 1)
        found.append(both.reshape(len(pages) * page_size, -1))
    return torch.stack(found).view(torch.int16)


def files(store: LocalStore) -> list[Path]:
    return sorted(Path(store.status().tiers[0].path).rglob("data/*"))


def test_another_engine_with_other_pages_loads_what_one_has_saved(
    store: LocalStore, rank: Make
) -> None:
    writer = rank(PAGE, "a")
    reader = rank(OTHER_PAGE, "other")
    saved = save(writer, store)
    assert fill(reader).cause is None
    loaded = list(range(len(TOKENS) // OTHER_PAGE))
    assert torch.equal(kv(reader, loaded, OTHER_PAGE), kv(writer, saved, PAGE))


def drafts_of(store: LocalStore) -> set[str]:
    """The draft models in the names of all parts."""
    found = store.find([chunk.key for chunk in chunks()])
    return {part_draft(name) for one in found if one for name in one.parts}


def test_an_engine_that_drafts_replaces_chunks_without_its_draft_model(
    store: LocalStore, rank: Make
) -> None:
    plain, drafting = rank(PAGE, "a"), rank(PAGE, "ab", facts=DRAFTING)
    reader = rank(OTHER_PAGE, "reader", facts=DRAFTING)
    save(plain, store)
    refused = fill(reader)
    assert (refused.cause, refused.miss, refused.stop_token) == (Cause.POOL, Miss.DRAFT, 0)
    saved = save(drafting, store)
    own = {draft_mark(DRAFTING.draft)}
    until(lambda: drafts_of(store) == own, "chunks with the draft model in their place")
    save(rank(PAGE, "another"), store)
    assert drafts_of(store) == own, "an engine without a draft replaces nothing"
    loaded = list(range(len(TOKENS) // OTHER_PAGE))
    assert fill(reader, "again").cause is None
    assert torch.equal(kv(reader, loaded, OTHER_PAGE), kv(drafting, saved, PAGE))
    other = rank(OTHER_PAGE, "plain reader")
    assert fill(other).cause is None
    assert torch.equal(kv(other, loaded, OTHER_PAGE), kv(drafting, saved, PAGE)[:2])


def test_a_flipped_byte_ends_the_load_and_the_chunk(store: LocalStore, rank: Make) -> None:
    writer = rank(PAGE, "a")
    reader = rank(OTHER_PAGE, "other")
    save(writer, store)
    data = bytearray(files(store)[0].read_bytes())
    data[-1] ^= 1
    files(store)[0].write_bytes(data)
    found = fill(reader)
    assert found.cause is Cause.POOL
    assert "differ from their sum" in found.detail
    assert None in store.find([chunk.key for chunk in chunks()]), "it is not asked for again"


def file_of(store: LocalStore, chunk: PromptChunk) -> Path:
    return next(file for file in files(store) if file.name.startswith(chunk.key.hex()))


@pytest.mark.parametrize("harm", ["flipped", "cut", "gone", "late"])
@pytest.mark.parametrize("bad", [0, 1])
def test_chunks_before_a_bad_one_are_in_place_and_none_after_it(
    store: LocalStore, rank: Make, monkeypatch: pytest.MonkeyPatch, harm: str, bad: int
) -> None:
    writer = rank(PAGE, "a")
    reader = rank(OTHER_PAGE, "other")
    saved = save(writer, store)
    chunk, released = chunks()[bad], threading.Event()
    if harm == "late":
        read = pool_loads.Loader.read

        def hangs(loader: Any, asked: PromptChunk, *args: Any) -> Any:
            if asked.number == bad:
                released.wait(30)
            return read(loader, asked, *args)

        monkeypatch.setattr(pool_loads, "_STALL_S", 3.0 if bad else 1.0)
        monkeypatch.setattr(pool_loads.Loader, "read", hangs)
    elif harm == "gone":
        store.remove([chunk.key])
    else:
        data = bytearray(file_of(store, chunk).read_bytes())
        data[-1] ^= 1
        file_of(store, chunk).write_bytes(data[: None if harm == "flipped" else -1])
    first_bad_page = chunk.first_token // OTHER_PAGE
    pages = list(range(len(TOKENS) // OTHER_PAGE))
    after = kv(reader, pages[first_bad_page:], OTHER_PAGE).clone()
    found = fill(reader)
    released.set()
    assert found.cause is (Cause.STALLED if harm == "late" else Cause.POOL)
    assert found.stop_token == chunk.first_token
    miss = {"gone": Miss.EVICTED, "late": None}.get(harm, Miss.DAMAGED)
    assert found.miss is miss
    if bad:
        good = kv(reader, pages[:first_bad_page], OTHER_PAGE)
        assert torch.equal(good, kv(writer, saved[: chunk.first_token // PAGE], PAGE))
        assert torch.equal(kv(reader, pages[first_bad_page:], OTHER_PAGE), after)


def test_a_comparison_with_a_bad_chunk_believes_nobody(store: LocalStore, rank: Make) -> None:
    writer = rank(PAGE, "a")
    reader = rank(OTHER_PAGE, "other", audits=True)
    ones(writer, reader)
    save(writer, store)
    store.remove([chunks()[1].key])
    assert fill(reader, "compare", compares=True).cause is Cause.POOL
    assert fill(reader, "again").cause is Cause.UNAUDITED


@pytest.mark.parametrize("permits", ["raw", "int8"])
def test_kv_that_may_have_come_in_a_codec_is_loaded_only_where_that_is_permitted(
    store: LocalStore, rank: Make, permits: str
) -> None:
    saved = save(writer := rank(PAGE, "a", codec="int8"), store)
    reader = rank(OTHER_PAGE, "other", codec=permits)
    found = fill(reader)
    if permits == "raw":
        assert found.miss is Miss.CODEC
        return
    assert found.cause is None
    loaded = list(range(len(TOKENS) // OTHER_PAGE))
    assert torch.equal(kv(reader, loaded, OTHER_PAGE), kv(writer, saved, PAGE))


def spread(of: Rank) -> None:
    """Give all pages ordinary numbers."""
    for layer in of.layers.values():
        layer.copy_(torch.randn(layer.shape, generator=torch.Generator().manual_seed(1)))


def test_chunks_kept_in_int8_take_half_the_room_and_arrive_within_half_a_step(
    store: LocalStore, rank: Make
) -> None:
    spread(writer := rank(PAGE, "a", at_rest="int8"))
    saved = save(writer, store)
    raw = len(TOKENS) * 4 * (6 + 4) * 2 * 2  # heads, dims of K and V, bytes, layers
    heads = [file.read_bytes()[: record.HEADER.size] for file in files(store)]
    coded = sum(record.read_header(head).payload_bytes for head in heads)
    assert coded < 0.75 * raw, "of so few dims, scales of V are a part that counts"
    assert {name for chunk in store.chunks() for name in chunk.parts} == {"0-2.0of1.int8"}
    reader = rank(OTHER_PAGE, "other", at_rest="int8")
    assert fill(reader).cause is None
    loaded = list(range(len(TOKENS) // OTHER_PAGE))
    found = kv(reader, loaded, OTHER_PAGE).view(torch.bfloat16).float()
    wrote = kv(writer, saved, PAGE).view(torch.bfloat16).float()
    assert 0 < (found - wrote).abs().max() <= 0.03 * wrote.abs().max()
    assert torch.corrcoef(torch.stack([found.flatten(), wrote.flatten()]))[0, 1] > 0.999


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_chunks_kept_in_int8_are_read_where_int8_is_permitted_and_nowhere_else(
    store: LocalStore, rank: Make, codec: str
) -> None:
    save(rank(PAGE, "a", at_rest="int8"), store)
    found = fill(rank(OTHER_PAGE, "other", codec=codec))
    assert found.miss is (Miss.CODEC if codec == "raw" else None)
    assert None not in store.find([chunk.key for chunk in chunks()]), "it stays for others"


def test_what_an_engine_computes_on_chunks_of_int8_is_not_kept_as_exact(
    store: LocalStore, rank: Make
) -> None:
    """A prefill engine takes no KV from others, but it loads from the pool."""
    save(rank(PAGE, "a", codec="int8", consumes=False), store)
    assert fill(rank(OTHER_PAGE, "other")).miss is Miss.CODEC


@pytest.mark.parametrize("way", ["at rest", "before"])
def test_a_writer_of_int8_is_compared_by_the_bound_of_int8(
    store: LocalStore, rank: Make, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """What passed in INT8 before is raw at rest."""
    note, bounds = Comparison.note, []

    def noted(self: Comparison, route: Any, found: Any, passed: str) -> None:
        bounds.append((route.codec, passed))
        note(self, route, found, passed)

    monkeypatch.setattr(Comparison, "note", noted)
    at_rest = "int8" if way == "at rest" else "raw"
    writer = rank(PAGE, "a", "int8", at_rest)
    reader = rank(OTHER_PAGE, "other", "int8", audits=True)
    ones(writer, reader)
    save(writer, store)
    assert fill(reader).cause is Cause.UNAUDITED
    assert fill(reader, "compare", compares=True).cause is None
    assert set(bounds) == {(at_rest, "int8")}
    assert fill(reader, "again").cause is None


def test_an_engine_that_takes_kv_in_fp8_writes_nothing(store: LocalStore, rank: Make) -> None:
    writer, pages = rank(PAGE, "a", codec="fp8_e4m3"), list(range(CHUNK_TOKENS // PAGE))
    writer.agent.submit(Save("save", ROOT or b"", chunks()[0], (pages,)))
    assert isinstance(writer.end_of("save"), Saved)
    assert files(store) == []


def test_kv_of_other_weights_is_not_loaded(store: LocalStore, rank: Make) -> None:
    other = msgspec.structs.replace(FACTS, weights=b"others")
    writer = rank(PAGE, "a")
    reader = rank(OTHER_PAGE, "b", facts=other)
    save(writer, store)
    assert fill(reader).cause is Cause.MODEL
    found = fill(reader, "again", model=model_root(other))
    assert found.cause is Cause.POOL, "a key that is found says nothing yet"


def test_a_save_of_other_weights_writes_nothing(store: LocalStore, rank: Make) -> None:
    writer = rank(PAGE, "a")
    pages = tuple(range(CHUNK_TOKENS // PAGE))
    writer.agent.submit(Save("save", b"n" * 32, chunks()[0], (pages,)))
    assert isinstance(writer.end_of("save"), Saved), "its pages come free all the same"
    assert files(store) == []


def test_an_engine_that_ends_has_written_what_it_had_copied(
    store: LocalStore, rank: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, begin = rank(PAGE, "a"), store.begin

    def slow(*args: Any, **more: Any) -> Any:
        time.sleep(0.3)
        return begin(*args, **more)

    monkeypatch.setattr(store, "begin", slow)
    for chunk in chunks():
        span = page_span(chunk.first_token, chunk.stop_token, PAGE)
        name = f"save {chunk.number}"
        writer.agent.submit(Save(name, ROOT or b"", chunk, (list(span),)))
        assert isinstance(writer.end_of(name), Saved)
    writer.agent.close()
    assert None not in store.find([chunk.key for chunk in chunks()])


def test_a_rank_with_many_processors_writes_several_chunks_at_once(
    store: LocalStore, rank: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    both, write = threading.Barrier(2, timeout=30), saver.WantedPart.write

    def meets(wanted: saver.WantedPart, payload: memoryview) -> str:
        both.wait()
        return write(wanted, payload)

    monkeypatch.setattr(saver.WantedPart, "write", meets)
    writer, pages = rank(PAGE, "a"), range(CHUNK_TOKENS // PAGE)
    for chunk in chunks():
        writer.agent.submit(Save(f"save {chunk.number}", ROOT or b"", chunk, (tuple(pages),)))
    until(lambda: None not in store.find([chunk.key for chunk in chunks()]), "both")
    assert fill(rank(OTHER_PAGE, "other")).cause is None


@pytest.mark.parametrize(
    ("processors", "ranks", "threads"),
    [(2, 1, 1), (15, 1, 1), (16, 1, 2), (64, 1, 4), (64, 8, 1), (192, 8, 3), (8, 16, 1)],
)
def test_a_rank_writes_with_as_many_threads_as_its_processors_bear(
    monkeypatch: pytest.MonkeyPatch, processors: int, ranks: int, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(processors))
    assert pool_saves.writers(ranks) == threads


def test_a_chunk_that_the_store_has_already_costs_neither_a_copy_nor_sums(
    store: LocalStore, rank: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, done = rank(PAGE, "a"), rank(PAGE, "b"), []
    for module, name in ((pool_saves, "gather_piece"), (saver, "layer_sum")):
        work = getattr(module, name)

        def counted(*args: Any, work: Any = work, name: str = name) -> Any:
            done.append(name)
            return work(*args)

        monkeypatch.setattr(module, name, counted)
    save(first, store)
    assert set(done) == {"gather_piece", "layer_sum"}
    done.clear()
    count = second.agent.telemetry.count

    def late(*what: Any, **labels: str) -> None:
        time.sleep(0.05)  # an outcome that is seen has been counted
        count(*what, **labels)

    monkeypatch.setattr(second.agent.telemetry, "count", late)
    for chunk in chunks():
        pages = list(range(CHUNK_TOKENS // PAGE))
        second.agent.submit(Save(f"again {chunk.number}", ROOT or b"", chunk, (pages,)))
        assert isinstance(second.end_of(f"again {chunk.number}"), Saved), "its pages come free"
    assert second.count("pool_saves", cause="exists") == len(chunks())
    assert done == []


def test_weights_that_change_while_the_store_is_asked_are_not_saved_as_those_before(
    store: LocalStore, rank: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, begin, asked = rank(PAGE, "a"), store.begin, threading.Event()
    changed = threading.Event()

    def waits(*args: Any, **more: Any) -> Any:
        asked.set()
        changed.wait(30)
        return begin(*args, **more)

    monkeypatch.setattr(store, "begin", waits)
    (chunk, _), pages = chunks(), list(range(CHUNK_TOKENS // PAGE))
    writer.agent.submit(Save("save", ROOT or b"", chunk, (pages,)))
    assert asked.wait(30)
    other = msgspec.structs.replace(FACTS, weights=b"others")
    writer.agent.submit(ChangeModel(other))
    assert writer.agent.pool_model == model_root(other), "what the scheduler is told at once"
    until(lambda: writer.agent._loop.pool_side._facts == other, "the agent's thread knows them")
    changed.set()
    assert isinstance(writer.end_of("save"), Saved)
    until(lambda: store.status().writing == 0, "its room is free again")
    assert files(store) == []


def ones(*ranks: Rank) -> None:
    """Give all pages the same KV, so that pages of any size are alike."""
    for of in ranks:
        for layer in of.layers.values():
            layer.fill_(1.0)


def test_a_writer_is_believed_after_one_comparison(store: LocalStore, rank: Make) -> None:
    writer = rank(PAGE, "a")
    reader = rank(OTHER_PAGE, "other", audits=True)
    ones(writer, reader)
    save(writer, store)
    assert fill(reader).cause is Cause.UNAUDITED
    assert fill(reader, "compare", compares=True).cause is None
    assert fill(reader, "again").cause is None


def test_a_writer_whose_kv_differs_is_not_believed_any_more(store: LocalStore, rank: Make) -> None:
    writer = rank(PAGE, "a")
    reader = rank(OTHER_PAGE, "other", audits=True)
    ones(writer, reader)
    save(writer, store)
    reader.layers[1][3] = 7.0  # one page of one layer
    assert fill(reader, "compare", compares=True).cause is Cause.AUDIT
    assert reader.layers[1][3].eq(7.0).all(), "a comparison writes nothing"
    assert fill(reader, "again").cause is Cause.AUDIT


def test_what_an_engine_wrote_itself_needs_no_audit(store: LocalStore, rank: Make) -> None:
    writer = rank(PAGE, "a", audits=True)
    pages = save(writer, store)
    assert fill(writer, pages=(pages,)).cause is None


def test_a_store_that_does_not_answer_ends_the_load_and_what_comes_later_is_dropped(
    store: LocalStore, rank: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, read = threading.Event(), pool_loads.Loader.read

    def hangs(*args: Any) -> Any:
        released.wait(30)
        return read(*args)

    monkeypatch.setattr(pool_loads, "_STALL_S", 0.2)
    monkeypatch.setattr(pool_loads.Loader, "read", hangs)
    writer = rank(PAGE, "a")
    reader = rank(OTHER_PAGE, "other")
    save(writer, store)
    pages = list(range(len(TOKENS) // OTHER_PAGE))
    before = kv(reader, pages, OTHER_PAGE).clone()
    assert fill(reader).cause is Cause.STALLED
    released.set()
    elsewhere = [page + len(pages) for page in pages]
    monkeypatch.setattr(pool_loads, "_STALL_S", 30.0)
    assert fill(reader, "again", pages=(elsewhere,)).cause is None
    assert torch.equal(kv(reader, pages, OTHER_PAGE), before), "its pages may be others' by now"


def test_a_store_that_does_not_answer_keeps_no_page_of_a_save(
    store: LocalStore, rank: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_saves, "_WAITS_S", 0.2)
    silent = FaultyStore(store)
    silent.silent = threading.Event()
    writer = rank(PAGE, "a", store=silent)
    pages = tuple(range(CHUNK_TOKENS // PAGE))
    saves = [Save(f"save {n}", ROOT or b"", chunks()[0], (pages,)) for n in range(12)]
    for save_ in saves:
        writer.agent.submit(save_)
    for save_ in saves:
        assert isinstance(writer.end_of(save_.request), Saved)
    assert writer.count("pool_saves", cause="busy") == len(saves)
    silent.silent.set()
    monkeypatch.setattr(pool_saves, "_WAITS_S", 60.0)
    again = Save("again", ROOT or b"", chunks()[0], (pages,))
    until(lambda: store.status().writing == 0, "what was given up leaves no room taken")
    writer.agent.submit(again)
    until(lambda: store.find([again.chunk.key])[0] is not None, "a later one")


def test_an_idle_engine_pauses_while_chunks_are_read(store: LocalStore, rank: Make) -> None:
    """Its empty steps would take Python's lock from the threads that read."""
    slow = FaultyStore(store)
    writer, reader = rank(PAGE, "a"), rank(OTHER_PAGE, "other", store=slow)
    save(writer, store)
    assert reader.agent.wait_for_outcome(20.0), "nothing is under way"
    slow.silent = threading.Event()
    pages = list(range(len(TOKENS) // OTHER_PAGE))
    reader.agent.submit(Fill("a", ROOT or b"", tuple(chunks()), 0, len(TOKENS), (pages,)))
    paused = not reader.agent.wait_for_outcome(0.2)
    slow.silent.set()
    assert paused
    assert reader.agent.wait_for_outcome(20.0)
    found = reader.end_of("a")
    assert isinstance(found, Finished)
    assert found.cause is None


def test_a_silent_store_takes_no_thread_away_from_later_loads(
    store: LocalStore, rank: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk may be silent while the memory answers."""
    released, read = threading.Event(), pool_loads.Loader.read
    silent = [True]

    def hangs(*args: Any) -> Any:
        if silent[0]:
            released.wait(60)
        return read(*args)

    monkeypatch.setattr(pool_loads, "_STALL_S", 0.5)
    monkeypatch.setattr(pool_loads.Loader, "read", hangs)
    writer = rank(PAGE, "a")
    reader = rank(OTHER_PAGE, "other")
    save(writer, store)
    assert fill(reader).cause is Cause.STALLED
    silent[0] = False
    monkeypatch.setattr(pool_loads, "_STALL_S", 30.0)
    assert fill(reader, "again").cause is None
    released.set()


class Afar:
    """A store whose chunks of some keys come from afar, and have not come yet."""

    def __init__(self, store: LocalStore, keys: set[bytes]) -> None:
        self._store, self.keys, self.comes = store, keys, threading.Event()
        self.asked: list[bytes | list[bytes]] = []
        self.others_come, self.looks = False, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def brings_at_once(self, key: bytes) -> bool:
        return key not in self.keys

    def prefetch(self, keys: Sequence[bytes]) -> None:
        self.asked.append(list(keys))

    def bring(self, key: bytes) -> Any:
        self.asked.append(key)
        if key in self.keys:
            self.comes.wait(120)
            self.keys.discard(key)
        return self._store.bring(key)

    @property
    def far_moved_s(self) -> float:
        """While chunks of others come, one has come just now."""
        self.looks += 1
        return time.monotonic() if self.others_come else 0.0


def test_chunks_of_this_host_do_not_wait_behind_chunks_from_afar(
    store: LocalStore, rank: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_loads, "_STALL_S", 100.0)
    elsewhere = [chunk._replace(key=b"far" + chunk.key[3:]) for chunk in chunks()]
    afar = Afar(store, {chunk.key for chunk in elsewhere})
    writer, reader = rank(PAGE, "a"), rank(OTHER_PAGE, "other", store=afar)
    save(writer, store)
    pages = list(range(len(TOKENS) // OTHER_PAGE))
    far = Fill("far", ROOT or b"", tuple(elsewhere), 0, len(TOKENS), (pages,))
    others = [page + len(pages) for page in pages]
    try:
        reader.agent.submit(far)
        assert fill(reader, "here", pages=(others,)).cause is None
    finally:
        afar.comes.set()
    ended = reader.end_of("far")
    assert isinstance(ended, Finished)
    assert ended.miss is Miss.EVICTED


@pytest.mark.parametrize("others_come", [True, False])
def test_a_load_whose_chunks_wait_behind_others_is_not_stalled(
    store: LocalStore, rank: Make, monkeypatch: pytest.MonkeyPatch, others_come: bool
) -> None:
    monkeypatch.setattr(pool_loads, "_STALL_S", 0.05)
    writer = rank(PAGE, "a")
    save(writer, store)
    afar = Afar(store, {chunk.key for chunk in chunks()})
    afar.others_come = others_come
    reader = rank(OTHER_PAGE, "other", store=afar)
    pages = list(range(len(TOKENS) // OTHER_PAGE))
    try:
        reader.agent.submit(Fill("a", ROOT or b"", tuple(chunks()), 0, len(TOKENS), (pages,)))
        if others_come:
            until(lambda: afar.looks > 10, "looks whether the load has stalled")
            monkeypatch.setattr(pool_loads, "_STALL_S", 60.0)
            afar.comes.set()
        ended = reader.end_of("a")
    finally:
        afar.comes.set()
    assert isinstance(ended, Finished)
    assert ended.cause is (None if others_come else Cause.STALLED)
    if others_come:  # else it may have stalled before anything was asked for
        assert afar.asked[0] == [chunk.key for chunk in chunks()], (
            "all in one row, before any is waited for"
        )


def handed_over(producer: Rank, consumer: Rank, name: str) -> Finished:
    """Hand over one page of the producer's; again where a session was lost, or a lease has ended."""
    for attempt in range(20):
        producer.offer(f"{name} {attempt}", [0])
        consumer.load(producer.source, f"{name} {attempt}", [0])
        found = consumer.loaded(f"{name} {attempt}")
        if found.cause not in LATE:
            break
        time.sleep(0.1)
    return found


def test_kv_that_was_computed_on_int8_chunks_is_handed_over_where_int8_is_permitted_only(
    store: LocalStore, rank: Make
) -> None:
    save(rank(PAGE, "a", at_rest="int8"), store)
    prefill = rank(OTHER_PAGE, "prefill", at_rest="int8")
    exact = rank(OTHER_PAGE, "exact")
    assert handed_over(prefill, exact, "before").cause is None, "what it computed itself is exact"
    assert fill(prefill).cause is None
    refused = handed_over(prefill, exact, "after")
    assert refused.cause is Cause.CODEC
    assert "int8" in refused.detail
    for name, permits in ("b", {"at_rest": "int8"}), ("c", {"codec": "int8"}):
        other = rank(OTHER_PAGE, name, **permits)
        assert handed_over(prefill, other, name).cause is None
    assert handed_over(other, exact, "on").cause is Cause.CODEC, "nor by way of a third engine"
    prefill.die()
    until(lambda: prefill.count("agent_restarts"), "another thread of the agent")
    prefill.count("agent_failures")
    prefill.counts.clear()
    assert handed_over(prefill, exact, "anew").cause is Cause.CODEC, "its pages are the same"


def test_what_came_in_a_lossy_codec_is_not_handed_on_as_exact(ranks: Ranks) -> None:
    """Without a pool: an engine of both roles."""
    first, both = ranks(PATIENT | {"codec": "int8"}), ranks(PATIENT | {"codec": "int8"})
    exact = ranks(PATIENT)
    assert handed_over(both, exact, "before").cause is None
    assert handed_over(first, both, "int8").cause is None
    assert handed_over(both, exact, "after").cause is Cause.CODEC
    assert handed_over(first, exact, "raw").cause is None


def test_what_a_tier_could_not_take_is_counted(rank: Make, store: LocalStore) -> None:
    writer = rank(PAGE, "writer")
    folder = store._folders[0]
    for _ in range(2):
        store._tier_storage.troubles.failed(folder, OSError(errno.EROFS, "Read-only file system"))
    until(lambda: writer.count("pool_unwritten", tier="memory", cause="read_only") == 2)


def test_reads_under_way_are_waited_for_before_the_store_is_closed() -> None:
    readers, begun, released = pool_loads.Readers(), threading.Event(), threading.Event()

    def read() -> None:
        begun.set()
        released.wait(60.0)

    readers.submit(readers.threads, read)
    assert begun.wait(60.0)
    closing = threading.Thread(target=readers.close, args=(60.0,))
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    released.set()
    closing.join(60.0)
    assert not closing.is_alive()
    readers.close(60.0)  # nothing is left


def test_a_late_thread_wakes_nobody_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number may be another descriptor's by then. libzmq aborts if it is one of its own."""
    commands, written = CommandQueue(), list[int]()
    spied = SimpleNamespace(eventfd_write=lambda wakes, _: written.append(wakes), close=os.close)
    monkeypatch.setattr(commands_module, "os", spied)
    commands.wake()
    assert written == [commands.wakes]
    commands.close()
    commands.wake()
    assert written == [commands.wakes]
