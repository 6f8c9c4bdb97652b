# SPDX-License-Identifier: Apache-2.0
"""vLLM and SGLang engines that share a KV pool, and what tests ask of them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness import completion, fresh_salt, wait_until
from pools import IN_USE, PROMPT, PooledEngines, counted, hits, sharing_a_pool
from sglang_engines.sglang_harness import Answer, SglangEngine, assert_close, assert_same, body
from sglang_engines.sglang_recipes import FAULTS, Recipe
from tools import probe

from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.pool.settings import SHM_VARIABLE
from pd_connector.tools.launch import VllmEngine, stop_services

TOKENS = 16
MEMORY = "256MiB"

Engine = VllmEngine | SglangEngine


@dataclass(frozen=True)
class Found:
    """An answer's tokens and their log probabilities, the tokens of its prompt that were loaded, and by how much the likeliest
    token was likelier than the next in each place."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    loaded: int
    leads: tuple[float, ...]

    def assert_same(self, other: Found, noise: float = 0.0) -> None:
        """All tokens equal, all log probabilities within the tolerance; with `noise` as `assert_close` says."""
        found, wanted = (
            Answer(each.tokens, each.logprobs, each.loaded, each.leads) for each in (self, other)
        )
        if noise:
            assert_close(found, wanted, noise)
        else:
            assert_same(found, wanted)


def ask(engine: Engine, salt: str, prompt: Sequence[int] = PROMPT, adapter: str = "") -> Found:
    """What an engine answers to a prompt, with one of its adapters or none. Its own prefix cache has nothing of a new salt."""
    if isinstance(engine, SglangEngine):
        extra = {"lora_path": adapter} if adapter else {}
        raw = engine.client.post("/generate", body(prompt, TOKENS, cache_salt=salt, **extra))
        assert raw["meta_info"]["finish_reason"]["type"] == "length", "aborted"
        answer = Answer.of(raw)
        return Found(answer.tokens, answer.logprobs, answer.cached_tokens, answer.leads)
    before = hits(engine)
    extra = {"model": adapter} if adapter else {}
    found = completion(engine, prompt, TOKENS, cache_salt=salt, **extra)
    tokens = tuple(int(token.removeprefix("token_id:")) for token in found.tokens)
    best = (sorted(top.values(), reverse=True) for top in found.top)
    leads = tuple(top[0] - top[1] for top in best)
    return Found(tokens, found.logprobs, int(hits(engine) - before) * CHUNK_TOKENS, leads)


@dataclass(frozen=True)
class Host:
    """Engines of one host, by name."""

    pool: PooledEngines
    engines: dict[str, Engine]

    def computed(
        self, name: str, prompt: Sequence[int] = PROMPT, adapter: str = ""
    ) -> tuple[str, Found]:
        """A new salt, and what an engine answers to it. The chunks are in the pool afterwards."""
        before, salt = set(self.pool.files()), fresh_salt()
        answer = ask(self.engines[name], salt, prompt, adapter)
        assert answer.loaded == 0
        ranks = getattr(self.engines[name], "tp", 1)
        self.wait_for_files(before, ranks * (len(prompt) // CHUNK_TOKENS))
        return salt, answer

    def wait_for_files(self, before: Collection[Path], count: int) -> None:
        """Wait until the pool has `count` files that are not among `before`."""
        wait_until(lambda: len(set(self.pool.files()) - set(before)) >= count, "the chunks")

    def audited(
        self, writer: str, reader: str, prompt: Sequence[int] = PROMPT, noise: float = 0.0
    ) -> int:
        """Have a reader compare what a writer computes, unless it did before. Returns the tokens that it has loaded."""
        salt, wanted = self.computed(writer, prompt)
        engine = self.engines[reader]
        before = counted(engine, "audits")  # type: ignore[arg-type]
        found = ask(engine, salt, prompt)
        found.assert_same(wanted, noise)
        if not found.loaded:
            wait_until(lambda: counted(engine, "audits") > before, "the comparison")  # type: ignore[arg-type]
        return found.loaded

    def in_use(self, name: str) -> int:
        """How often the ranks of an engine have said that they use the pool: after each start, and each time that they know
        other weights."""
        return self.engines[name].log_path.read_text().count(IN_USE)

    def wait_in_use(self, name: str, before: int = 0) -> None:
        """Wait until each rank of an SGLang engine has said it once more. The first one says it by itself, others when a
        prompt comes."""
        engine = self.engines[name]
        wait_until(lambda: self.in_use(name) > before, "the engine knows its weights")

        def all_know() -> bool:
            ask(engine, fresh_salt())
            return self.in_use(name) >= before + engine.tp  # type: ignore[union-attr]

        if engine.tp > 1:  # type: ignore[union-attr]
            wait_until(all_know, "each rank knows its weights")

    def assert_nothing_held(self, name: str) -> None:
        """Wait until an idle SGLang engine holds nothing for requests and saves. See `PATIENT`."""
        told = Path(f"{self.engines[name].log_path.with_suffix('')}.held")

        def held() -> dict[str, int]:
            told.unlink(missing_ok=True)
            wait_until(told.exists, f"{name} is idle", every_s=0.01)
            return dict(json.loads(told.read_text()))

        wait_until(lambda: not any(held().values()), lambda: f"{name} holds {held()}")


@contextmanager
def hosting(
    logs: Path, sglang: Mapping[str, Recipe], vllm: Mapping[str, Mapping[str, Any]]
) -> Iterator[Host]:
    """Engines that share a pool and use it.

    Args:
        vllm: keywords of `PooledEngines.start` for each; `args` are those of vLLM.
    """
    with sharing_a_pool(logs) as pool:
        engines: dict[str, Engine] = {}
        for number, (name, recipe) in enumerate(sglang.items()):
            log = logs / f"sglang{number}.log"
            env = (*recipe.env, (SHM_VARIABLE, str(pool.shm)), (FAULTS, str(log.with_suffix(""))))
            engines[name] = replace(recipe, env=env, patient=True).engine(name, log)
        try:
            for engine in engines.values():
                engine.start()
            host = Host(pool, engines)
            for name, arguments in vllm.items():
                args, more = arguments.get("args", ()), {**arguments}
                more.pop("args", None)
                host.engines[name] = pool.start(32, *args, audit="first", **more)
                probe(host.engines[name], "waits_for_its_pool")
            for name in sglang:
                engines[name].wait_ready()
                host.wait_in_use(name)
            yield host
        finally:
            stop_services([engines[name] for name in sglang if name in engines])
