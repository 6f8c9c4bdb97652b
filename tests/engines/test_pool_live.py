# SPDX-License-Identifier: Apache-2.0
"""Engines with a pool: what one of them computed, the others use, also when it is dead, and never wrongly."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from harness import Answer, assert_same_logprobs, completion, fresh_salt, two_step, wait_until
from recipes import (
    COMPILE_NOTHING,
    EXACT_ARGS,
    MODEL,
    NAME_ARGS,
    PROBE_ARGS,
    PROBE_ENVIRONMENT,
    WORKER_IN_CORE,
    Recipe,
    frozen,
)
from tools import TOLERANCE

from pd_connector.pool.keys import chain
from pd_connector.pool.settings import SHM_VARIABLE
from pd_connector.tools.launch import VllmEngine
from scheduler_plugins.admission.pool_report import PATH, PoolReport, decode

Start = Callable[..., VllmEngine]
CHUNKS = 5
PROMPT = [3 + (7 * place) % 250 for place in range(700)]


@pytest.fixture
def shm() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="pd-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def start(shm: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts engines that share a pool of their own, each ready to use it."""
    started: list[VllmEngine] = []

    def begin(page: int = 32, *args: str, audit: str = "off", model: Path = MODEL) -> VllmEngine:
        recipe = Recipe(
            str(model),
            (*EXACT_ARGS, *NAME_ARGS, *PROBE_ARGS, "--block-size", str(page), *args),
            frozen(PROBE_ENVIRONMENT, COMPILE_NOTHING, WORKER_IN_CORE, {SHM_VARIABLE: str(shm)}),
            "kv_both",
            "PDConnector",
            json.dumps({"audit": audit, "pool": {"memory": "256MiB"}}),
        )
        engine = recipe.engine(f"engine {len(started)}", tmp_path / f"{len(started)}.log")
        started.append(engine)
        engine.start().wait_ready()
        log = tmp_path / f"{len(started) - 1}.log"
        wait_until(lambda: "pool: in use" in log.read_text(), "the engine knows its weights")
        return engine

    yield begin
    for engine in started:
        engine.stop()


def counted(engine: VllmEngine, name: str, **labels: str) -> float:
    return engine.metrics().total(f"pd_connector:{name}_total", **labels)


def hits(engine: VllmEngine) -> float:
    """Chunks that this engine has loaded, told with one more step."""
    completion(engine, [1, 2, 3], 2)
    return counted(engine, "pool_hits")


def computed(engine: VllmEngine, shm: Path, salt: str, chunks: int = CHUNKS) -> Answer:
    """Have an engine compute the prompt, and wait until its chunks are in the pool."""
    answer = completion(engine, PROMPT, 32, cache_salt=salt)
    wait_until(lambda: len(files(shm)) >= chunks, "the chunks in the pool")
    return answer


def files(shm: Path) -> list[Path]:
    return list(shm.glob("*/pool/*/data/*"))


def test_what_a_dead_engine_computed_engines_of_other_layouts_use(start: Start, shm: Path) -> None:
    writer, salt = start(32), fresh_salt()
    wanted = computed(writer, shm, salt)
    writer.kill()
    reader = start(64)
    assert_same_logprobs(completion(reader, PROMPT, 32, cache_salt=salt), wanted, TOLERANCE)
    assert hits(reader) == CHUNKS
    other = completion(reader, PROMPT, 32, cache_salt=fresh_salt())
    assert_same_logprobs(other, wanted, TOLERANCE)
    assert hits(reader) == CHUNKS, "another salt shares nothing"
    halves = start(64, "--tensor-parallel-size", "2")
    assert_same_logprobs(completion(halves, PROMPT, 32, cache_salt=salt), wanted, TOLERANCE)
    assert hits(halves) == CHUNKS


def test_by_default_the_first_hit_of_a_writer_is_computed_and_compared(
    start: Start, shm: Path
) -> None:
    writer, salts = start(32), [fresh_salt(), fresh_salt()]
    wanted = [computed(writer, shm, salt, n * CHUNKS) for n, salt in enumerate(salts, 1)]
    reader = start(64, audit="first")
    for salt, answer, loaded in zip(salts, wanted, (0, CHUNKS), strict=True):
        found = completion(reader, PROMPT, 32, cache_salt=salt)
        assert_same_logprobs(found, answer, TOLERANCE)
        assert hits(reader) == loaded
        wait_until(lambda: counted(reader, "audits", cause="passed") == 1, "the comparison")


def test_damaged_chunks_cost_a_computation_and_no_answer(start: Start, shm: Path) -> None:
    writer, salt = start(32), fresh_salt()
    wanted = computed(writer, shm, salt)
    for file in files(shm):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    reader = start(32)
    assert_same_logprobs(completion(reader, PROMPT, 32, cache_salt=salt), wanted, TOLERANCE)
    assert hits(reader) == 0
    assert counted(reader, "pool_misses", cause="pool") == 1


def test_an_engine_with_other_weights_finds_nothing(
    start: Start, shm: Path, tmp_path: Path
) -> None:
    salt = fresh_salt()
    computed(start(32), shm, salt)
    other = start(32, model=with_one_other_weight(tmp_path / "model"))
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


def test_a_pair_hands_over_with_a_pool_on_both_sides(start: Start, shm: Path) -> None:
    prefill, decode = start(32), start(64)
    salt = fresh_salt()
    wanted = computed(prefill, shm, salt)
    for _ in range(2):
        found = two_step(prefill, decode, PROMPT, cache_salt=salt)
        assert_same_logprobs(found, wanted, TOLERANCE)
    assert counted(decode, "received_transfers") >= 1


def test_an_engine_tells_a_router_which_chunks_its_host_has(start: Start, shm: Path) -> None:
    flag = ("--middleware", "scheduler_plugins.vllm.PoolMiddleware")
    first, second = start(32, *flag), start(64, *flag)
    salt = fresh_salt()
    computed(first, shm, salt)
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
