# SPDX-License-Identifier: Apache-2.0
"""Real SGLang engines for tests: pairs that share engines, requests to them, and what must hold
afterwards."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from sglang_engines.sglang_recipes import FAULTS, REFERENCE, Recipe

from pd_connector.tools.launch import Service, stop_services, wait_all
from pd_connector.tools.launch.client import HttpError
from pd_connector.tools.launch.sglang import SglangEngine

TOLERANCE = 1e-3
DEADLINE_S = 120.0
IDLE_GAUGES = (
    "pd_connector:leased_pages",
    "pd_connector:outgoing_transfers",
    "pd_connector:incoming_transfers",
    "pd_connector:landing_slots",
    "pd_connector:send_slots",
)
IDLE_LOADS = ("num_running_reqs", "num_waiting_reqs")
"""Counts of `/v1/loads`, which an idle engine writes at each step. The gauges of SGLang's `/metrics` are those of the last batch: after
an abort they stay up to 30 s."""

_rooms = random.Random()


@dataclass(frozen=True)
class Answer:
    """A completion: its tokens, their log probabilities, and by how much the likeliest token was
    likelier than the next in each place."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int
    leads: tuple[float, ...]

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Answer:
        meta = raw["meta_info"]
        rows = meta["output_token_logprobs"]
        assert [row[1] for row in rows] == raw["output_ids"], "logprobs of other tokens"
        tokens = tuple(raw["output_ids"])
        best = [
            sorted((row[0] for row in top), reverse=True) for top in meta["output_top_logprobs"]
        ]
        leads = tuple(first - second for first, second in best)
        return cls(tokens, tuple(row[0] for row in rows), meta["cached_tokens"], leads)


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
        "top_logprobs_num": 2,
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


def abort_all(engine: SglangEngine) -> None:
    """End every request of an engine."""
    request = Request(
        f"{engine.base_url}/abort_request",
        json.dumps({"abort_all": True, "rid": ""}).encode(),
        {"Content-Type": "application/json"},
    )
    with urlopen(request, timeout=60):  # it answers without a body
        pass


@contextlib.contextmanager
def paused(engine: SglangEngine, mode: str) -> Iterator[None]:
    """Within, an engine generates nothing."""
    engine.client.post("/pause_generation", {"mode": mode})
    try:
        yield
    finally:
        engine.client.post("/continue_generation", {})


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
    assert found.tokens == wanted.tokens, f"tokens {found.tokens}, wanted {wanted.tokens}"
    for place, (here, there) in enumerate(zip(found.logprobs, wanted.logprobs, strict=True)):
        assert abs(here - there) <= TOLERANCE, f"token {place}: {here}, wanted {there}"


def assert_close(found: Answer, wanted: Answer, noise: float) -> None:
    """The same where KV or sums are rounded: log probabilities within `noise` up to the first token that
    differs. It may differ only where the reference's two best are within twice the noise. What follows
    has another context, and is not compared."""
    rows = zip(found.tokens, wanted.tokens, found.logprobs, wanted.logprobs, strict=True)
    for place, (token, other, here, there) in enumerate(rows):
        if token != other:
            lead = wanted.leads[place]
            assert lead <= 2 * noise, (
                f"token {place}: {token}, wanted {other}, which leads by {lead}"
            )
            return
        assert abs(here - there) <= noise, f"token {place}: {here}, wanted {there}"


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
            ranks = json.loads(engine.client.get("/v1/loads"))["loads"]
            assert ranks, f"{engine.name} says nothing of its requests"
            for name in IDLE_LOADS:
                if count := sum(rank[name] for rank in ranks):
                    left[name] = count
            if not left:
                break
            assert time.monotonic() < end, f"{engine.name} is not idle: {left}"
            time.sleep(0.2)
        assert engine.running


def text(length: int, seed: int = 0) -> list[int]:
    """A prompt of `length` tokens of the demo's model, which reads bytes: English-like words."""
    source, known = random.Random(seed), _TEXT.split()
    words = [source.choice(known) for _ in range(length)]
    return list(" ".join(words).encode()[:length])


_TEXT = """the a of and to in is was for on that with as by at from it an be this are which or had
not but have one all were when we there can more if out so said what up its about into than them
only other new some could time these two may then do first any my now such like our over man me even
most made after also did many before must through years where much your"""


@contextlib.contextmanager
def fault(engine: SglangEngine, name: str, how: str = "") -> Iterator[None]:
    """Within, an engine has this fault; `how` is what the fault wants to know."""
    switch = Path(engine.env[FAULTS] + name)
    switch.write_text(how)
    try:
        yield
    finally:
        switch.unlink()


class EnginePool:
    """All engines of a session: one of each role, the one that answers are held to, and what was started
    ahead for tests that follow."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._number = itertools.count(1)
        self._running: dict[Recipe, SglangEngine] = {}
        self._ahead: set[Recipe] = set()
        self._dead: list[SglangEngine] = []  # their ports stay reserved for their successors
        self._answers: dict[str, Answer] = {}

    @property
    def services(self) -> list[Service]:
        return list(self._running.values())

    def pair(self, prefill: Recipe, decode: Recipe) -> tuple[SglangEngine, SglangEngine]:
        """Two running engines; other prefill and decode engines are stopped, unless they were started
        ahead and no pair has had them yet."""
        self._ahead -= {prefill, decode}
        kept = {prefill, decode, REFERENCE} | self._ahead
        over = [self._running.pop(recipe) for recipe in self._running.keys() - kept]
        self.start(prefill)
        self.start(decode)
        stop_services(over)  # meanwhile: an engine that is not forked takes up to five seconds
        wait_all([self._running[prefill], self._running[decode]])
        return self._running[prefill], self._running[decode]

    def start_ahead(self, *recipes: Recipe) -> None:
        """Start engines that tests to come will ask for. They start side by side with what runs."""
        for recipe in recipes:
            self.start(recipe)
            self._ahead.add(recipe)

    def replace(self, dead: SglangEngine, recipe: Recipe) -> SglangEngine:
        """Start an engine at the addresses of one that was killed. Returns it before it is ready."""
        for known in [known for known, engine in self._running.items() if engine is dead]:
            del self._running[known]
        self._dead.append(dead)
        return self.start(recipe, at=dead)

    def start(self, recipe: Recipe, at: SglangEngine | None = None) -> SglangEngine:
        """The engine of this recipe, started if it does not run; maybe at the addresses of another."""
        known = self._running.get(recipe)
        if known is not None and known.running:
            return known
        if known is not None:
            known.stop()
            return known.start()
        name = recipe.role or "reference"
        log = self._logs / f"{name}{next(self._number)}.log"
        engine = recipe.engine(name, log, port=at.port if at else None)
        if at is not None and at.bootstrap_port is not None:
            engine.bootstrap_port = at.bootstrap_port
        self._running[recipe] = engine.start()
        return engine

    def reference(self, prompts: Sequence[Sequence[int]], max_tokens: int = 16) -> list[Answer]:
        """What one engine answers alone; each prompt is asked once a session."""
        missing = [p for p in prompts if json.dumps([p, max_tokens]) not in self._answers]
        if missing:
            engine = self.start(REFERENCE)
            wait_all([engine])
            for prompt in missing:
                self._answers[json.dumps([prompt, max_tokens])] = ask(engine, prompt, max_tokens)
        return [self._answers[json.dumps([p, max_tokens])] for p in prompts]

    def stop(self) -> None:
        stop_services(self.services)
        self._running.clear()
