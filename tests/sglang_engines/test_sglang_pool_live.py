# SPDX-License-Identifier: Apache-2.0
"""One host's KV pool behind engines of both kinds: what one of them computed the others load, with equal log probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from harness import completion, fresh_salt, wait_until
from pools import CHUNKS, IN_USE, PROMPT, PooledEngines, counted, hits, sharing_a_pool
from sglang_engines.sglang_harness import TOLERANCE, Answer, SglangEngine, assert_idle, body
from sglang_engines.sglang_recipes import Recipe
from tools import probe

from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.pool.settings import SHM_VARIABLE
from pd_connector.tools.launch import VllmEngine, stop_services

TOKENS = 16
LOADED = CHUNKS * CHUNK_TOKENS
CONFIG = '{"pool": {"memory": "256MiB"}}'

Engine = VllmEngine | SglangEngine


@dataclass(frozen=True)
class Found:
    """An answer's tokens and their log probabilities, and the tokens of its prompt that were loaded."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    loaded: int

    def assert_same(self, other: Found) -> None:
        assert self.tokens == other.tokens
        for place, (here, there) in enumerate(zip(self.logprobs, other.logprobs, strict=True)):
            assert abs(here - there) <= TOLERANCE, f"token {place}: {here}, wanted {there}"


def ask(engine: Engine, salt: str) -> Found:
    """What an engine answers to the prompt. Its own prefix cache has nothing of a new salt."""
    if isinstance(engine, SglangEngine):
        raw = engine.client.post("/generate", body(PROMPT, TOKENS, cache_salt=salt))
        answer = Answer.of(raw)
        return Found(answer.tokens, answer.logprobs, answer.cached_tokens)
    before = hits(engine)
    found = completion(engine, PROMPT, TOKENS, cache_salt=salt)
    tokens = tuple(int(token.removeprefix("token_id:")) for token in found.tokens)
    return Found(tokens, found.logprobs, int(hits(engine) - before) * CHUNK_TOKENS)


@dataclass(frozen=True)
class Host:
    """Engines of one host, by name."""

    pool: PooledEngines
    engines: dict[str, Engine]

    def computed(self, name: str) -> tuple[str, Found]:
        """A new salt, and what an engine answers to it. The chunks are in the pool afterwards."""
        before, salt = len(self.pool.files()), fresh_salt()
        answer = ask(self.engines[name], salt)
        assert answer.loaded == 0
        wait_until(lambda: len(self.pool.files()) >= before + CHUNKS, "the chunks in the pool")
        return salt, answer

    def audited(self, writer: str, reader: str) -> int:
        """Have a reader compare what a writer computes, unless it did before. Returns the tokens that it has loaded."""
        salt, wanted = self.computed(writer)
        engine = self.engines[reader]
        before = counted(engine, "audits")  # type: ignore[arg-type]
        found = ask(engine, salt)
        found.assert_same(wanted)
        if not found.loaded:
            wait_until(lambda: counted(engine, "audits") > before, "the comparison")  # type: ignore[arg-type]
        return found.loaded


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    logs = tmp_path_factory.mktemp("pool")
    with sharing_a_pool(logs) as pool:
        env = ((SHM_VARIABLE, str(pool.shm)),)
        sglang = {
            f"sglang {page}": Recipe(None, page, config=CONFIG, env=env, patient=True).engine(
                f"sglang {page}", logs / f"sglang{page}.log"
            )
            for page in (1, 64)
        }
        try:
            for engine in sglang.values():
                engine.start()
            vllm = pool.start(32, audit="first")
            probe(vllm, "waits_for_its_pool")
            for engine in sglang.values():
                engine.wait_ready()
                log = engine.log_path
                wait_until(
                    lambda log=log: IN_USE in log.read_text(), "the engine knows its weights"
                )
            yield Host(pool, {"vllm": vllm, **sglang})
        finally:
            stop_services(sglang.values())


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ("vllm", "sglang 1"),
        ("vllm", "sglang 64"),
        ("sglang 64", "vllm"),
        ("sglang 64", "sglang 1"),
    ],
)
def test_what_one_engine_computed_another_kind_loads(host: Host, writer: str, reader: str) -> None:
    """The first prompt of a writer is computed and compared, the next one is loaded."""
    host.audited(writer, reader)
    salt, wanted = host.computed(writer)
    found = ask(host.engines[reader], salt)
    found.assert_same(wanted)
    assert found.loaded == LOADED
    other = ask(host.engines[reader], fresh_salt())
    other.assert_same(wanted)
    assert other.loaded == 0, "another salt shares nothing"


def test_altered_chunks_are_read_by_no_kind(host: Host) -> None:
    for writer, reader in (("vllm", "sglang 64"), ("sglang 1", "vllm")):
        host.audited(writer, reader)
        assert host.audited(writer, reader) == LOADED, "control"
        salt, wanted = host.computed(writer)
        host.pool.damage()
        found = ask(host.engines[reader], salt)
        found.assert_same(wanted)
        assert found.loaded == 0
    assert_idle(*(host.engines[name] for name in ("sglang 1", "sglang 64")))
