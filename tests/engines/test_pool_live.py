# SPDX-License-Identifier: Apache-2.0
"""Engines with a pool: what one of them computed, the others use, also when it is dead, and never wrongly."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from harness import assert_same_logprobs, completion, fresh_salt, two_step, wait_until
from pools import CHUNKS, PROMPT, PooledEngines, counted, hits, sharing_a_pool
from recipes import MODEL
from tools import TOLERANCE

from pd_connector.pool.keys import chain
from pd_connector.tools.launch import VllmEngine
from scheduler_plugins.admission.pool_report import PATH, PoolReport, decode


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[PooledEngines]:
    with sharing_a_pool(tmp_path) as engines:
        yield engines


def test_what_a_dead_engine_computed_engines_of_other_layouts_use(pool: PooledEngines) -> None:
    writer, salt = pool.start(32), fresh_salt()
    wanted = pool.computed(writer, salt)
    writer.kill()
    reader = pool.start(64)
    assert_same_logprobs(completion(reader, PROMPT, 32, cache_salt=salt), wanted, TOLERANCE)
    assert hits(reader) == CHUNKS
    other = completion(reader, PROMPT, 32, cache_salt=fresh_salt())
    assert_same_logprobs(other, wanted, TOLERANCE)
    assert hits(reader) == CHUNKS, "another salt shares nothing"
    halves = pool.start(64, "--tensor-parallel-size", "2")
    assert_same_logprobs(completion(halves, PROMPT, 32, cache_salt=salt), wanted, TOLERANCE)
    assert hits(halves) == CHUNKS


def test_by_default_the_first_hit_of_a_writer_is_computed_and_compared(pool: PooledEngines) -> None:
    writer, salts = pool.start(32), [fresh_salt(), fresh_salt()]
    wanted = [pool.computed(writer, salt) for salt in salts]
    reader = pool.start(64, audit="first")
    for salt, answer, loaded in zip(salts, wanted, (0, CHUNKS), strict=True):
        found = completion(reader, PROMPT, 32, cache_salt=salt)
        assert_same_logprobs(found, answer, TOLERANCE)
        assert hits(reader) == loaded
        wait_until(lambda: counted(reader, "audits", cause="passed") == 1, "the comparison")


def test_damaged_chunks_cost_a_computation_and_no_answer(pool: PooledEngines) -> None:
    writer, salt = pool.start(32), fresh_salt()
    wanted = pool.computed(writer, salt)
    pool.damage()
    reader = pool.start(32, on_failure="fail")  # of handoffs
    assert_same_logprobs(completion(reader, PROMPT, 32, cache_salt=salt), wanted, TOLERANCE)
    assert hits(reader) == 0
    assert counted(reader, "pool_misses", cause="damaged") >= 1


def test_an_engine_with_other_weights_finds_nothing(pool: PooledEngines, tmp_path: Path) -> None:
    salt = fresh_salt()
    pool.computed(pool.start(32), salt)
    other = pool.start(32, model=with_one_other_weight(tmp_path / "model"))
    asked = completion(other, PROMPT, 32, cache_salt=salt)
    assert_same_logprobs(asked, completion(other, PROMPT, 32, cache_salt=fresh_salt()), TOLERANCE)
    assert hits(other) == 0


def with_one_other_weight(folder: Path) -> Path:
    """The demo's model with one number changed, which samples of the weights may miss."""
    shutil.copytree(MODEL, folder)
    (weights,) = folder.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    return folder


def test_a_pair_hands_over_with_a_pool_on_both_sides(pool: PooledEngines) -> None:
    prefill, decode = pool.start(32), pool.start(64)
    salt = fresh_salt()
    wanted = pool.computed(prefill, salt)
    for _ in range(2):
        found = two_step(prefill, decode, PROMPT, cache_salt=salt)
        assert_same_logprobs(found, wanted, TOLERANCE)
    assert counted(decode, "received_transfers") >= 1


def test_an_engine_tells_a_router_which_chunks_its_host_has(pool: PooledEngines) -> None:
    flag = ("--middleware", "scheduler_plugins.vllm.PoolMiddleware")
    first, second = pool.start(32, *flag), pool.start(64, *flag)
    salt = fresh_salt()
    pool.computed(first, salt)
    reports = [told(engine, "?after=0") for engine in (first, second)]
    assert reports[0].store == reports[1].store
    assert reports[0].model == reports[1].model
    keys = chain(bytes.fromhex(reports[0].model), PROMPT, salt=salt)
    for report in reports:
        assert {event.key for event in report.events} >= {key.hex() for key in keys[:CHUNKS]}
    completion(second, PROMPT, 4, cache_salt=salt)
    assert hits(second) == CHUNKS
    assert told(second).bytes_per_s["memory"] > 0
    assert told(second).chunk_bytes > 0


def told(engine: VllmEngine, query: str = "") -> PoolReport:
    with urlopen(f"{engine.base_url}{PATH}{query}", timeout=60) as answer:
        return decode(answer.read())
