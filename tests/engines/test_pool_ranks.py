# SPDX-License-Identifier: Apache-2.0
"""Data-parallel ranks of one server share a pool. Each is an engine of its own: it reads its weights, and is woken to tell it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from harness import Answer, answer_of, assert_same_logprobs, fresh_salt, request_body, wait_until
from pauses import no_generation
from pools import CHUNKS, PROMPT, PooledEngines, in_use, sharing_a_pool
from recipes import MODEL
from test_identity_live import retrained
from test_pool_weights import TRAINER, unread
from tools import TOLERANCE, probe_all

from pd_connector.tools.launch import VllmEngine

RANKS = range(2)
# With 0.33, each data-parallel rank on a CPU needs a NUMA node of its own.
DATA_PARALLEL = ("--data-parallel-size", str(len(RANKS)))


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PooledEngines]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with sharing_a_pool(tmp_path) as engines:
        yield engines


def answer_from(engine: VllmEngine, rank: int, salt: str) -> Answer:
    body = json.dumps(request_body(engine, PROMPT, cache_salt=salt)).encode()
    headers = {"Content-Type": "application/json", "X-data-parallel-rank": str(rank)}
    request = Request(f"{engine.base_url}/v1/completions", body, headers)
    with urlopen(request, timeout=120) as answer:
        return answer_of(json.load(answer))


def test_each_rank_uses_the_pool_with_its_first_request_after_weights_were_loaded_while_paused(
    pool: PooledEngines, tmp_path: Path
) -> None:
    server, salt = pool.start(32, *TRAINER, *DATA_PARALLEL, apart=True, vllm="0.32"), fresh_salt()
    wait_until(lambda: in_use(server) == 2, "both ranks know their weights")
    wanted = answer_from(server, 0, salt)
    wait_until(lambda: len(pool.files()) == CHUNKS, "the chunks in the pool")
    with no_generation(server, "keep"):
        with unread():
            probe_all(server, "reload_weights", None, str(retrained(tmp_path / "other")))
        wait_until(lambda: in_use(server) == 4, "both tell the other weights without a request")
        with unread():
            probe_all(server, "reload_weights", None, str(MODEL))
        wait_until(lambda: in_use(server) == 6, "both tell the first ones without a request")
    with ThreadPoolExecutor(len(RANKS)) as threads:
        answers = threads.map(lambda rank: answer_from(server, rank, salt), RANKS)
    for answer in answers:
        assert_same_logprobs(answer, wanted, TOLERANCE)
    loaded = server.metrics()
    assert [loaded.total("pd_connector:pool_hits_total", engine=str(n)) for n in RANKS] == [
        CHUNKS
    ] * 2
