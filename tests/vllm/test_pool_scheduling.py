# SPDX-License-Identifier: Apache-2.0
"""The pool in vLLM's own scheduler: what is saved and loaded, and which pages are kept for how long."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from support.vllm_steps import SteppedEngine

from pd_connector.errors import Cause
from pd_connector.pool import host
from pd_connector.pool.jobs import Fill, Save
from pd_connector.pool.keys import CHUNK_TOKENS, chain
from pd_connector.pool.store.base import Writing
from pd_connector.pool.told import find_engine
from pd_connector.vllm import pool as pool_module
from pd_connector.vllm import pool_looks
from pd_connector.vllm.messages import AuditReport, WorkerActivity

MODEL = b"m" * 32


@pytest.fixture(autouse=True)
def shm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="pd-test-", dir="/dev/shm"))
    monkeypatch.setenv("PD_CONNECTOR_SHM", str(folder))
    monkeypatch.setattr(host, "_stores", {})
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


def stored(of: SteppedEngine, chunks: int, seed: int = 0) -> list[bytes]:
    """Put the first chunks of the prompt of this seed into the store, without their KV."""
    store = of.side.pool._store
    tokens = [(seed * 31 + place) % 250 for place in range(chunks * CHUNK_TOKENS)]
    keys = chain(MODEL, tokens)
    for parent, key in zip([b"", *keys], keys, strict=False):
        writing = store.begin(key, parent=parent, part="0-1.0of1", parts=1, nbytes=100, writer="x")
        assert isinstance(writing, Writing)
        with writing:
            writing.write(0, memoryview(bytes(100)))
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
    assert of.side.pool._store.status().pinned == 1, "the deepest keeps those before it"
    of.step(finished_recving={"a"})
    settle(of)
    assert of.side.pool._store.status().pinned == 0
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


def test_a_load_that_fails_is_computed_and_not_tried_again() -> None:
    of = engine()
    stored(of, 2)
    add(of, "a", 2 * CHUNK_TOKENS + 50, max_tokens=2)
    of.step()
    of.step(WorkerActivity(causes={"a": Cause.POOL}), finished_recving={"a"}, failed_recving={"a"})
    run(of)
    assert len(fills(of)) == 1
    of.assert_nothing_held()


def test_chunks_that_are_not_there_are_counted_by_why(monkeypatch: pytest.MonkeyPatch) -> None:
    of, misses = engine(), Counter[str]()

    def count(name: str, amount: float = 1, **labels: str) -> None:
        if name == "pool_misses":
            misses[labels["cause"]] += int(amount)

    monkeypatch.setattr(of.side.telemetry, "count", count)
    keys = stored(of, 2)
    of.side.pool._store.remove(keys[1:])
    add(of, "a", 2 * CHUNK_TOKENS + 5, max_tokens=1)
    add(of, "b", 3 * CHUNK_TOKENS + 5, max_tokens=1, seed=3)
    of.step()
    assert misses == {"evicted": 1, "never_stored": 3}


def test_a_late_look_up_makes_no_request_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_looks, "LOOK_S", 0.05)
    of = engine()
    stored(of, 1)
    monkeypatch.setattr(of.side.pool._looks, "_look", lambda *_: time.sleep(0.5))
    of.add("a", CHUNK_TOKENS + 50, max_tokens=2)
    assert of.step() == []
    assert not of.scheduler.running, "it waits for the look-up"
    time.sleep(0.06)
    of.step()
    assert of.scheduler.running
    assert fills(of) == []


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
    of = engine()
    stored(of, 2)
    add(of, "a", 3 * CHUNK_TOKENS + 10, max_tokens=1, pool={"pin_s": 60, "tenant": "t"})
    of.step()
    of.step(finished_recving={"a"})
    run(of)
    assert [save.tenant for save in saves(of)] == ["t"]
    settle(of)
    assert of.side.pool._store.status().pinned == 1, "the deepest chunk that was found"


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
    store = of.side.pool._store

    def told() -> Any:
        return find_engine(store.told(), of.side.offers.address.engine_id)

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
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    of = SteppedEngine(audit="off", pool={"memory": "64MiB"})
    assert of.side.pending_work
    monkeypatch.setattr(pool_module, "_UNKNOWN_S", 0.0)
    assert not of.side.pending_work, "steps are not asked for without an end"
    for _ in range(3):
        of.step(WorkerActivity())
    assert caplog.text.count("does not know all bytes of its weights") == 1
