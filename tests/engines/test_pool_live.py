# SPDX-License-Identifier: Apache-2.0
"""Engines with a pool: what one of them computed, the others use, also when it is dead, and never wrongly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import pytest
import zmq
from harness import (
    assert_same_logprobs,
    busy,
    completion,
    fresh_salt,
    request_body,
    two_step,
    wait_until,
)
from pools import CHUNKS, PROMPT, PooledEngines, counted, hits, sharing_a_pool
from recipes import NEW
from test_identity_live import with_one_other_weight
from tools import TOLERANCE

from pd_connector.pool.keys import CHUNK_TOKENS, chain
from pd_connector.tools.launch import VllmEngine
from pd_connector.tools.launch.ports import Port
from pd_connector.tools.launch.router import RouterProcess
from scheduler_plugins.admission.pool_report import PATH, PoolReport, decode
from scheduler_plugins.router.index.events import Stored
from scheduler_plugins.router.index.events import decode as decode_events


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


class Served(NamedTuple):
    """Engines that later tests of this file share."""

    pool: PooledEngines
    prefill: VllmEngine
    decode: tuple[VllmEngine, VllmEngine]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with sharing_a_pool(tmp_path_factory.mktemp("served")) as pool:
        yield Served(
            pool, pool.start(32, vllm=NEW), (pool.start(64, vllm=NEW), pool.start(64, vllm=NEW))
        )


def test_a_pair_hands_over_with_a_pool_on_both_sides(served: Served) -> None:
    prefill, decode = served.prefill, served.decode[0]
    salt = fresh_salt()
    wanted = served.pool.computed(prefill, salt)
    for _ in range(2):
        found = two_step(prefill, decode, PROMPT, cache_salt=salt)
        assert_same_logprobs(found, wanted, TOLERANCE)
    assert counted(decode, "received_transfers") >= 1


def test_many_saves_and_hits_take_no_memory_that_stays(served: Served) -> None:
    """A chunk has a MiB. The budget of the pool's own memory is met by eviction; it is not an engine's."""
    writer, reader = served.prefill, served.decode[0]

    def rounds(count: int) -> int:
        for _ in range(count):
            salt = fresh_salt()
            completion(writer, PROMPT, 2, cache_salt=salt)
            wait_until(lambda: not busy(writer.metrics(), connector=True), "its saves")
            completion(reader, PROMPT, 2, cache_salt=salt)
        return anonymous(writer) + anonymous(reader)

    before = rounds(15)
    hit = hits(reader)
    grown = rounds(30) - before
    assert hits(reader) - hit >= 30 * (CHUNKS - 1), "most chunks were loaded"
    assert grown < 16 << 20, f"{grown >> 20} MiB more after {30 * CHUNKS} saves and hits"


def anonymous(engine: VllmEngine) -> int:
    """Bytes of memory that an engine's processes have, without files of a tmpfs."""
    assert engine.family is not None
    nbytes = 0
    for process in engine.family.members():
        status = Path(f"/proc/{process.pid}/status").read_text()
        lines = [line for line in status.splitlines() if line.startswith("RssAnon:")]
        nbytes += sum(int(line.split()[1]) << 10 for line in lines)
    return nbytes


def test_of_an_answer_whose_engine_dies_a_chunk_and_a_page_are_computed_again(
    served: Served, tmp_path: Path
) -> None:
    """Its router goes on at another engine, which finds the prompt and the answer so far in the pool."""
    engines = served.prefill, *served.decode
    router = RouterProcess(
        [served.prefill.base_url],
        [engine.base_url for engine in served.decode],
        log_path=tmp_path / "router.log",
    )
    prompt = [3 + (11 * place) % 250 for place in range(300)]
    wanted = completion(served.prefill, prompt, ANSWER, **NO_POOL)
    router.start()
    try:
        router.wait_ready()
        body = request_body(router, prompt, ANSWER, cache_salt=fresh_salt(), return_token_ids=True)
        del body["logprobs"]  # a stream with them does not go on elsewhere
        tokens: list[str] = []
        killed: VllmEngine | None = None
        for event in router.client.stream("/v1/completions", body):
            for choice in event["choices"]:
                tokens += [f"token_id:{token}" for token in choice["token_ids"] or ()]
            if killed is None and len(tokens) >= KILLED_AT:
                killed = next(one for one in served.decode if not is_idle(one))
                left = [engine for engine in engines if engine is not killed]
                before = [computed_tokens(engine) for engine in left]
                killed.kill()
        assert killed is not None
    finally:
        router.stop()
    assert tuple(tokens) == wanted.tokens
    for engine in left:
        completion(engine, [1, 2, 3], 1)  # counters come with steps
    again = sum(map(computed_tokens, left)) - sum(before) - 3 * len(left)
    assert again <= CHUNK_TOKENS + 64 < KILLED_AT - CHUNK_TOKENS, "a chunk and a page"


ANSWER, KILLED_AT = 500, 330
"""Tokens. When the engine dies its answer has chunks of its own: with those of the prompt alone, more would be computed again."""
NO_POOL = {"kv_transfer_params": {"pool": {"read": False, "write": False}}}


def is_idle(engine: VllmEngine) -> bool:
    return engine.metrics().total("vllm:num_requests_running") == 0


def computed_tokens(engine: VllmEngine) -> float:
    """Tokens of prompts that an engine has computed itself."""
    return engine.metrics().total("vllm:prompt_tokens_by_source_total", source="local_compute")


def test_an_engine_tells_a_router_which_chunks_its_host_has(pool: PooledEngines) -> None:
    flag = ("--middleware", "scheduler_plugins.vllm.PoolMiddleware")
    with Port() as reserved:
        port = int(reserved)
    publishes = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{port}",
    }
    with zmq.Context() as context, context.socket(zmq.SUB) as events:
        first = pool.start(32, *flag, "--kv-events-config", json.dumps(publishes))
        events.setsockopt(zmq.SUBSCRIBE, b"")
        events.connect(f"tcp://127.0.0.1:{port}")
        second = pool.start(64, *flag)
        salt = fresh_salt()
        pool.computed(first, salt)
        media: dict[str, list[Any]] = {"GPU": [], "CPU": []}

        def told_of_all() -> bool:
            completion(first, [1, 2, 3], 1)  # events come with steps
            while events.poll(100):
                for event in decode_events(events.recv_multipart()[-1]).events:
                    if isinstance(event, Stored):
                        media[str(event.medium)] += event.block_hashes
            return len(media["CPU"]) >= CHUNKS * CHUNK_TOKENS // 32

        wait_until(told_of_all, "KV events of the chunks")
        assert set(media["CPU"]) <= set(media["GPU"]), "vLLM's own names of blocks"
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
