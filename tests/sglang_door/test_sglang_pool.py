# SPDX-License-Identifier: Apache-2.0
"""The KV pool behind SGLang's own radix cache: what one engine computed another loads, verified, or does not load at all."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang.srt")

from sglang.srt.managers.schedule_batch import FINISH_LENGTH
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang_door.pool_engine import (
    FACTS,
    Engine,
    Make,
    Ranks,
    hooked,
    make,
    prompt,
    store,
    stored,
)
from sglang_door.test_sglang_sparse import sparse
from support.waits import until

from pd_connector.config import CONFIG_VARIABLE, Config
from pd_connector.errors import Cause, ConfigError, Miss, PDConnectorError, PoolError
from pd_connector.kv.model import ModelFacts
from pd_connector.pool import load_breakeven
from pd_connector.pool.advertised import ENGINE_VARIABLE
from pd_connector.pool.jobs import PromptChunk
from pd_connector.pool.store.base import FAR, MEMORY, Found
from pd_connector.pool.store.local import LocalStore
from pd_connector.sglang import hooks, plugin, pool_chunks, pool_hooks, pool_prompts
from pd_connector.sglang import pool as sglang_pool
from pd_connector.sglang.pool_rank import PoolRank
from pd_connector.sglang.pool_settings import OPTIONS, check_arguments, check_linker
from pd_connector.sglang.settings import load_config
from scheduler_plugins.sglang.plugin import report_pool

__all__ = ["hooked", "make", "store"]


@pytest.mark.parametrize("tree", ["rust", "python"])
@pytest.mark.parametrize(("here", "there"), [(16, 16), (1, 64), (64, 1), (16, 128)])
def test_what_one_engine_computed_another_loads(
    make: Make, store: LocalStore, here: int, there: int, tree: str
) -> None:
    writer, reader = make(page_size=here, tree=tree), make(page_size=there, tree=tree)
    assert writer.ask(prompt(700)) == 0
    until(lambda: stored(store) == 5)
    assert reader.ask(prompt(700)) == 640


@pytest.mark.parametrize("ranks", [1, 2])
def test_latents_are_loaded_by_ranks_that_each_hold_all_of_them(
    make: Make, store: LocalStore, ranks: int
) -> None:
    """MLA: a chunk has one part of the layers for each rank of its writer."""
    writers = [
        make(rank=(n, ranks), engine_id="w", latent=True, page_size=64) for n in range(ranks)
    ]
    for writer in writers:
        writer.compute(writer.request(prompt(400)))
    until(lambda: stored(store) == 3)
    assert make(latent=True, page_size=1).ask(prompt(400)) == 384


def test_a_flushed_engine_loads_what_it_has_saved(make: Make, store: LocalStore) -> None:
    engine = make()
    engine.ask(prompt(400))
    until(lambda: stored(store) == 3)
    engine.flush()
    assert engine.ask(prompt(400)) == 384


def test_only_what_the_cache_lacks_is_loaded(make: Make, store: LocalStore) -> None:
    """The cache ends within a chunk: the rest of the chunk is loaded behind it."""
    writer, reader = make(), make(write=False)
    writer.ask(prompt(700))
    until(lambda: stored(store) == 5)
    short = reader.request(prompt(200), read=False)
    reader.compute(short)
    req = reader.request(prompt(700))
    reader.arrive(req)
    reader.wait(req)
    slots = reader.load(req)
    assert len(slots) == 640
    reader.check(prompt(700), slots)


def test_a_prompt_that_waits_for_its_decode_engine_keeps_its_chunks(
    make: Make, store: LocalStore
) -> None:
    """A prefill engine's requests wait first until their decode engine is known."""
    make().ask(prompt(300))
    until(lambda: stored(store) == 2)
    reader = make(write=False)
    req, other = reader.request(prompt(300)), reader.request(prompt(300))
    reader.scheduler.disagg_prefill_bootstrap_queue = SimpleNamespace(queue=[req])
    for each in (req, other):  # the other one has been refused
        reader.linker.arrived(each)
    assert reader.schedulable() == []
    assert [*reader.rank.prompts._prompts] == [req.rid]
    reader.scheduler.disagg_prefill_bootstrap_queue.queue.clear()
    reader.scheduler.waiting_queue.append(req)
    reader.wait(req)
    assert len(reader.load(req)) == 256


