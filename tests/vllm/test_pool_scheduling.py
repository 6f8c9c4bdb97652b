# SPDX-License-Identifier: Apache-2.0
"""The pool in vLLM's own scheduler: what is saved and loaded, and which pages are kept for how long."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from support.clocks import Clock
from support.pool_stores import wait_for_books
from support.vllm_computing import full, window
from support.vllm_steps import PAGE, SteppedEngine
from support.waits import until
from vllm.lora.request import LoRARequest

from pd_bench.pool.faulty_store import FaultyStore
from pd_connector.errors import Cause, Miss
from pd_connector.pool import client_pins, host
from pd_connector.pool import load_breakeven as worth
from pd_connector.pool.advertised import find_engine
from pd_connector.pool.jobs import Fill, Save
from pd_connector.pool.keys import CHUNK_TOKENS, chain
from pd_connector.pool.store.base import FAR, MEMORY, Writing
from pd_connector.vllm.identity import loaded_model as pool_model
from pd_connector.vllm.identity.adapters import Adapters
from pd_connector.vllm.messages import AuditReport, Cut, WorkerActivity
from pd_connector.vllm.pool import lookups as pool_looks
from pd_connector.vllm.pool import saves as pool_saves
from pd_connector.vllm.pool import sharing as pool_sharing

MODEL = b"m" * 32


@pytest.fixture(autouse=True)
def shm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="pd-test-", dir="/dev/shm"))
    monkeypatch.setenv("PD_CONNECTOR_SHM", str(folder))
    monkeypatch.setattr(host, "_stores", {})
    monkeypatch.setattr(pool_looks, "LOOK_S", 60.0)  # on a busy machine, too
    monkeypatch.setattr(pool_looks, "_SLOW_S", 60.0)
    wait_for_books(monkeypatch)
    yield folder
    for store in host._stores.values():
        store.close()
    shutil.rmtree(folder)


def engine(**extra: Any) -> SteppedEngine:
    """An engine whose ranks have told their model."""
    made = SteppedEngine(budget=CHUNK_TOKENS, audit="off", pool={"memory": "64MiB", **extra})
    made.step(WorkerActivity(models={0: MODEL}))
    return made


def saves(of: SteppedEngine) -> list[Save]:
    return [command for command in of.commands if isinstance(command, Save)]


def fills(of: SteppedEngine) -> list[Fill]:
    return [command for command in of.commands if isinstance(command, Fill)]


def run(of: SteppedEngine, steps: int = 12) -> None:
    """Steps in which the ranks copy what they are told to."""
    for _ in range(steps):
        of.step(answers(of))


def answers(of: SteppedEngine) -> WorkerActivity:
    return WorkerActivity(saved=dict.fromkeys((save.request for save in saves(of)), 1))


def stored(
    of: SteppedEngine,
    chunks: int,
    seed: int = 0,
    part: str = "0-1.0of1",
    adapter: str = "",
    nbytes: int = 100,
) -> list[bytes]:
    """Put the first chunks of the prompt of this seed into the store, without their KV."""
    store = of.store
    tokens = [(seed * 31 + place) % 250 for place in range(chunks * CHUNK_TOKENS)]
    keys = chain(MODEL, tokens, adapter=adapter)
    for parent, key in zip([b"", *keys], keys, strict=False):
        writing = store.begin(key, parent=parent, part=part, parts=1, nbytes=nbytes, writer="x")
        assert isinstance(writing, Writing)
        with writing:
            writing.write(0, memoryview(bytes(nbytes)))
            assert writing.publish()
    return keys


def test_each_whole_chunk_is_saved_once_and_its_pages_come_free_with_the_answer() -> None:
    of = engine()
    add(of, "a", 2 * CHUNK_TOKENS + 40, max_tokens=100)
    run(of, 120)
    assert not of.scheduler.requests
    assert [save.chunk.number for save in saves(of)] == [0, 1, 2], "the last one holds answers, too"
    assert [save.chunk.key for save in saves(of)][:2] == chain(
        MODEL, [place % 250 for place in range(2 * CHUNK_TOKENS)]
    )
    of.assert_nothing_held()


def test_a_prompt_that_was_handed_over_is_saved_with_the_first_chunk_of_its_answer() -> None:
    """A prefill engine of the same host saves it meanwhile, so that the first tokens are computed undisturbed."""
    of = engine()
    for name, answer in (("long", CHUNK_TOKENS + 20), ("short", 20)):
        before = len(saves(of))
        of.fetch(name, 2 * CHUNK_TOKENS + 40, max_tokens=answer, seed=len(name))
        of.step()
        of.step(finished_recving={name})
        run(of, 15)
        assert name == "short" or len(saves(of)) == before, (
            "not while the first tokens are computed"
        )
        run(of, 140)
        assert not of.scheduler.requests
        numbers = [save.chunk.number for save in saves(of)[before:]]
        assert numbers == ([0, 1, 2] if name == "long" else [0, 1]), "with its end at the latest"
    of.assert_nothing_held()


def test_chunks_for_which_too_many_saves_are_under_way_are_saved_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_saves, "MOST_SAVES", 2)
    of = SteppedEngine(budget=8 * CHUNK_TOKENS, audit="off", pool={"memory": "64MiB"})
    of.step(WorkerActivity(models={0: MODEL}))
    add(of, "a", 5 * CHUNK_TOKENS + 20, max_tokens=50)
    run(of, 60)
    assert [save.chunk.number for save in saves(of)] == [0, 1, 2, 3, 4]
    of.assert_nothing_held()


def test_pages_are_kept_until_the_ranks_have_answered() -> None:
    of = engine()
    add(of, "a", CHUNK_TOKENS, max_tokens=1)
    for _ in range(4):
        of.step()
    assert len(saves(of)) == 1
    with pytest.raises(AssertionError):
        of.assert_nothing_held()
    assert of.side.saving
    assert of.side.pending_work, "steps go on without a request"
    of.step(answers(of))
    of.assert_nothing_held()
    assert not of.side.pending_work


def test_the_prefix_cache_can_be_reset_while_pages_are_kept_for_saves() -> None:
    of = engine()
    add(of, "a", CHUNK_TOKENS, max_tokens=1)
    for _ in range(4):
        of.step()
    assert of.side.saving
    free = of.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    assert of.scheduler.reset_prefix_cache()
    assert of.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free, "still kept"
    add(of, "b", CHUNK_TOKENS - 20, max_tokens=4)
    of.step()
    kept = {page for save in saves(of) for table in save.pages for page in table}
    tables = of.scheduler.kv_cache_manager.get_block_ids("b")
    pages = {page for table in tables for page in table}
    assert pages
    assert not kept & pages, "nothing overwrites them"
    assert not of.scheduler.reset_prefix_cache(), "a request runs, as in vLLM alone"
    run(of)
    of.assert_nothing_held()


def test_a_step_that_fills_cached_pages_saves_none_of_them() -> None:
    """vLLM puts pages into its cache when it schedules their computation: a second request finds them before they
    are filled."""
    of = SteppedEngine(budget=4 * CHUNK_TOKENS, audit="off", pool={"memory": "64MiB"})
    of.step(WorkerActivity(models={0: MODEL}))
    add(of, "a", CHUNK_TOKENS + 20, max_tokens=4)
    add(of, "b", CHUNK_TOKENS + 20, max_tokens=4)
    assert [c for c in of.step() if isinstance(c, Save)] == []
    assert len([c for c in of.step() if isinstance(c, Save)]) == 2, "of either: the store decides"


def test_a_hit_is_loaded_and_the_rest_is_computed() -> None:
    of = engine()
    keys = stored(of, 2)
    add(of, "a", 2 * CHUNK_TOKENS + 50, max_tokens=2)
    of.step()
    (fill,) = fills(of)
    assert (fill.first_token, fill.stop_token) == (0, 2 * CHUNK_TOKENS)
    assert [chunk.key for chunk in fill.chunks] == keys
    assert min(fill.pages[0]) > 0
    settle(of)
    assert of.store.status().pinned == 1, "the deepest keeps those before it"
    of.step(finished_recving={"a"})
    settle(of)
    assert of.store.status().pinned == 0
    run(of)
    assert saves(of) == [], "what was loaded is not saved again"
    of.assert_nothing_held()


def test_a_prompt_of_whole_chunks_leaves_its_last_token_to_be_computed() -> None:
    of = engine()
    stored(of, 2)
    add(of, "a", 2 * CHUNK_TOKENS, max_tokens=2)
    of.step()
    assert fills(of)[0].stop_token == 2 * CHUNK_TOKENS - 1


def test_pages_that_this_engine_has_cached_are_not_loaded() -> None:
    of = engine()
    add(of, "a", CHUNK_TOKENS + 16, max_tokens=1)
    run(of, 6)
    stored(of, 3)
    add(of, "b", 3 * CHUNK_TOKENS + 5, max_tokens=1)
    of.step(answers(of))
    (fill,) = fills(of)
    assert fill.first_token == CHUNK_TOKENS + 16
    assert [chunk.number for chunk in fill.chunks] == [1, 2]
    cached = fill.first_token // 16
    assert set(fill.pages[0][:cached]) == {-1}, "they are other requests', too"


@pytest.mark.parametrize(
    ("codec", "at_rest", "loads"),
    [("raw", "raw", 0), ("int8", "raw", 1), ("auto", "raw", 1), ("raw", "int8", 1)],
)
def test_a_look_up_passes_over_chunks_of_a_codec_that_is_not_permitted(
    monkeypatch: pytest.MonkeyPatch, codec: str, at_rest: str, loads: int
) -> None:
    of = SteppedEngine(
        budget=CHUNK_TOKENS, audit="off", codec=codec, pool={"memory": "64MiB", "codec": at_rest}
    )
    of.step(WorkerActivity(models={0: MODEL}))
    missed: Counter[str] = Counter()
    monkeypatch.setattr(
        of.side.telemetry, "count", lambda _, n=1, cause="": missed.update({str(cause): n})
    )
    stored(of, 2, part="0-1.0of1.int8")
    add(of, "a", 2 * CHUNK_TOKENS + 50, max_tokens=1)
    of.step()
    assert len(fills(of)) == loads
    assert missed["codec"] == (0 if loads else 2)


@pytest.mark.parametrize(
    ("draft", "part", "loads"),
    [
        ("", "0-1.0of1", 1),
        ("", "0-1.0of1-d00c0ffee", 1),
        ("00c0ffee", "0-1.0of1", 0),
        ("00c0ffee", "0-1.0of1-dffffffff", 0),
        ("00c0ffee", "0-1.0of1.int8-d00c0ffee", 1),
    ],
)
def test_an_engine_that_drafts_passes_over_chunks_without_its_draft_model_and_saves_them_anew(
    monkeypatch: pytest.MonkeyPatch, draft: str, part: str, loads: int
) -> None:
    of = SteppedEngine(
        budget=CHUNK_TOKENS, audit="off", codec="int8", pool={"memory": "64MiB", "codec": "int8"}
    )
    of.step(WorkerActivity(models={0: MODEL}, draft=draft))
    missed: Counter[str] = Counter()
    monkeypatch.setattr(
        of.side.telemetry, "count", lambda _, n=1, cause="": missed.update({str(cause): n})
    )
    stored(of, 2, part=part)
    add(of, "a", 2 * CHUNK_TOKENS + 50, max_tokens=1)
    of.step()
    assert len(fills(of)) == loads
    assert missed["draft"] == (0 if loads else 2)
    if not loads:
        run(of)
        assert [save.chunk.number for save in saves(of)] == [0, 1]


def test_a_load_that_fails_is_computed_and_not_tried_again() -> None:
    of = engine()
    stored(of, 2)
    add(of, "a", 2 * CHUNK_TOKENS + 50, max_tokens=2)
    of.step()
    of.step(WorkerActivity(causes={"a": Cause.POOL}), finished_recving={"a"}, failed_recving={"a"})
    run(of)
    assert len(fills(of)) == 1
    of.assert_nothing_held()


def break_off(of: SteppedEngine, name: str, stop: int, cause: Cause, miss: Miss | None) -> None:
    """The rank's load ends at a chunk that it cannot use; vLLM is told which pages it has left."""
    (fill,) = [one for one in fills(of) if one.request == name][-1:]
    activity = WorkerActivity(causes={name: cause}, cuts={name: Cut(stop, cause, miss)})
    invalid = set(fill.pages[0][stop // PAGE :]) if stop > fill.first_token else set()
    failed = set() if invalid else {name}
    of.step(activity, finished_recving={name}, failed_recving=failed, invalid_block_ids=invalid)


@pytest.mark.parametrize("miss", [Miss.DAMAGED, Miss.EVICTED, Miss.UNLIKE, None])
def test_a_load_that_breaks_off_keeps_its_first_chunks(miss: Miss | None) -> None:
    of = engine()
    keys = stored(of, 3)
    add(of, "a", 3 * CHUNK_TOKENS + 50, max_tokens=2)
    of.step()
    cause = Cause.POOL if miss else Cause.STALLED
    if miss in (Miss.DAMAGED, Miss.EVICTED):
        of.store.remove(keys[1:2])
    break_off(of, "a", CHUNK_TOKENS, cause, miss)
    output = of.scheduler.schedule()
    assert output.scheduled_new_reqs[0].num_computed_tokens == CHUNK_TOKENS
    assert len(fills(of)) == 1, "nothing of it is asked for again"


def test_a_chunk_that_was_removed_is_saved_again_and_hits_are_those_that_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = engine()
    hits: list[float] = []
    monkeypatch.setattr(
        of.side.telemetry, "count", lambda name, n=1, **_: name == "pool_hits" and hits.append(n)
    )
    keys = stored(of, 3)
    add(of, "a", 3 * CHUNK_TOKENS + 50, max_tokens=2)
    of.step()
    of.store.remove(keys[1:2])
    break_off(of, "a", CHUNK_TOKENS, Cause.POOL, Miss.DAMAGED)
    run(of)
    assert hits == [1]
    assert saves(of)[0].chunk.key == keys[1]
    of.assert_nothing_held()


def test_chunks_from_the_far_store_before_a_bad_one_count(monkeypatch: pytest.MonkeyPatch) -> None:
    of = engine()
    counted: Counter[str] = Counter()
    monkeypatch.setattr(
        of.side.telemetry, "count", lambda name, n=1, **_: counted.update({name: int(n)})
    )
    stored(of, 3)
    find = of.store.find
    monkeypatch.setattr(
        type(of.store),
        "find",
        lambda _, keys: [hit and hit._replace(tier=FAR) for hit in find(keys)],
    )
    add(of, "a", 3 * CHUNK_TOKENS + 50, max_tokens=2)
    of.step()
    break_off(of, "a", 2 * CHUNK_TOKENS, Cause.POOL, Miss.EVICTED)
    assert (counted["pool_hits"], counted["pool_far_hits"]) == (2, 2)


@pytest.mark.parametrize("wait_s", [0.0, 1e6])
def test_no_load_begins_that_would_wait_for_longer_than_computing_takes(
    monkeypatch: pytest.MonkeyPatch, wait_s: float
) -> None:
    of = engine()
    stored(of, 3)
    of.side.pool._breakeven.computed(1000, 1.0)
    find = of.store.find
    monkeypatch.setattr(
        type(of.store),
        "find",
        lambda _, keys: [hit and hit._replace(tier=FAR, wait_s=wait_s) for hit in find(keys)],
    )
    add(of, "a", 3 * CHUNK_TOKENS + 50, max_tokens=2)
    of.step()
    assert len(fills(of)) == (0 if wait_s else 1)


@pytest.mark.parametrize(("tier", "loads"), [(FAR, ["r0"]), (MEMORY, ["r0", "r1"])])
def test_of_requests_that_come_at_once_no_more_load_than_pays(
    monkeypatch: pytest.MonkeyPatch, tier: str, loads: list[str]
) -> None:
    """All are looked up before the first load begins, so the carrier knows of none. Control: chunks of this host."""
    of = engine()
    for seed in (0, 1):
        stored(of, 3, seed)
    of.side.pool._breakeven.computed(1000, 1.0)  # 0.128 s for a chunk
    of.side.pool._breakeven.loaded(tier, 100, 0.1)  # of one chunk
    find = of.store.find
    monkeypatch.setattr(
        type(of.store),
        "find",
        lambda _, keys: [hit and hit._replace(tier=tier) for hit in find(keys)],
    )
    for seed in (0, 1):
        add(of, f"r{seed}", 3 * CHUNK_TOKENS + 50, max_tokens=2, seed=seed)
    of.step()
    assert [fill.request for fill in fills(of)] == loads
    run(of)
    of.step(finished_recving=set(loads))
    run(of)
    assert not of.side.pool._looks.coming


def test_a_chunk_that_no_one_here_can_use_is_not_looked_for_again() -> None:
    of = engine()
    stored(of, 3)
    for name in ("a", "b"):
        add(of, name, 3 * CHUNK_TOKENS + 50, max_tokens=1)
        of.step()
        if name == "a":
            break_off(of, name, CHUNK_TOKENS, Cause.POOL, Miss.UNLIKE)
        run(of)
        of.scheduler.kv_cache_manager.reset_prefix_cache()
    assert [len(fill.chunks) for fill in fills(of)] == [3, 1]


@pytest.mark.parametrize(
    "stops", [(2 * CHUNK_TOKENS, CHUNK_TOKENS), (CHUNK_TOKENS, 2 * CHUNK_TOKENS)]
)
def test_ranks_that_break_off_at_unlike_chunks_keep_what_all_have(
    stops: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    of = engine()
    hits: list[float] = []
    monkeypatch.setattr(
        of.side.telemetry, "count", lambda name, n=1, **_: name == "pool_hits" and hits.append(n)
    )
    stored(of, 3)
    add(of, "a", 3 * CHUNK_TOKENS + 50, max_tokens=2)
    of.step()
    pages = fills(of)[0].pages[0]
    for stop in stops:
        cut = Cut(stop, Cause.POOL, Miss.EVICTED)
        ended = {"a"} if stop == stops[-1] else None
        of.step(
            WorkerActivity(causes={"a": Cause.POOL}, cuts={"a": cut}),
            finished_recving=ended,
            invalid_block_ids=set(pages[stop // PAGE :]),
        )
    assert hits == [1]
    output = of.scheduler.schedule()
    assert output.scheduled_new_reqs[0].num_computed_tokens == CHUNK_TOKENS


def test_an_unlike_writer_behind_good_chunks_is_compared_from_its_chunk_on() -> None:
    of = engine()
    stored(of, 3)
    add(of, "a", 3 * CHUNK_TOKENS + 50, max_tokens=4)
    of.step()
    break_off(of, "a", CHUNK_TOKENS, Cause.UNAUDITED, None)
    run(of)
    compared = fills(of)[-1]
    assert compared.compares
    assert (compared.first_token, compared.stop_token) == (CHUNK_TOKENS, 3 * CHUNK_TOKENS)


def loading_with_windows(chunks: int) -> SteppedEngine:
    """An engine with a sliding window that loads all chunks of its request `a`."""
    of = SteppedEngine(
        specs=(window(64), full()), budget=CHUNK_TOKENS, audit="off", pool={"memory": "64MiB"}
    )
    of.step(WorkerActivity(models={0: MODEL}))
    stored(of, chunks)
    add(of, "a", chunks * CHUNK_TOKENS + 50, max_tokens=2)
    of.step()
    return of


def test_where_a_window_slides_the_first_chunks_are_loaded_again() -> None:
    """vLLM keeps nothing of such a load: pages before the window of its end were never filled."""
    of = loading_with_windows(3)
    cut = Cut(CHUNK_TOKENS, Cause.POOL, Miss.EVICTED)
    of.step(
        WorkerActivity(causes={"a": Cause.POOL}, cuts={"a": cut}),
        finished_recving={"a"},
        failed_recving={"a"},
    )
    of.step()
    assert [fill.stop_token for fill in fills(of)] == [3 * CHUNK_TOKENS, CHUNK_TOKENS]
    of.step(finished_recving={"a"})
    run(of)
    of.assert_nothing_held()


def test_a_prompt_whose_chunks_lack_their_windows_is_soon_computed() -> None:
    """Answers have no windows but the last one. Each load ends at a chunk before which another window is missing."""
    of = loading_with_windows(6)
    for number in (5, 4, 3):
        cut = Cut(number * CHUNK_TOKENS, Cause.POOL, Miss.UNLIKE)
        of.step(
            WorkerActivity(causes={"a": Cause.POOL}, cuts={"a": cut}),
            finished_recving={"a"},
            failed_recving={"a"},
        )
        of.step()
    assert [fill.stop_token // CHUNK_TOKENS for fill in fills(of)] == [6, 5, 4]
    run(of)
    of.assert_nothing_held()


def test_where_vllm_wants_fewer_tokens_than_it_was_told_the_first_ones_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM computes the end of some sliding windows again."""
    of = engine()
    stored(of, 3)
    connector = of.scheduler.connector
    matched = connector.get_num_new_matched_tokens

    def fewer(*what: Any) -> tuple[int | None, bool]:
        found, loads = matched(*what)
        return found and found - PAGE, loads

    monkeypatch.setattr(connector, "get_num_new_matched_tokens", fewer)
    add(of, "a", 3 * CHUNK_TOKENS + 30, max_tokens=2)
    of.step()
    (load,) = fills(of)
    assert (load.first_token, load.stop_token) == (0, 3 * CHUNK_TOKENS - PAGE)
    assert [chunk.number for chunk in load.chunks] == [0, 1, 2]


def test_requests_at_once_read_a_chunk_once() -> None:
    of = engine()
    stored(of, 3)
    for name in "abcd":
        add(of, name, 3 * CHUNK_TOKENS + 30, max_tokens=2)
    for _ in range(3):
        of.step()
    assert [fill.request for fill in fills(of)] == ["a"], "the others wait for its load"
    of.step(finished_recving={"a"})
    run(of)
    assert len(fills(of)) == 1, "they found its pages in vLLM's cache"
    assert not of.scheduler.requests
    of.assert_nothing_held()


def test_a_longer_prefix_is_read_from_where_the_other_load_ends() -> None:
    of = engine()
    stored(of, 4)
    add(of, "a", 2 * CHUNK_TOKENS + 1, max_tokens=2)
    add(of, "b", 4 * CHUNK_TOKENS + 1, max_tokens=2)
    of.step()
    of.step(finished_recving={"a"})
    of.step()
    assert [(one.request, one.first_token, one.stop_token) for one in fills(of)] == [
        ("a", 0, 2 * CHUNK_TOKENS),
        ("b", 2 * CHUNK_TOKENS, 4 * CHUNK_TOKENS),
    ]


@pytest.mark.parametrize("how", ["fails", "is aborted", "breaks off"])
def test_who_waits_for_a_load_that_comes_to_nothing_reads_or_computes(how: str) -> None:
    of = engine()
    keys = stored(of, 3)
    for name in "ab":
        add(of, name, 3 * CHUNK_TOKENS + 30, max_tokens=2)
    of.step()
    if how == "is aborted":
        of.abort("a")
        of.step(finished_recving={"a"})
    elif how == "fails":
        of.step(
            WorkerActivity(causes={"a": Cause.POOL}), finished_recving={"a"}, failed_recving={"a"}
        )
    else:
        of.store.remove(keys[1:])
        break_off(of, "a", CHUNK_TOKENS, Cause.POOL, Miss.EVICTED)
    of.step()
    if [fill for fill in fills(of) if fill.request == "b"]:
        of.step(finished_recving={"b"})
    run(of)
    assert not of.scheduler.requests
    of.assert_nothing_held()


def test_where_pages_are_not_shared_nobody_waits_for_anothers_load() -> None:
    of = engine()
    stored(of, 3)
    of.side.pool._looks.shared.caching = False
    for name in "ab":
        add(of, name, 3 * CHUNK_TOKENS + 30, max_tokens=2)
    of.step()
    assert [fill.request for fill in fills(of)] == ["a", "b"]


def test_a_load_that_goes_on_too_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_sharing, "_LONGEST_WAIT_S", 0.01)
    of = engine()
    stored(of, 3)
    for name in "ab":
        add(of, name, 3 * CHUNK_TOKENS + 30, max_tokens=2)
    of.step()
    time.sleep(0.02)
    of.step()
    assert [fill.request for fill in fills(of)] == ["a", "b"]


def test_a_silent_store_is_left_alone_by_look_ups_and_probed_by_nobody_who_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(pool_looks, "time", clock)
    monkeypatch.setattr(pool_looks, "LOOK_S", 0.1)
    monkeypatch.setattr(pool_looks, "_SLOW_S", 0.1)
    of = engine()
    store, answers = FaultyStore(of.store), threading.Event()
    stored(of, 1)
    of.side.pool._looks._store = store
    store.silent = answers
    of.add("a", CHUNK_TOKENS + 50, max_tokens=2)
    of.step()
    until(lambda: store.calls, "the look-up under way")
    clock.now += 0.2
    of.step()
    assert of.scheduler.running, "it has waited once"
    for name in ("b", "c", "d"):
        of.add(name, CHUNK_TOKENS + 50, max_tokens=2, seed=3)
        run(of, 4)
    assert store.calls == ["find"], "the others did not ask"
    clock.now += worth.FIRST_PAUSE_S
    monkeypatch.setattr(pool_looks, "LOOK_S", 60.0)
    of.add("probe", CHUNK_TOKENS + 50, max_tokens=2, seed=3)
    of.step()
    assert "probe" in [request.request_id for request in of.scheduler.running], (
        "it waits for nothing"
    )
    answers.set()
    settle(of)
    assert store.calls.count("find") == 2
    stored(of, 1, seed=5)
    add(of, "next", CHUNK_TOKENS + 50, max_tokens=2, seed=5)
    of.step()
    assert fills(of), "it has answered"


def test_saves_do_not_ask_the_store_in_the_schedulers_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = engine(read=False)
    stored(of, 1)
    threads: list[str] = []
    store = of.store
    find = store.find

    def finds(keys: Any) -> Any:
        threads.append(threading.current_thread().name)
        return find(keys)

    monkeypatch.setattr(store, "find", finds)
    add(of, "a", 2 * CHUNK_TOKENS + 50, max_tokens=2)
    run(of)
    assert [save.chunk.number for save in saves(of)] == [1], "the other is there"
    assert [name for name in threads if not name.startswith("pd-pool-look")] == []


def test_chunks_that_are_not_there_are_counted_by_why(monkeypatch: pytest.MonkeyPatch) -> None:
    of, misses = engine(), Counter[str]()

    def count(name: str, amount: float = 1, **labels: str) -> None:
        if name == "pool_misses":
            misses[labels["cause"]] += int(amount)

    monkeypatch.setattr(of.side.telemetry, "count", count)
    keys = stored(of, 2)
    of.store.host.maintenance.stop()  # its thread may hold the books, for which a look-up does not wait
    of.store.remove(keys[1:])
    add(of, "a", 2 * CHUNK_TOKENS + 5, max_tokens=1)
    add(of, "b", 3 * CHUNK_TOKENS + 5, max_tokens=1, seed=3)
    of.step()
    assert misses == {"evicted": 1, "never_stored": 3}


@pytest.mark.parametrize(("soon_s", "asked"), [(0.0, 2), (60.0, 1)])
def test_a_look_up_that_ends_soon_costs_no_step(
    monkeypatch: pytest.MonkeyPatch, soon_s: float, asked: int
) -> None:
    """vLLM asks right after it has queued a request, when no look-up can have ended."""
    monkeypatch.setattr(pool_looks, "SOON_S", soon_s)
    of = engine()
    stored(of, 1)
    looks = of.side.pool._looks
    look, stepped, steps = looks._look, threading.Event(), 0
    after_s = 0.05 if soon_s else 30.0
    monkeypatch.setattr(looks, "_look", lambda *it: (stepped.wait(after_s), look(*it))[1])
    of.add("a", CHUNK_TOKENS + 50, max_tokens=2)
    while not fills(of):
        of.step()
        stepped.set()
        settle(of)
        steps += 1
    assert steps == asked


def test_the_scheduler_waits_for_look_ups_once_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    of, waits, answers = engine(), [], threading.Event()

    def wait(looks: Any, for_s: float) -> None:
        waits.append(for_s)
        time.sleep(for_s)

    monkeypatch.setattr(pool_looks, "wait", wait)
    monkeypatch.setattr(of.side.pool._looks, "_look", lambda *_: answers.wait(20))
    monkeypatch.setattr(pool_looks, "LOOK_S", 60.0)
    for name in ("a", "b", "c"):
        of.add(name, CHUNK_TOKENS + 50, max_tokens=2)
    for _ in range(3):
        of.step()
    answers.set()
    assert waits == [pool_looks.SOON_S] * 3


def test_a_late_look_up_makes_no_request_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    of, answers = engine(), threading.Event()
    stored(of, 1)
    monkeypatch.setattr(of.side.pool._looks, "_look", lambda *_: answers.wait(30))
    of.add("a", CHUNK_TOKENS + 50, max_tokens=2)
    assert of.step() == []
    assert not of.scheduler.running, "it waits for the look-up"
    monkeypatch.setattr(pool_looks, "LOOK_S", 0.0)
    of.step()
    assert of.scheduler.running
    assert fills(of) == []
    answers.set()


def test_the_first_hit_of_a_writer_is_computed_and_compared_and_the_next_one_loaded() -> None:
    of = engine()
    stored(of, 2)
    stored(of, 2, seed=3)
    add(of, "a", 2 * CHUNK_TOKENS + 50, max_tokens=4)
    of.step()
    of.step(
        WorkerActivity(causes={"a": Cause.UNAUDITED}), finished_recving={"a"}, failed_recving={"a"}
    )
    add(of, "other", 2 * CHUNK_TOKENS + 50, max_tokens=4, seed=3)
    run(of)
    loads, compared = fills(of)
    assert not loads.compares
    assert compared.compares
    assert (compared.first_token, compared.stop_token) == (0, 2 * CHUNK_TOKENS)
    with pytest.raises(AssertionError):
        of.assert_nothing_held()
    of.step(WorkerActivity(audits=(AuditReport(compared.request, None, (), ""),)))
    of.assert_nothing_held()
    of.scheduler.kv_cache_manager.reset_prefix_cache()
    add(of, "b", 2 * CHUNK_TOKENS + 50, max_tokens=4, seed=3)
    of.step()
    assert len(fills(of)) == 3, "the other prompt of before was computed meanwhile"


def test_an_audited_prompt_that_is_given_up_leaves_the_audit_to_another() -> None:
    of = engine()
    stored(of, 2)
    for name in ("a", "b"):
        add(of, name, 2 * CHUNK_TOKENS + 50, max_tokens=4)
        of.step()
        of.step(
            WorkerActivity(causes={name: Cause.UNAUDITED}),
            finished_recving={name},
            failed_recving={name},
        )
        of.abort(name)
        of.step()
        of.scheduler.kv_cache_manager.reset_prefix_cache()
    assert len(fills(of)) == 2


def test_chunks_of_a_writer_that_is_not_believed_are_not_tried_again() -> None:
    of = engine()
    stored(of, 2)
    add(of, "a", 2 * CHUNK_TOKENS + 50, max_tokens=1)
    of.step()
    of.step(WorkerActivity(causes={"a": Cause.AUDIT}), finished_recving={"a"}, failed_recving={"a"})
    run(of)
    of.scheduler.kv_cache_manager.reset_prefix_cache()
    add(of, "b", 2 * CHUNK_TOKENS + 50, max_tokens=1)
    run(of)
    assert len(fills(of)) == 1


@pytest.mark.parametrize("unchanged", [True, False])
def test_chunks_are_loaded_for_an_adapter_only_while_it_is_the_one_that_the_request_came_with(
    monkeypatch: pytest.MonkeyPatch, *, unchanged: bool
) -> None:
    monkeypatch.setattr(Adapters, "content", lambda *_: "content")
    of = engine()
    stored(of, 2, adapter="content")
    add(of, "a", 2 * CHUNK_TOKENS + 10, max_tokens=1, lora=LoRARequest("sql", 1, "/no/such/folder"))
    monkeypatch.setattr(Adapters, "unchanged", lambda *_: unchanged)
    of.step()
    assert bool(fills(of)) == unchanged


@pytest.mark.parametrize("replaced", [True, False])
def test_chunks_are_not_used_if_their_adapter_is_replaced_while_they_are_loaded(
    monkeypatch: pytest.MonkeyPatch, *, replaced: bool
) -> None:
    monkeypatch.setattr(Adapters, "content", lambda *_: "content")
    monkeypatch.setattr(Adapters, "unchanged", lambda *_: True)
    of = engine()
    stored(of, 2, adapter="content")
    add(of, "a", 2 * CHUNK_TOKENS + 10, max_tokens=4, lora=LoRARequest("sql", 1, "/no/such/folder"))
    of.step()
    assert fills(of)
    monkeypatch.setattr(Adapters, "replaced", lambda *_, **_look: replaced)
    of.step(finished_recving={"a"})
    of.step()
    assert (of.scheduler.requests["a"].num_computed_tokens == 0) == replaced
    run(of)
    of.assert_nothing_held()


@pytest.mark.parametrize("exact", [True, False])
def test_kv_that_may_be_of_another_image_of_the_same_identifier_is_not_saved(
    monkeypatch: pytest.MonkeyPatch, *, exact: bool
) -> None:
    of = engine()
    add(of, "a", 2 * CHUNK_TOKENS + 10, max_tokens=4)
    of.step()  # the other one comes now
    monkeypatch.setattr(of.side.identity, "exact", lambda request: exact)
    run(of)
    assert bool(saves(of)) == exact


def test_kv_of_two_models_is_not_saved() -> None:
    of = engine()
    add(of, "a", 2 * CHUNK_TOKENS + 10, max_tokens=4)
    of.step(WorkerActivity(models={0: b"n" * 32}))
    run(of)
    assert saves(of) == []
    of.assert_nothing_held()


@pytest.mark.parametrize(("key", "found"), [("read", fills), ("write", saves)])
def test_an_engine_can_only_read_or_only_write(key: str, found: Any) -> None:
    of = engine(**{key: False})
    stored(of, 1)
    add(of, "a", 2 * CHUNK_TOKENS + 10, max_tokens=1)
    of.step()
    if fills(of):
        of.step(finished_recving={"a"})
    run(of)
    assert found(of) == []
    assert fills(of) or saves(of)


@pytest.mark.parametrize("wrong", [{"pin_s": -1}, {"tenant": 3}, {"rate": 1}, "yes"])
def test_what_a_client_wants_and_cannot_have_is_ignored_and_told(
    wrong: Any, caplog: pytest.LogCaptureFixture
) -> None:
    of = engine()
    stored(of, 1)
    add(of, "a", CHUNK_TOKENS + 10, max_tokens=1, pool=wrong)
    run(of, 4)
    assert fills(of) == saves(of) == []
    assert "kv_transfer_params ignored (malformed_params): pool" in caplog.text
    of.assert_nothing_held()


def test_a_client_can_pin_what_it_has_computed_and_name_who_pays() -> None:
    of = engine(tenants=["t"])
    stored(of, 2)
    add(of, "a", 3 * CHUNK_TOKENS + 10, max_tokens=1, pool={"pin_s": 60, "tenant": "t"})
    of.step()
    of.step(finished_recving={"a"})
    run(of)
    assert [save.tenant for save in saves(of)] == ["t"]
    settle(of)
    assert of.store.status().pinned == 1, "the deepest chunk that was found"


def test_pins_that_wait_for_chunks_that_never_come_keep_no_lookup_waiting() -> None:
    of = engine()
    stored(of, 1)
    for number in range(1, 4):
        wishes = {"pin_s": 60, "write": False}
        add(of, f"{number}", CHUNK_TOKENS + 10, max_tokens=1, seed=number, pool=wishes)
    run(of)
    assert not of.scheduler.requests
    began = time.monotonic()
    settle(of)  # each pin was tried once
    settle(of)
    assert time.monotonic() - began < client_pins.SAVED_WITHIN_S / 2, (
        "the thread is free for look-ups"
    )
    add(of, "a", CHUNK_TOKENS + 10, max_tokens=1)
    of.step()
    assert [fill.request for fill in fills(of)] == ["a"]


@pytest.mark.parametrize(("tenants", "pinned"), [([], 1), (["t", "u"], 0)])
def test_clients_pins_keep_half_of_their_part_at_most(tenants: list[str], pinned: int) -> None:
    of = engine(tenants=tenants)
    stored(of, 1, nbytes=12 << 20)  # less than half of 64 MiB, more than half of a third
    add(of, "a", CHUNK_TOKENS + 10, max_tokens=1, pool={"pin_s": 60})
    of.step()
    settle(of)
    of.step(finished_recving={"a"})
    run(of)
    settle(of)
    assert of.store.status().pinned == pinned


def test_names_and_salts_that_clients_invent_have_one_share_together(
    caplog: pytest.LogCaptureFixture,
) -> None:
    of = engine(tenants=["known"])
    for number, more in enumerate(
        [
            {"pool": {"tenant": "known"}},
            {"pool": {"tenant": "invented"}},
            {"pool": {"tenant": "invented too"}},
            {"salt": "invented"},
            {"salt": "invented", "pool": {"tenant": "known"}},
            {},
        ]
    ):
        of.add(f"{number}", CHUNK_TOKENS + 10, max_tokens=1, seed=number, **more)
    run(of)
    assert Counter(save.tenant for save in saves(of)) == {"known": 2, "": 4}
    assert "pool.tenant 'invented': not in the config key pool.tenants" in caplog.text


def test_a_client_can_leave_the_pool_alone() -> None:
    of = engine()
    stored(of, 1)
    add(of, "a", 2 * CHUNK_TOKENS + 10, max_tokens=1, pool={"read": False, "write": False})
    run(of)
    assert fills(of) == saves(of) == []


def add(of: SteppedEngine, *request: Any, **more: Any) -> None:
    """A request arrives, and its look-up ends."""
    of.add(*request, **more)
    settle(of)


def settle(of: SteppedEngine) -> None:
    """Wait until all look-ups have ended."""
    of.side.pool._looks._thread.submit(lambda: None).result()


def test_what_routers_want_to_know_is_told_while_the_weights_are_known() -> None:
    of = engine()
    store = of.store

    def told() -> Any:
        return find_engine(store.advertised(), of.side.offers.address.engine_id)

    assert told().model == MODEL.hex()
    assert told().bytes_per_s == {}
    stored(of, 2)
    add(of, "a", 2 * CHUNK_TOKENS + 50, max_tokens=2)
    of.step()
    of.step(finished_recving={"a"})
    settle(of)
    assert told().bytes_per_s["memory"] > 0
    assert told().chunk_bytes == 100
    of.step(WorkerActivity(models={0: b""}))
    assert told() is None


def test_an_engine_that_does_not_learn_its_weights_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    of = SteppedEngine(audit="off", pool={"memory": "64MiB"})
    assert of.side.pending_work, "its ranks have told nothing"
    for _ in range(3):
        of.step(WorkerActivity(models={0: b""}))
        assert not of.side.pending_work, "there is nothing to wait for"
    assert caplog.text.count("does not know all bytes of its weights") == 1


READS = WorkerActivity(models={0: None})


def test_an_idle_engine_is_woken_for_a_step_until_its_ranks_have_read_their_weights(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Between these steps it has no work, so that it can be paused, or stopped."""
    goes_off = threading.Event()

    class Timer(threading.Timer):
        """Goes off when the test says so."""

        def run(self) -> None:
            assert goes_off.wait(30)
            goes_off.clear()
            self.function()

    monkeypatch.setattr(pool_model, "Timer", Timer)
    of, woken = SteppedEngine(audit="off", pool={"memory": "64MiB"}), threading.Event()
    monkeypatch.setattr(pool_model, "wake", woken.set)
    for _ in range(3):
        woken.clear()
        of.step(READS)
        assert not of.scheduler.has_requests()
        goes_off.set()
        assert woken.wait(30)
        assert of.scheduler.has_requests()
    of.step(WorkerActivity(models={0: MODEL}))
    woken.clear()
    goes_off.set()
    assert not woken.wait(0.2)
    assert not of.scheduler.has_requests()
    assert caplog.text.count("does not know all bytes of its weights") == 0


def test_a_request_waits_for_what_ranks_tell_after_a_while_without_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = SteppedEngine(budget=CHUNK_TOKENS, audit="off", pool={"memory": "64MiB"})
    of.step(READS)
    stored(of, 2)
    monkeypatch.setattr(of.side.pool._model, "_heard_s", 0.0)
    monkeypatch.setattr(pool_model, "_OLD_S", 60.0)  # on a busy machine, too
    add(of, "a", 2 * CHUNK_TOKENS + 50)
    of.step(WorkerActivity(models={0: MODEL}))
    assert of.scheduler.requests["a"].num_computed_tokens == 0
    of.step()  # looks it up
    settle(of)
    of.step()
    assert [fill.stop_token for fill in fills(of)] == [2 * CHUNK_TOKENS]


def test_no_request_waits_for_a_load_of_before_weights_were_loaded_again() -> None:
    of = engine()
    stored(of, 2)
    add(of, "before", 2 * CHUNK_TOKENS + 50)
    of.step()
    of.step(WorkerActivity(weight_changes={0: 1}))
    add(of, "after", 2 * CHUNK_TOKENS + 50)
    settle(of)
    of.step()
    assert [fill.request for fill in fills(of)] == ["before", "after"]


def test_no_request_waits_long_for_weights_that_are_still_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(pool_model, "time", clock)
    of = SteppedEngine(budget=CHUNK_TOKENS, audit="off", pool={"memory": "64MiB"})
    of.step(READS)
    add(of, "busy", CHUNK_TOKENS, seed=1)
    of.step()
    assert of.scheduler.requests["busy"].num_computed_tokens, "ranks have told just now"
    clock.now += 2 * pool_model._OLD_S
    add(of, "idle", CHUNK_TOKENS, seed=2)
    of.step(READS)
    of.step(READS)
    assert of.scheduler.requests["idle"].num_computed_tokens, "one step later"
    assert not fills(of)
