# SPDX-License-Identifier: Apache-2.0
"""Real SGLang engines for tests: pairs that share engines, requests to them, and what must hold
afterwards."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pd_connector.tools.demo import MODEL_DIR
from pd_connector.tools.launch import Service, stop_services, wait_all
from pd_connector.tools.launch.client import HttpError
from pd_connector.tools.launch.sglang import SglangEngine

EXACT_ARGS = ("--dtype", "float32", "--random-seed", "1")
"""In float32 nothing ties: two engines that see the same KV choose the same tokens."""
TOLERANCE = 1e-3
DEADLINE_S = 120.0
IDLE_GAUGES = (
    "pd_connector:leased_pages",
    "pd_connector:outgoing_transfers",
    "pd_connector:incoming_transfers",
    "pd_connector:landing_slots",
    "pd_connector:send_slots",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
)

_rooms = random.Random()


@dataclass(frozen=True)
class Recipe:
    """How an engine is started; engines with equal recipes are shared."""

    role: str | None
    page_size: int = 16
    tp: int = 1
    args: tuple[str, ...] = ()
    config: str = "{}"  # JSON, so that a recipe can be a key
    env: tuple[tuple[str, str], ...] = ()

    def engine(self, name: str, log: Path) -> SglangEngine:
        return SglangEngine(
            MODEL_DIR,
            self.role,  # type: ignore[arg-type]
            extra_config=json.loads(self.config),
            page_size=self.page_size,
            tp=self.tp,
            name=name,
            args=[*EXACT_ARGS, *self.args],
            env=dict(self.env),
            log_path=log,
        )


CHUNK_TOKENS = 128
CHUNKED = ("--chunked-prefill-size", str(CHUNK_TOKENS))
PREFILL = Recipe("prefill", 16, args=CHUNKED)
DECODE = Recipe("decode", 16)
"""What most tests use, so that they share engines."""


@dataclass(frozen=True)
class Answer:
    """A completion: its tokens and their log probabilities."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Answer:
        meta = raw["meta_info"]
        rows = meta["output_token_logprobs"]
        assert [row[1] for row in rows] == raw["output_ids"], "logprobs of other tokens"
        tokens = tuple(raw["output_ids"])
        return cls(tokens, tuple(row[0] for row in rows), meta["cached_tokens"])


def new_room() -> int:
    """A transfer id that nobody has used."""
    return _rooms.getrandbits(62) + 1