def test_a_decode_engine_saves_and_gives_its_pages_back_and_loads_nothing(
    make: Make, store: LocalStore
) -> None:
    engine = make(consumes=True)
    engine.settle = lambda: None  # type: ignore[method-assign]  # SGLang does not look there
    engine.compute(engine.request(prompt(300)))
    until(lambda: stored(store) == 2)
    until(lambda: engine.linker.num_completed_offloads() == 1)
    assert len(engine.tree.linker.pending_offloads) == 1, "control: the pages are locked"
    pool_hooks.decodes(lambda scheduler: None, engine.scheduler)
    assert engine.tree.linker.pending_offloads == []
    engine.flush()
    req = engine.request(prompt(300))
    engine.arrive(req)
    assert engine.schedulable() == [req]
    assert len(engine.load(req)) == 0
    reader = make(audit="first", write=False)
    make().ask(prompt(700, 2))
    until(lambda: stored(store) == 7)
    assert [reader.ask(prompt(700, 2)), reader.ask(prompt(700, 2), salt="mine")] == [0, 0]
    reader.flush()
    assert reader.ask(prompt(700, 2)) == 640, "engines that compute have passed their audit"
    assert reader.ask(prompt(300)) == 0, "a decode engine has not"
    reader.flush()
    assert reader.ask(prompt(300)) == 256


@pytest.mark.parametrize("what", ["salt", "extra key", "weights", "read", "write"])
def test_unlike_requests_share_nothing(make: Make, store: LocalStore, what: str) -> None:
    writer = make()
    reader = make(facts=ModelFacts(b"config", b"others")) if what == "weights" else make()
    if what == "write":
        writer.ask(prompt(300), write=False)
        assert stored(store) == 0
        return
    writer.ask(prompt(300))
    until(lambda: stored(store) == 2)
    if what == "extra key":
        req = reader.request(prompt(300))
        req.extra_key = "mine"
        reader.arrive(req)
        reader.wait(req)
        assert len(reader.load(req)) == 0
        return
    other: dict[str, Any] = {"salt": {"salt": "mine"}, "read": {"read": False}}.get(what, {})
    assert reader.ask(prompt(300), **other) == 0
    if what != "weights":
        reader.flush()
        assert reader.ask(prompt(300)) == 256, "control"


def test_what_is_handed_over_after_a_load_names_the_codec_of_its_chunks(
    make: Make, store: LocalStore
) -> None:
    """KV that is computed behind rounded chunks is not exact: a decode engine that permits only `raw` refuses it."""
    int8 = Config(audit="off", pool={"codec": "int8"})
    make(config=int8).ask(prompt(300))
    until(lambda: stored(store) == 2)
    make().ask(prompt(300, 2))
    until(lambda: stored(store) == 4)
    handoffs = SimpleNamespace(passed="raw")
    prefill = make(config=int8, write=False, handoffs=handoffs)
    for seed, passed in ((2, "raw"), (1, "int8"), (2, "int8")):
        req = prefill.request(prompt(300, seed))
        prefill.arrive(req)
        prefill.wait(req)
        assert len(prefill.load(req)) == 256
        assert handoffs.passed == passed
        prefill.scheduler.waiting_queue.clear()
        prefill.flush()


def test_a_decode_engine_saves_nothing_that_came_in_a_coarse_codec(
    make: Make, store: LocalStore, caplog: pytest.LogCaptureFixture
) -> None:
    for codec, saves in (("fp8_e4m3", False), ("int8", True)):
        engine = make(config=Config(audit="off", pool=True, codec=codec), consumes=True)  # type: ignore[arg-type]
        assert engine.rank.saves == saves
        assert ("this engine does not save" in caplog.text) != saves
        engine.compute(engine.request(prompt(300)))
        caplog.clear()
    until(lambda: stored(store) == 2)


