# SPDX-License-Identifier: Apache-2.0
"""Engines with a pool while adapters, weights and their own caches change: what was saved before is used only for what it
was computed with. Most tests share one engine: it reads from the pool what it has forgotten itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import (
    TWO_STEP_PARAMS,
    Answer,
    assert_idle,
    assert_same_logprobs,
    completion,
    fresh_salt,
    wait_until,
)
from pools import (
    CHUNKS,
    PROMPT,
    PooledEngines,
    counted,
    forget,
    hits,
    in_use,
    sharing_a_pool,
)
from recipes import MODEL, OLDER
from test_adapters_live import adapter, tell
from test_codecs_live import BFLOAT16, BOUNDS, FP8_CACHE, distance
from test_identity_live import retrained, update
from tools import TOLERANCE, delta, probe_all

from pd_connector.tools.launch import VllmEngine

NO_READ = {"kv_transfer_params": {"pool": {"read": False, "write": False}}}
LORA = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")
TRAINER = ("--worker-extension-cls", "probe.Trainer")
FP8_BOUND = 0.5


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PooledEngines]:
    with sharing_a_pool(tmp_path_factory.mktemp("pool")) as engines:
        yield engines


@pytest.fixture(scope="module")
def engine(pool: PooledEngines) -> VllmEngine:
    return pool.start(32, *LORA, *TRAINER, codec="int8")


@pytest.fixture(scope="module")
def other(pool: PooledEngines) -> VllmEngine:
    return pool.start(64, *LORA, *TRAINER, codec="int8")


@pytest.fixture(scope="module")
def several(pool: PooledEngines, tmp_path_factory: pytest.TempPathFactory) -> VllmEngine:
    """An engine with two connectors, without a codec."""
    beside = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "shared_storage_path": str(tmp_path_factory.mktemp("beside"))
        },
    }
    return pool.start(32, "--disable-hybrid-kv-cache-manager", beside=beside)


def alone(engine: VllmEngine, **extra: object) -> Answer:
    """What the engine computes itself."""
    return completion(engine, PROMPT, 32, cache_salt=fresh_salt(), **NO_READ, **extra)


def loaded(engine: VllmEngine, salt: str, wanted: Answer, **extra: object) -> float:
    """Ask again, once the engine has forgotten its own KV; returns how many chunks it loaded.

    The tests' model computes a chunk as fast as a busy machine loads one. An engine that found loads too slow leaves the
    pool alone for a while, and is asked until then.
    """
    while True:
        assert forget(engine)
        before, slow = hits(engine), counted(engine, "pool_misses", cause="not_worth")
        found = completion(engine, PROMPT, 32, cache_salt=salt, **extra)
        assert_same_logprobs(found, wanted, TOLERANCE)
        loads = hits(engine) - before
        if counted(engine, "pool_misses", cause="not_worth") == slow:
            return loads
        time.sleep(1)


def test_an_adapter_loaded_anew_under_its_name_finds_nothing_of_the_one_before(
    pool: PooledEngines, engine: VllmEngine, tmp_path: Path
) -> None:
    folder, salt = adapter(tmp_path / "sql", 1), fresh_salt()
    tell(engine, "load", lora_path=str(folder))
    before = pool.computed(engine, salt, model="sql")
    assert loaded(engine, salt, before, model="sql") == CHUNKS
    adapter(folder, 2)
    tell(engine, "load", lora_path=str(folder), load_inplace=True)
    after = alone(engine, model="sql")
    with pytest.raises(AssertionError):
        assert_same_logprobs(after, before, TOLERANCE)
    assert loaded(engine, salt, after, model="sql") == 0
    adapter(folder, 1)
    tell(engine, "load", lora_path=str(folder), load_inplace=True)
    assert loaded(engine, salt, before, model="sql") == CHUNKS, "it is known by its content"
    tell(engine, "unload")


def test_the_prefix_cache_can_be_reset_while_and_after_chunks_are_saved(
    pool: PooledEngines, engine: VllmEngine
) -> None:
    salts = [fresh_salt() for _ in range(4)]
    before = len(pool.files())
    wanted = []
    for salt in salts:
        wanted.append(completion(engine, PROMPT, 2, cache_salt=salt))
        assert forget(engine), "its chunks may still be copied"
    wait_until(lambda: len(pool.files()) == before + len(salts) * CHUNKS, "all chunks")
    assert loaded(engine, salts[-1], completion(engine, PROMPT, 32, cache_salt=salts[-1])) == CHUNKS


def test_an_engine_that_was_reset_uses_the_pool_only_for_what_it_has_computed_since(
    pool: PooledEngines, engine: VllmEngine, other: VllmEngine
) -> None:
    salt = fresh_salt()
    wanted = pool.computed(engine, salt)
    assert loaded(engine, salt, wanted) == CHUNKS
    assert forget(engine, pool=True)
    before, reset = hits(engine), counted(engine, "pool_misses", cause="reset")
    assert_same_logprobs(completion(engine, PROMPT, 32, cache_salt=salt), wanted, TOLERANCE)
    assert hits(engine) == before
    assert counted(engine, "pool_misses", cause="reset") == reset + CHUNKS
    assert "caches were reset" in engine.log_path.read_text()
    assert loaded(other, salt, wanted) == CHUNKS, "other engines use it"
    assert loaded(engine, salt, wanted) == CHUNKS, "it has computed it since"


def test_two_engines_that_save_one_prompt_at_once_save_it_once(
    pool: PooledEngines, engine: VllmEngine, other: VllmEngine
) -> None:
    salt, before = fresh_salt(), len(pool.files())
    with ThreadPoolExecutor(2) as threads:
        answers = list(
            threads.map(lambda one: completion(one, PROMPT, 32, cache_salt=salt), (engine, other))
        )
    assert_same_logprobs(*answers, TOLERANCE)
    wait_until(lambda: len(pool.files()) >= before + CHUNKS, "the chunks in the pool")
    saves = [counted(one, "pool_saves", cause=cause) for one in (engine, other) for cause in SAVED]
    assert sum(saves) >= CHUNKS
    assert len(pool.files()) == before + CHUNKS
    for one in (engine, other):
        assert loaded(one, salt, answers[0]) == CHUNKS


SAVED = ("saved", "exists", "being_written")


def test_the_pool_works_beside_another_connector(pool: PooledEngines, several: VllmEngine) -> None:
    salt = fresh_salt()
    wanted = pool.computed(several, salt)
    assert loaded(several, salt, wanted) == CHUNKS
    assert loaded(several, fresh_salt(), wanted) == 0
    pool.damage()  # a MultiConnector has vLLM's own policy for loads that fail: `fail`
    assert loaded(several, salt, wanted) == 0


def test_kv_that_came_in_int8_is_read_where_that_is_permitted_and_nowhere_else(
    pool: PooledEngines, engine: VllmEngine, other: VllmEngine, several: VllmEngine
) -> None:
    salt, before = fresh_salt(), len(pool.files())
    ask = {**TWO_STEP_PARAMS, **NO_READ["kv_transfer_params"]}
    params = completion(engine, PROMPT, 1, cache_salt=salt, kv_transfer_params=ask)
    assert len(pool.files()) == before, "its prefill engine saves nothing"
    with delta(other, "pd_connector:received_transfers_total") as received:
        given = params.kv_transfer_params
        completion(other, PROMPT, 32, cache_salt=salt, kv_transfer_params=given)
    assert received.amount == 1
    wait_until(lambda: len(pool.files()) >= before + CHUNKS, "the chunks in the pool")
    assert forget(engine)
    with delta(engine, "pd_connector:pool_hits_total") as loads:
        found = completion(engine, PROMPT, 32, cache_salt=salt)
        completion(engine, [1, 2, 3], 2)
    assert loads.amount == CHUNKS
    assert 0 < distance(engine, PROMPT, found.tokens, found.logprobs) <= BOUNDS["int8"]
    exact, before = alone(several), hits(several)
    assert_same_logprobs(completion(several, PROMPT, 32, cache_salt=salt), exact, TOLERANCE)
    assert hits(several) == before
    assert counted(several, "pool_misses", cause="codec") >= 1


def test_kv_of_weights_that_changed_without_a_version_is_neither_read_nor_written(
    pool: PooledEngines, engine: VllmEngine
) -> None:
    salt = fresh_salt()
    before = pool.computed(engine, salt)
    update(engine, 1.25)
    completion(engine, "a step", 1)
    after, files = alone(engine), len(pool.files())
    with pytest.raises(AssertionError):
        assert_same_logprobs(after, before, TOLERANCE)
    assert loaded(engine, salt, after) == 0
    assert loaded(engine, salt, after) == 0, "nor was it written"
    assert len(pool.files()) == files
    probe_all(engine, "set_weights_version", "step 7")
    completion(engine, "a step", 1)
    assert_same_logprobs(pool.computed(engine, salt), after, TOLERANCE)
    assert loaded(engine, salt, after) == CHUNKS


def test_weights_that_are_reloaded_are_those_of_their_files(
    pool: PooledEngines, other: VllmEngine, tmp_path: Path
) -> None:
    salt = fresh_salt()
    before = pool.computed(other, salt)

    def reload(folder: Path) -> Answer:
        known = in_use(other)
        probe_all(other, "reload_weights", None, str(folder))

        wait_until(lambda: in_use(other) > known, "the engine knows its weights")
        return alone(other)

    after = reload(retrained(tmp_path / "other"))
    with pytest.raises(AssertionError):
        assert_same_logprobs(after, before, TOLERANCE)
    assert loaded(other, salt, after) == 0
    reload(MODEL)
    assert loaded(other, salt, before) == CHUNKS


@pytest.mark.skipif(not OLDER.is_dir(), reason="no vLLM 0.31 beside 0.32: run ci/setup-tests")
def test_versions_0_31_and_0_32_read_each_others_chunks(
    pool: PooledEngines, other: VllmEngine
) -> None:
    older = pool.start(32, vllm="0.31", codec="int8")
    for writer, reader in ((older, other), (other, older)):
        salt = fresh_salt()
        assert loaded(reader, salt, pool.computed(writer, salt)) == CHUNKS
    older.stop()


def test_a_drained_engine_has_saved_its_fp8_cache_for_one_with_other_pages(
    pool: PooledEngines,
) -> None:
    args = (*BFLOAT16, *FP8_CACHE)
    writer, salt, before = pool.start(32, *args), fresh_salt(), len(pool.files())
    completion(writer, PROMPT, 32, cache_salt=salt)
    assert_idle(writer)
    writer.stop()
    assert len(pool.files()) == before + CHUNKS
    reader = pool.start(64, *args)
    with delta(reader, "pd_connector:pool_hits_total") as loads:
        found = completion(reader, PROMPT, 32, cache_salt=salt)
        completion(reader, [1, 2, 3], 2)
    assert loads.amount == CHUNKS
    assert distance(reader, PROMPT, found.tokens, found.logprobs) <= FP8_BOUND
