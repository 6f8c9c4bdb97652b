# SPDX-License-Identifier: Apache-2.0
"""Chunks kept in INT8 by an engine that is dead: engines of other layouts and dtypes read them, and others do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
from harness import TWO_STEP_PARAMS, Answer, assert_same_logprobs, completion, fresh_salt
from pools import CHUNKS, PROMPT, PooledEngines, counted, hits, sharing_a_pool
from test_codecs_live import BFLOAT16, BOUNDS, FP8_CACHE, distance
from tools import TOLERANCE, delta

from pd_connector.tools.launch import VllmEngine

INT8 = {"memory": "256MiB", "codec": "int8"}
NO_POOL = {"kv_transfer_params": {"pool": {"read": False, "write": False}}}


class Written(NamedTuple):
    """What the dead engine has left.

    Attributes:
        raw: an engine that permits no codec.
        wanted: its answer.
    """

    pool: PooledEngines
    raw: VllmEngine
    wanted: Answer
    salt: str
    raw_bytes: int
    int8_bytes: int


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    with sharing_a_pool(tmp_path_factory.mktemp("int8")) as pool:
        raw, salt = pool.start(32, *BFLOAT16), fresh_salt()
        wanted = pool.computed(raw, fresh_salt())
        raw_bytes = held(pool)
        writer = pool.start(32, *BFLOAT16, pool=INT8)
        pool.computed(writer, salt)
        writer.kill()
        yield Written(pool, raw, wanted, salt, raw_bytes, held(pool) - raw_bytes)


def held(pool: PooledEngines) -> int:
    return sum(file.stat().st_size for file in pool.files())


def read(engine: VllmEngine, salt: str, bound: float) -> Answer:
    """An answer on chunks of the pool, near what the engine computes itself, and not the same."""
    before = hits(engine)
    found = completion(engine, PROMPT, 32, cache_salt=salt)
    assert hits(engine) - before == CHUNKS
    assert 0 < distance(engine, PROMPT, found.tokens, found.logprobs) <= bound
    return found


def test_chunks_take_about_half_the_room(written: Written) -> None:
    assert 0.5 < written.int8_bytes / written.raw_bytes < 0.56


def test_an_engine_that_permits_no_codec_computes_and_says_why(written: Written) -> None:
    found = completion(written.raw, PROMPT, 32, cache_salt=written.salt)
    assert_same_logprobs(found, written.wanted, TOLERANCE)
    assert hits(written.raw) == 0
    assert counted(written.raw, "pool_misses", cause="codec") == CHUNKS


def test_engines_of_other_pages_and_ranks_read_them_as_exactly_as_a_handoff_in_int8(
    written: Written,
) -> None:
    reader = written.pool.start(64, *BFLOAT16, codec="int8", pool=INT8)
    halves = written.pool.start(64, *BFLOAT16, "--tensor-parallel-size", "2", codec="int8")
    for engine in (reader, halves):
        read(engine, written.salt, BOUNDS["int8"])
    salt = fresh_salt()
    ask = {"kv_transfer_params": {**TWO_STEP_PARAMS, **NO_POOL["kv_transfer_params"]}}
    params = completion(halves, PROMPT, 1, cache_salt=salt, **ask).kv_transfer_params
    with delta(reader, "pd_connector:received_transfers_total") as received:
        came = completion(reader, PROMPT, 32, cache_salt=salt, kv_transfer_params=params)
    assert received.amount == 1
    assert 0 < distance(reader, PROMPT, came.tokens, came.logprobs) <= BOUNDS["int8"]
    exact = written.raw
    params = completion(reader, PROMPT, 1, cache_salt=written.salt, **ask).kv_transfer_params
    handed = completion(exact, PROMPT, 32, cache_salt=written.salt, kv_transfer_params=params)
    assert_same_logprobs(handed, written.wanted, TOLERANCE)
    assert counted(exact, "failed_transfers", cause="codec") >= 1
    for engine in (reader, halves):
        engine.stop()


def test_an_fp8_cache_reads_them_at_the_norm_that_was_written(written: Written) -> None:
    reader = written.pool.start(64, *BFLOAT16, *FP8_CACHE, pool=INT8)
    read(reader, written.salt, BOUNDS["bfloat16 to fp8"])
    reader.stop()