class _Loaded:
    """Adapters by SGLang's id."""

    def __init__(self, **contents: str) -> None:
        self.contents = contents

    def content(self, lora_id: str) -> str:
        if lora_id not in self.contents:
            raise PDConnectorError(f"adapter {lora_id} cannot be identified by its content")
        return self.contents[lora_id]


def test_adapters_are_known_by_their_content(make: Make, store: LocalStore) -> None:
    """SGLang's ids of adapters differ from engine to engine. It appends them to the extra key."""
    writer = make(adapters=_Loaded(a="content a", b="content b"))
    reader = make(adapters=_Loaded(b="content a", c="content c"), write=False)
    for lora_id in ("a", "unknown"):
        assert writer.ask(prompt(300), lora_id=lora_id) == 0
    until(lambda: stored(store) == 2)
    for lora_id, loaded in (("c", 0), ("unknown", 0), (None, 0), ("b", 256)):
        assert reader.ask(prompt(300), lora_id=lora_id) == loaded
        reader.flush()
    assert reader.ask(prompt(300), lora_id="b", salt="mine") == 0
    req = writer.request(prompt(300), lora_id="a")
    assert req.extra_key == "a"
    req.extra_key = "mine" + "a"  # as SGLang makes it of a client's own
    apart = writer.rank.apart(req)
    assert apart is not None
    assert apart.salt == pool_prompts.salt_of(None, "mine")
    assert apart.adapter == "content a"


def test_the_first_prompt_of_a_writer_is_computed_and_compared(
    make: Make, store: LocalStore
) -> None:
    writer, reader = make(engine_id="w"), make(engine_id="r", audit="first", page_size=64)
    for seed in (1, 2):
        writer.ask(prompt(300, seed))
    until(lambda: stored(store) == 4)
    assert reader.ask(prompt(300, 1)) == 0
    counts = reader.rank.telemetry.take()
    assert counts is not None
    assert counts.counts["audits", (("cause", "passed"),)] >= 1
    assert reader.ask(prompt(300, 2)) == 256


def test_chunks_of_a_wrong_writer_are_never_loaded(make: Make, store: LocalStore) -> None:
    writer, reader = make(engine_id="w", error=0.2), make(engine_id="r", audit="first")
    for seed in (1, 2):
        req = writer.request(prompt(300, seed))
        writer.compute(req)
    until(lambda: stored(store) == 4)
    assert reader.ask(prompt(300, 1)) == 0
    assert reader.ask(prompt(300, 2)) == 0
    counts = reader.rank.telemetry.take()
    assert counts is not None
    assert counts.counts["audits", (("cause", Cause.AUDIT),)] >= 1


def test_an_altered_byte_is_not_loaded_and_what_is_before_it_is(
    make: Make, store: LocalStore, tmp_path: Path
) -> None:
    writer, reader = make(), make()
    writer.ask(prompt(700))
    until(lambda: stored(store) == 5)
    chunks = pool_prompts.chunks_of(writer.rank.model, prompt(700), pool_prompts.Apart(""))
    files = (tmp_path / "pool").rglob("data/*")
    (file,) = (path for path in files if chunks[2].key.hex() in path.name)
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    assert reader.ask(prompt(700)) == 256


def test_files_that_go_after_they_were_read_are_loaded_all_the_same(
    make: Make, store: LocalStore
) -> None:
    """Control: an engine that asks afterwards finds nothing."""
    writer, reader = make(), make()
    writer.ask(prompt(700))
    until(lambda: stored(store) == 5)
    req = reader.request(prompt(700))
    reader.arrive(req)
    reader.wait(req)
    assert reader.match(req).host_hit_length == 640
    store.remove(store.keys())
    slots = reader.load(req)
    assert len(slots) == 640
    reader.check(prompt(700), slots)
    assert make().ask(prompt(700)) == 0


