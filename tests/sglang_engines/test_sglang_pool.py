# SPDX-License-Identifier: Apache-2.0
"""SGLang engines that share a KV pool: what one computed the other loads, verified, and answers alike."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from sglang_engines.sglang_harness import Answer, EnginePool, assert_same, body, text
from sglang_engines.sglang_recipes import CHUNKED, Recipe
from support.waits import until

from pd_connector.pool.settings import SHM_VARIABLE
from pd_connector.tools.launch import wait_all
from pd_connector.tools.launch.sglang import SglangEngine
from scheduler_plugins.admission.pool_report import PATH, decode

CONFIG = '{"pool": {"memory": "128MiB"}}'
TOKENS, CHUNKS = 700, 5


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="pd-test-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def pair(engines: EnginePool, folder: Path) -> tuple[SglangEngine, SglangEngine]:
    env = ((SHM_VARIABLE, str(folder)),)
    recipes = [Recipe(None, page, args=CHUNKED, config=CONFIG, env=env) for page in (16, 64)]
    started = [engines.start(recipe) for recipe in recipes]
    wait_all(started)
    for engine in started:
        until(lambda engine=engine: reported(engine) == 200)
    return started[0], started[1]


def reported(engine: SglangEngine) -> int:
    try:
        with urlopen(engine.base_url + PATH, timeout=30) as answer:
            decode(answer.read())
            return int(answer.status)
    except OSError as error:
        return int(getattr(error, "code", 0))


def ask(engine: SglangEngine, prompt: list[int], **more: Any) -> Answer:
    return Answer.of(engine.client.post("/generate", body(prompt, 8, **more)))


def stored(folder: Path) -> int:
    return len(list(folder.rglob("index/*")))


def flush(engine: SglangEngine) -> None:
    with urlopen(Request(engine.base_url + "/flush_cache", b""), timeout=60):
        pass


def test_what_one_engine_computed_another_loads_after_an_audit(
    pair: tuple[SglangEngine, SglangEngine], folder: Path
) -> None:
    writer, reader = pair
    computed = [ask(writer, text(TOKENS, seed)) for seed in (1, 2)]
    until(lambda: stored(folder) == 2 * CHUNKS)
    first = ask(reader, text(TOKENS, 1))
    assert_same(first, computed[0])
    assert first.cached_tokens == 0, "the first prompt of a writer is computed and compared"
    until(lambda: reader.metrics().total("pd_connector:audits_total", cause="passed") > 0)
    loaded = ask(reader, text(TOKENS, 2))
    assert_same(loaded, computed[1])
    assert loaded.cached_tokens >= (CHUNKS - 1) * 128
    other = ask(reader, text(TOKENS, 2), cache_salt="mine")
    assert_same(other, computed[1])
    assert other.cached_tokens == 0, "another salt shares nothing"


def test_files_that_are_cut_cost_a_computation(
    pair: tuple[SglangEngine, SglangEngine], folder: Path
) -> None:
    writer, _ = pair
    computed = ask(writer, text(TOKENS, 1))
    flush(writer)
    for file in folder.rglob("data/*"):
        with file.open("r+b") as opened:
            opened.truncate(100)
    again = ask(writer, text(TOKENS, 1))
    assert_same(again, computed)
    assert again.cached_tokens == 0