def body(prompt: Sequence[int], max_tokens: int = 16, **extra: Any) -> dict[str, Any]:
    """A greedy request for exactly this many tokens."""
    sampling = {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return {
        "input_ids": list(prompt),
        "sampling_params": sampling,
        "return_logprob": True,
        **extra,
    }


def ask(engine: SglangEngine, prompt: Sequence[int], max_tokens: int = 16) -> Answer:
    """What one engine answers alone."""
    return Answer.of(engine.client.post("/generate", body(prompt, max_tokens)))


def send(
    p: SglangEngine, d: SglangEngine, prompt: Sequence[int], max_tokens: int = 16, **extra: Any
) -> tuple[Future[dict[str, Any]], Future[dict[str, Any]]]:
    """Send a request to both engines at once, as `sglang_router` does; their answers come later."""
    extra.setdefault("bootstrap_room", new_room())
    extra.setdefault("bootstrap_host", p.host)
    extra.setdefault("bootstrap_port", p.bootstrap_port)
    request = body(prompt, max_tokens, **extra)
    pool = ThreadPoolExecutor(2)
    futures = tuple(pool.submit(e.client.post, "/generate", request) for e in (p, d))
    pool.shutdown(wait=False)
    return futures  # type: ignore[return-value]


def handed_over(
    p: SglangEngine, d: SglangEngine, prompt: Sequence[int], max_tokens: int = 16, **extra: Any
) -> Answer:
    """The answer of a pair."""
    prefill, decode = send(p, d, prompt, max_tokens, **extra)
    answer = Answer.of(decode.result())
    prefill.result()
    return answer


def refused(future: Future[dict[str, Any]]) -> str:
    """The text of an error answer; fails if the request was answered."""
    try:
        answer = future.result()
    except HttpError as error:
        return error.body
    raise AssertionError(f"answered: {answer}")


def ended(*futures: Future[dict[str, Any]]) -> list[str]:
    """How requests ended that may have been answered with an error or as aborted."""
    found = []
    for future in futures:
        error = future.exception(timeout=60)
        found.append(str(error) if error else str(future.result()["meta_info"]["finish_reason"]))
    return found


def assert_same(found: Answer, wanted: Answer) -> None:
    """All tokens equal, all log probabilities within the tolerance."""
    assert found.tokens == wanted.tokens
    for place, (here, there) in enumerate(zip(found.logprobs, wanted.logprobs, strict=True)):
        assert abs(here - there) <= TOLERANCE, f"token {place}: {here}, wanted {there}"


def received_bytes(engine: SglangEngine) -> float:
    """What it has received until now. An engine brings its metrics up to date once a second."""
    time.sleep(2.0)
    return engine.metrics().total("pd_connector:received_bytes_total")


def assert_idle(*engines: Service) -> None:
    """Wait until nothing is under way. SGLang itself ends an idle engine whose pages do not add up."""
    end = time.monotonic() + DEADLINE_S
    for engine in engines:
        left: dict[str, float] = {}
        while True:
            samples = engine.client.metrics()
            left = {name: value for name in IDLE_GAUGES if (value := samples.total(name))}
            if not left:
                break
            assert time.monotonic() < end, f"{engine.name} is not idle: {left}"
            time.sleep(0.2)
        assert engine.running


def text(length: int, seed: int = 0) -> list[int]:
    """A prompt of so many tokens of the demo's model, which reads bytes: English-like words."""
    source, known = random.Random(seed), _TEXT.split()
    words = [source.choice(known) for _ in range(length)]
    return list(" ".join(words).encode()[:length])


_TEXT = """the a of and to in is was for on that with as by at from it an be this are which or had
not but have one all were when we there can more if out so said what up its about into than them
only other new some could time these two may then do first any my now such like our over man me even
most made after also did many before must through years where much your"""


class EnginePool:
    """All engines of a session: at most one of each role runs, and the one that answers are held to."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._number = itertools.count(1)
        self._running: dict[str | None, tuple[Recipe, SglangEngine]] = {}
        self._answers: dict[str, Answer] = {}

    @property
    def services(self) -> list[Service]:
        return [engine for _, engine in self._running.values()]

    def pair(self, prefill: Recipe, decode: Recipe) -> tuple[SglangEngine, SglangEngine]:
        """Two running engines; what runs with another recipe is stopped."""
        started = [self._want(prefill), self._want(decode)]
        wait_all([engine for engine in started if engine is not None])
        return self._running[prefill.role][1], self._running[decode.role][1]

    def reference(self, prompts: Sequence[Sequence[int]], max_tokens: int = 16) -> list[Answer]:
        """What one engine answers alone; each prompt is asked once a session."""
        recipe = Recipe(None, args=("--disable-radix-cache",))
        missing = [p for p in prompts if json.dumps([p, max_tokens]) not in self._answers]
        if missing:
            started = self._want(recipe)
            wait_all([started] if started else [])
            engine = self._running[None][1]
            for prompt in missing:
                self._answers[json.dumps([prompt, max_tokens])] = ask(engine, prompt, max_tokens)
        return [self._answers[json.dumps([p, max_tokens])] for p in prompts]

    def stop(self) -> None:
        stop_services(self.services)
        self._running.clear()

    def _want(self, recipe: Recipe) -> SglangEngine | None:
        """Have this engine running, or started; returns it if it was started now."""
        known = self._running.get(recipe.role)
        if known and known[0] == recipe and known[1].running:
            return None
        if known:
            known[1].stop()
        name = recipe.role or "reference"
        engine = recipe.engine(name, self._logs / f"{name}{next(self._number)}.log")
        self._running[recipe.role] = recipe, engine
        return engine.start()