def test_chunks_that_were_loaded_are_not_taken_for_others(make: Make, store: LocalStore) -> None:
    """SGLang loads a part of what was named, does not admit the request, and asks again."""
    writer, reader = make(), make()
    writer.ask(prompt(700))
    until(lambda: stored(store) == 5)
    req = reader.request(prompt(700))
    reader.arrive(req)
    reader.wait(req)
    reader.match(req)
    slots = reader.allocator.alloc(256)
    assert reader.linker.load(req.rid, [SimpleNamespace(device_indices=slots)])
    assert reader.linker.cancel_queued_load(req.rid)
    assert reader.match(req).host_hit_length == 0
    assert not reader.linker.load(req.rid, [SimpleNamespace(device_indices=slots)])
    more = reader.allocator.alloc(384)
    assert not reader.linker.load(req.rid, [SimpleNamespace(device_indices=more)])


def test_no_length_is_named_before_its_chunks_are_verified(
    make: Make, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = make(), make()
    writer.ask(prompt(300))
    until(lambda: stored(store) == 2)
    may = threading.Event()
    read = reader.rank.prompts.held._loader.read

    def slow(*args: Any) -> Any:
        may.wait(60)
        return read(*args)

    monkeypatch.setattr(reader.rank.prompts.held._loader, "read", slow)
    req, other = reader.request(prompt(300)), reader.request(prompt(100, 9))
    reader.arrive(req)
    reader.arrive(other)
    time.sleep(0.05)
    assert reader.schedulable() == [other], "only the request that wants chunks waits"
    assert reader.scheduler.waiting_queue == [req, other], "in its place"
    assert reader.match(req).host_hit_length == 0
    may.set()
    reader.wait(req)
    assert reader.match(req).host_hit_length == 256


def test_a_store_that_does_not_answer_costs_a_computation(
    make: Make, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_prompts, "STALL_S", 0.2)
    writer, reader = make(), make()
    writer.ask(prompt(300))
    until(lambda: stored(store) == 2)
    stop = threading.Event()
    monkeypatch.setattr(
        reader.rank.prompts.held._loader, "read", lambda *args: stop.wait(60) and None
    )
    assert reader.ask(prompt(300)) == 0
    stop.set()


@pytest.mark.parametrize("others_come", [True, False])
def test_a_prompt_whose_chunks_wait_behind_others_is_not_stalled(
    make: Make, store: LocalStore, monkeypatch: pytest.MonkeyPatch, others_come: bool
) -> None:
    """Chunks of the far store come one after another, for all requests."""
    monkeypatch.setattr(pool_prompts, "STALL_S", 0.02)
    writer, reader = make(), make()
    writer.ask(prompt(300))
    until(lambda: stored(store) == 2)
    comes, looks, prompts = threading.Event(), [0], reader.rank.prompts
    find = prompts._store.find
    monkeypatch.setattr(
        prompts._store, "find", lambda keys: [hit and hit._replace(tier=FAR) for hit in find(keys)]
    )
    monkeypatch.setattr(prompts.held._loader, "bring", lambda chunk: comes.wait(60) and None)

    def moved(_: object) -> float:
        looks[0] += 1
        if looks[0] > 10:
            monkeypatch.setattr(pool_prompts, "STALL_S", 60.0)
            comes.set()
        return time.monotonic() if others_come else 0.0

    monkeypatch.setattr(pool_chunks.HeldChunks, "far_moved_s", property(moved))
    try:
        assert reader.ask(prompt(300)) == (256 if others_come else 0)
    finally:
        comes.set()


def test_after_a_chunk_that_came_too_late_none_of_its_tier_is_loaded(
    make: Make, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node stands still, and look-ups are answered. Control: a chunk that is gone."""
    writer, reader = make(), make(write=False)
    writer.ask(prompt(300))
    until(lambda: stored(store) == 2)
    reads: list[Miss] = []

    def fails(*_: Any) -> None:
        raise PoolError(reads[-1], "it has not come")

    monkeypatch.setattr(reader.rank.prompts.held._loader, "read", fails)
    for miss, loads in ((Miss.EVICTED, 2), (Miss.LATE, 0)):
        reads.append(miss)
        assert reader.ask(prompt(300)) == 0
        reader.flush()
        assert reader.rank.prompts.breakeven.chunks([(MEMORY, 10)] * 2, time.monotonic()) == loads


def test_a_tier_that_was_silent_is_probed_and_used_again(
    make: Make, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_breakeven, "FIRST_PAUSE_S", 0.05)
    writer, reader = make(), make(write=False)
    writer.ask(prompt(300))
    until(lambda: stored(store) == 2)
    reader.rank.prompts.breakeven.silent(MEMORY, time.monotonic())

    def loads() -> bool:
        reader.flush()
        return reader.ask(prompt(300)) == 256

    assert not loads(), "control"
    until(loads)


def test_the_time_until_the_scheduler_looks_is_not_the_stores(
    make: Make, store: LocalStore
) -> None:
    writer, reader = make(), make(write=False)
    writer.ask(prompt(300))
    until(lambda: stored(store) == 2)
    req = reader.request(prompt(300))
    reader.arrive(req)
    asked = reader.rank.prompts.get(req.rid)
    assert asked is not None
    until(lambda: asked.looked and all(chunk.done for chunk in asked.held))
    time.sleep(0.05)
    asked.began_s -= 100.0  # SGLang computes a long batch
    for chunk in asked.held:
        chunk.done_s -= 100.0
    reader.wait(req)
    speed = reader.rank.prompts.breakeven.bytes_per_s()[MEMORY]
    assert speed > sum(hit.nbytes for hit in asked.hits) / 50


def test_without_room_in_memory_the_rest_is_computed(
    make: Make, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = make(), make()
    writer.ask(prompt(700))
    until(lambda: stored(store) == 5)
    (found, *_) = store.find([store.keys()[0]])
    assert found is not None
    monkeypatch.setattr(pool_chunks, "MOST_HELD_BYTES", int(2.5 * found.nbytes))
    assert reader.ask(prompt(700)) == 256


def test_a_node_of_many_chunks_is_saved_in_turns(
    make: Make, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_pool, "MOST_SAVES", 2)
    engine = make()
    engine.compute(engine.request(prompt(400)))
    until(lambda: stored(store) == 2)
    engine.compute(engine.request(prompt(400)))
    until(lambda: stored(store) == 3)
    assert not engine.linker._begun, "if the pool loses them, they are saved again"


def test_what_a_request_keeps_out_of_the_pool_the_next_one_saves(
    make: Make, store: LocalStore
) -> None:
    engine = make()
    engine.compute(engine.request(prompt(300), write=False))
    assert stored(store) == 0
    engine.compute(engine.request(prompt(300)))
    until(lambda: stored(store) == 2)


def test_a_prompt_is_kept_as_long_as_its_client_wants(make: Make, store: LocalStore) -> None:
    """It is pinned once its request has ended, and again when its chunks were saved."""
    engine = make()
    for wishes, pinned in (({}, 0), ({"pin_s": 60.0}, 2)):
        req = engine.request(prompt(300), **wishes)
        engine.compute(req)
        until(lambda: stored(store) == 2)
        assert store.status().pinned == 0, "its answer goes on"
        req.finished_reason = FINISH_LENGTH(length=4)
        with engine.linker.inserting(req):
            pass
        until(lambda pinned=pinned: bool(store.status().pinned) == bool(pinned))


@pytest.mark.parametrize(
    ("wishes", "said"),
    [({"pin_s": -1.0}, "the pool is not used"), ({"tenant": "nobody"}, "not in the config key")],
)
def test_wishes_that_cannot_be_followed_are_logged_once(
    make: Make, caplog: pytest.LogCaptureFixture, wishes: dict[str, Any], said: str
) -> None:
    engine = make()
    req = engine.request(prompt(300), **wishes)
    engine.arrive(req)
    engine.compute(req)
    assert caplog.text.count(said) == 1


def held(engine: Engine) -> int:
    return engine.rank.prompts.held.nbytes


def test_nothing_is_held_for_requests_that_are_over(make: Make, store: LocalStore) -> None:
    writer, reader = make(), make()
    writer.ask(prompt(700))
    until(lambda: stored(store) == 5)
    assert reader.ask(prompt(700)) == 640
    reader.flush()
    req = reader.request(prompt(700))
    reader.arrive(req)
    reader.wait(req)
    assert held(reader) > 0
    reader.scheduler.waiting_queue.clear()  # aborted
    reader.schedulable()
    until(lambda: held(reader) == 0)
    req = reader.request(prompt(700))
    reader.arrive(req)
    reader.flush()
    until(lambda: held(reader) == 0)


def test_requests_that_want_the_same_chunks_read_them_once(
    make: Make, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = make(), make()
    writer.ask(prompt(700))
    until(lambda: stored(store) == 5)
    reads, read = [], reader.rank.prompts.held._loader.read

    def counted(*args: Any) -> Any:
        reads.append(args)
        return read(*args)

    monkeypatch.setattr(reader.rank.prompts.held._loader, "read", counted)
    reqs = [reader.request(prompt(700)) for _ in range(3)]
    for req in reqs:
        reader.arrive(req)
    for req in reqs:
        reader.wait(req)
    assert len(reads) == 5
    for req in reqs:
        slots = reader.load(req)
        assert len(slots) == 640
        reader.check(prompt(700), slots)
    reader.scheduler.waiting_queue.clear()
    reader.schedulable()
    until(lambda: held(reader) == 0)


def test_after_a_change_of_weights_nothing_of_before_is_loaded_or_saved(
    make: Make, store: LocalStore
) -> None:
    writer, reader = make(), make()
    writer.ask(prompt(300))
    until(lambda: stored(store) == 2)
    req = reader.request(prompt(300))
    reader.arrive(req)
    reader.wait(req)
    assert reader.match(req).host_hit_length == 256, "control"
    reader.watch.withdrawn = True
    assert reader.match(req).host_hit_length == 0
    other = reader.request(prompt(300, 5))
    reader.compute(other)
    assert stored(store) == 2, "nobody knows whose KV this is"
    reader.watch.withdrawn = False
    reader.watch.change(ModelFacts(b"config", b"new"))
    reader.rank.stepped(0)
    assert reader.match(req).host_hit_length == 0
    until(lambda: held(reader) == 0)
    reader.flush()
    reader.ask(prompt(300))
    until(lambda: stored(store) == 4)
    reader.flush()
    assert reader.ask(prompt(300)) == 256, "its own, of the new weights"


def loaded_by(halves: list[Engine], tokens: list[int], **more: Any) -> list[int]:
    """The tokens of a request that each of two ranks has loaded. They wait for each other, as SGLang's do."""
    loaded = [-1, -1]

    def run(number: int) -> None:
        half = halves[number]
        req = half.request(tokens, **more)
        half.arrive(req)
        while req not in half.schedulable():
            time.sleep(0.005)
        slots = half.load(req)
        half.check(tokens, slots)
        loaded[number] = len(slots)

    threads = [threading.Thread(target=run, args=(n,)) for n in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    return loaded


def test_ranks_agree_where_one_does_not_know_an_adapter(make: Make, store: LocalStore) -> None:
    """Each rank reads an adapter's files by itself, and can find them changed. A rank without the prompt would not meet the
    other one, which waits for it."""
    make(adapters=_Loaded(a="content")).ask(prompt(300), lora_id="a")
    until(lambda: stored(store) == 2)
    ranks, contents = Ranks(), ({"a": "content"}, {})
    halves = [
        make(rank=(n, 2), reduce=ranks.reduce(n), write=False, adapters=_Loaded(**contents[n]))
        for n in (0, 1)
    ]
    assert loaded_by(halves, prompt(300), lora_id="a") == [0, 0]
    ranks = Ranks()
    halves = [
        make(rank=(n, 2), reduce=ranks.reduce(n), write=False, adapters=_Loaded(a="content"))
        for n in (0, 1)
    ]
    assert loaded_by(halves, prompt(300), lora_id="a") == [256, 256], "control"


@pytest.mark.parametrize("slow", [False, True])
def test_ranks_load_what_all_of_them_hold(
    make: Make, store: LocalStore, monkeypatch: pytest.MonkeyPatch, slow: bool
) -> None:
    """One rank loses a chunk, or is slower: both name the same lengths."""
    writer = make()
    writer.ask(prompt(700))
    until(lambda: stored(store) == 5)
    ranks = Ranks()
    halves = [make(rank=(n, 2), page_size=64, reduce=ranks.reduce(n), write=False) for n in (0, 1)]
    loader = halves[1].rank.prompts.held._loader
    read = loader.read

    def reads(chunk: Any, *args: Any) -> Any:
        if slow:
            time.sleep(0.1)
        elif chunk.number == 3:
            raise pool_chunks.PoolError(pool_chunks.Miss.EVICTED, "gone")
        return read(chunk, *args)

    monkeypatch.setattr(loader, "read", reads)
    assert loaded_by(halves, prompt(700)) == ([640, 640] if slow else [384, 384])


def test_two_ranks_save_and_one_loads(make: Make, store: LocalStore) -> None:
    halves = [make(rank=(n, 2), engine_id="w", page_size=64) for n in (0, 1)]
    for half in halves:
        half.compute(half.request(prompt(400)))
    until(lambda: stored(store) == 3)
    assert make().ask(prompt(400)) == 384


def test_a_flush_waits_until_no_page_is_read(make: Make, store: LocalStore) -> None:
    """Pages that are handed out again afterwards do not get into chunks."""
    engine = make()
    req = engine.request(prompt(700))
    engine.settle = lambda: None  # type: ignore[method-assign]
    engine.compute(req)
    engine.flush()
    for buffer in (*engine.pool.k_buffer, *engine.pool.v_buffer):
        buffer.zero_()
    until(lambda: not engine.linker._jobs)
    reader = make()
    loaded = reader.request(prompt(700))
    reader.arrive(loaded)
    reader.wait(loaded)
    reader.check(prompt(700), reader.load(loaded))


def test_the_config_key_sets_sglangs_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.arg_groups.model_override_base import resolved_view
    from sglang.srt.server_args import ServerArgs

    for text, used in (('{"pool": true}', True), ("", False), ('{"pool": false}', False)):
        monkeypatch.setenv(CONFIG_VARIABLE, text)
        args = ServerArgs(model_path="dummy")
        pool_hooks.resolved(lambda server_args: None, args)
        view = resolved_view(args)
        assert (ENGINE_VARIABLE in os.environ) == used
        monkeypatch.delenv(ENGINE_VARIABLE, raising=False)
        assert view.enable_unified_cache_external_linker == used
        if used:
            assert {name: getattr(view, name) for name in OPTIONS} == OPTIONS


def test_the_http_server_reports_the_pool_of_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[Any] = []
    app = SimpleNamespace(add_middleware=lambda kind, **options: added.append(options))
    server = SimpleNamespace(app=app)
    monkeypatch.setitem(sys.modules, "sglang.srt.entrypoints.http_server", server)
    monkeypatch.delenv(ENGINE_VARIABLE, raising=False)
    report_pool()
    assert added == []
    monkeypatch.setenv(ENGINE_VARIABLE, "sglang-1")
    report_pool()
    assert added == [{"engine": "sglang-1"}]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"disable_radix_cache": True}, "--disable-radix-cache"),
        ({"enable_lmcache": True}, "--enable-lmcache"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-transfer-backend"),
        ({"pp_size": 2}, "--pp-size"),
        ({"nnodes": 2}, "--nnodes"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm"),
        (
            {"unified_cache_external_linker_config": {"a": 1}},
            "--unified-cache-external-linker-config",
        ),
    ],
)
def test_what_cannot_be_beside_a_pool_is_refused_by_its_flag(
    given: dict[str, Any], named: str
) -> None:
    check_arguments(SimpleNamespace())  # control
    with pytest.raises(ConfigError, match=named):
        check_arguments(SimpleNamespace(**given))


def test_sparse_attention_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its index keys would be loaded after SGLang is told that their layer is complete."""
    alone = SimpleNamespace(attn_dp_size=1, attn_tp_rank=0, attn_tp_size=1)
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: alone)
    scheduler = SimpleNamespace(
        model_config=SimpleNamespace(), token_to_kv_pool_allocator=SimpleNamespace()
    )
    with pytest.raises(ConfigError, match=r"sparse attention \(DSA\)"):
        PoolRank.of(scheduler, sparse(), Config(pool=True), lambda outcome: None)


def test_recurrent_states_are_refused_by_name() -> None:
    params = SimpleNamespace(page_size=64)
    check_linker(SimpleNamespace(), params, {ComponentType.FULL})  # control
    with pytest.raises(ConfigError, match="MAMBA"):
        check_linker(SimpleNamespace(), params, {ComponentType.FULL, ComponentType.MAMBA})


def test_an_sglang_without_a_linker_keeps_the_backend_unless_the_engine_has_a_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The backend's own functions are checked in any case."""
    assert plugin._pool_hooks() == hooks.POOL_HOOKS, "control"
    missing = hooks.Hook("sglang.srt.no_linker.Wrapper.match", ("self",), lambda *_: None)
    monkeypatch.setattr(plugin, "POOL_HOOKS", (missing,))
    monkeypatch.setenv(CONFIG_VARIABLE, "")
    assert plugin._pool_hooks() == ()
    monkeypatch.setenv(CONFIG_VARIABLE, '{"pool": true}')
    with pytest.raises(PDConnectorError, match="no_linker"):
        plugin._pool_hooks()


def test_an_audit_is_the_pools_alone() -> None:
    assert load_config('{"pool": true}').audit == "first"
    assert load_config('{"pool": true, "audit": "off"}').audit == "off"
    for wrong in ('{"audit": "first"}', '{"pool": true, "audit": 0.1}'):
        with pytest.raises(ConfigError, match="audit"):
            load_config(wrong)


def test_chunks_of_this_host_do_not_wait_behind_chunks_from_afar() -> None:
    comes = threading.Event()

    class Slow:
        """A loader whose chunks of other hosts do not come."""

        def bring(self, chunk: PromptChunk) -> None:
            comes.wait(120)
            raise PoolError(Miss.LATE, "it has not come")

        def read(self, chunk: PromptChunk, *more: Any) -> Any:
            if chunk.key.startswith(b"far"):
                self.bring(chunk)
            raise PoolError(Miss.EVICTED, "read")

    held = pool_chunks.HeldChunks(Slow(), None, lambda: None)  # type: ignore[arg-type]
    try:

        def hold(key: bytes, tier: str) -> pool_chunks.HeldChunk:
            chunk = PromptChunk(0, key, b"", b"", b"", "", b"")
            found = held.hold(chunk, Found(tier, (), 10), FACTS)
            assert found
            return found

        half = Found(FAR, (), pool_chunks.MOST_HELD_BYTES // 2)
        assert held.fitting([half] * 3) == 2
        far = [hold(b"far %d" % number, FAR) for number in range(4)]
        assert held.fitting([half] * 3) == 1
        here = hold(b"here", MEMORY)
        until(lambda: here.done, "the chunk of this host")
        assert here.problem == (Miss.EVICTED, "read")
        assert not any(each.done for each in far)
        comes.set()
        until(lambda: all(each.done for each in far), "the others")
        assert {each.problem for each in far} == {(Miss.LATE, "it has not come")}
    finally:
        comes.set()
        held.close()
