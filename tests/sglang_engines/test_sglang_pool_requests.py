# SPDX-License-Identifier: Apache-2.0
"""A KV pool behind one SGLang engine, and all that may become of a request: its prompt is computed in pieces, it has several
answers, it is aborted, paused or retracted, and the engine's cache is flushed. Answers are those without the pool, and nothing
is held.

The engine loads what it has saved itself, after a flush.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from harness import fresh_salt, wait_until
from sglang_engines.sglang_harness import (
    Answer,
    SglangEngine,
    abort_all,
    assert_idle,
    assert_same,
    body,
    paused,
    text,
)
from sglang_engines.sglang_pools import MEMORY, Host, hosting
from sglang_engines.sglang_recipes import Recipe

from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.tools.launch.client import HttpError

NAME = "sglang"
CONFIG = f'{{"pool": {{"memory": "{MEMORY}"}}}}'
POOL_TOKENS = 2048
ARGS = (
    *("--chunked-prefill-size", "256"),
    *("--max-total-tokens", str(POOL_TOKENS)),
)
PROMPTS = [text(tokens, seed=tokens) for tokens in (300, 400, 700)]
LONG = text(1500, seed=3)
TOKENS = 16
ROUNDS = 4


class Engine:
    """The engine, and what it answered before the pool had anything."""

    def __init__(self, host: Host) -> None:
        self.host = host
        engine = host.engines[NAME]
        assert isinstance(engine, SglangEngine)
        self.engine = engine
        self._wanted: dict[tuple[int, int], Answer] = {}

    def ask(self, prompt: Sequence[int], salt: str, tokens: int = TOKENS, **extra: Any) -> Any:
        return self.engine.client.post("/generate", body(prompt, tokens, cache_salt=salt, **extra))

    def wanted(self, prompt: Sequence[int], tokens: int = TOKENS) -> Answer:
        """What it computes without the pool."""
        key = len(prompt), tokens
        if key not in self._wanted:
            answer = Answer.of(self.ask(prompt, fresh_salt(), tokens))
            assert answer.cached_tokens == 0
            self._wanted[key] = answer
        return self._wanted[key]

    def stored(self, prompt: Sequence[int]) -> str:
        """A salt with which the pool has the prompt, and the engine's own cache has nothing."""
        salt, _ = self.host.computed(NAME, prompt)
        wait_until(self.flush, "the engine's cache is empty")
        return salt

    def flush(self) -> bool:
        """Empty the engine's cache. False: it has requests."""
        try:
            with urlopen(Request(f"{self.engine.base_url}/flush_cache", method="POST"), timeout=60):
                return True
        except HTTPError:
            return False

    def abort(self, rid: str) -> None:
        """End one request."""
        headers = {"Content-Type": "application/json"}
        data = json.dumps({"rid": rid}).encode()
        with urlopen(Request(f"{self.engine.base_url}/abort_request", data, headers), timeout=60):
            pass

    def loads(self, prompt: Sequence[int], salt: str) -> int:
        """Ask once more. Returns the tokens that were loaded."""
        wait_until(self.flush, "the engine's cache is empty")
        answer = Answer.of(self.ask(prompt, salt))
        assert_same(answer, self.wanted(prompt))
        return answer.cached_tokens

    def assert_nothing_held(self) -> None:
        assert_idle(self.engine)
        self.host.assert_nothing_held(NAME)


@pytest.fixture(scope="module", params=["overlap", "no overlap"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    overlaps = request.param == "overlap"
    args = ARGS if overlaps else (*ARGS, "--disable-overlap-schedule")
    recipe = Recipe(None, 16, args=args, config=CONFIG)
    with hosting(tmp_path_factory.mktemp("requests"), {NAME: recipe}, {}) as host:
        made = Engine(host)
        told = json.loads(made.engine.client.get("/server_info"))
        assert told["disable_overlap_schedule"] != overlaps
        yield made


def whole(prompt: Sequence[int]) -> int:
    """Tokens of its whole chunks that can be loaded."""
    return (len(prompt) - 1) // CHUNK_TOKENS * CHUNK_TOKENS


def test_a_flush_takes_nothing_from_the_pool_and_disturbs_no_load(engine: Engine) -> None:
    salts = {tuple(prompt): engine.stored(prompt) for prompt in PROMPTS}
    for prompt in PROMPTS:
        assert engine.loads(prompt, salts[tuple(prompt)]) == whole(prompt)
        assert engine.loads(prompt, fresh_salt()) == 0, "control"
    for _ in range(ROUNDS):
        with ThreadPoolExecutor(len(PROMPTS)) as threads:
            wait_until(engine.flush, "the engine's cache is empty")
            answers = [threads.submit(engine.ask, p, salts[tuple(p)]) for p in PROMPTS]
            while not all(answer.done() for answer in answers):
                engine.flush()
            for prompt, answer in zip(PROMPTS, answers, strict=True):
                assert_same(Answer.of(answer.result()), engine.wanted(prompt))
    engine.assert_nothing_held()


def test_a_prompt_that_is_computed_in_pieces_begins_with_what_was_loaded(engine: Engine) -> None:
    wanted = engine.wanted(LONG)
    salt = engine.stored(LONG[:700])
    before = set(engine.host.pool.files())
    answer = Answer.of(engine.ask(LONG, salt))
    assert_same(answer, wanted)
    assert answer.cached_tokens == 5 * CHUNK_TOKENS
    engine.host.wait_for_files(before, len(LONG) // CHUNK_TOKENS - 5)
    assert engine.loads(LONG, salt) == whole(LONG)
    engine.assert_nothing_held()


def test_each_of_several_answers_is_that_of_a_loaded_prompt(engine: Engine) -> None:
    for prompt in PROMPTS:
        wanted = engine.wanted(prompt)
        salt = engine.stored(prompt)
        sampling = {**body(prompt, TOKENS)["sampling_params"], "n": 3}
        answers = engine.ask(prompt, salt, sampling_params=sampling)
        assert len(answers) == 3
        for each in answers:
            assert_same(Answer.of(each), wanted)
            assert Answer.of(each).cached_tokens >= whole(prompt)
    engine.assert_nothing_held()


def sent(
    engine: Engine, threads: ThreadPoolExecutor, dice: random.Random, salts: dict[int, str]
) -> list[tuple[int, str, Future[Any]]]:
    """Requests under way, some with stored prompts, some with new ones: the place of the prompt, and the id of each."""
    found = []
    for place in [*salts, *salts]:
        rid = f"r{dice.getrandbits(64):x}"
        salt = salts[place] if dice.random() < 0.6 else fresh_salt()
        asked = threads.submit(engine.ask, PROMPTS[place], salt, 64, rid=rid)
        found.append((place, rid, asked))
    return found


def check(engine: Engine, place: int, answer: Future[Any]) -> str:
    """How it ended. What was answered is right."""
    try:
        raw = answer.result()
    except HttpError as error:
        if "abort" not in str(error).lower():
            raise
        return "abort"
    reason = str(raw["meta_info"]["finish_reason"]["type"])
    if reason != "abort":
        assert_same(Answer.of(raw), engine.wanted(PROMPTS[place], 64))
    return reason


Disturb = Callable[[int, Sequence[str]], None]
"""Disturbs a round's requests. It has the round's number, and their ids."""


def disturbed(engine: Engine, disturb: Disturb) -> set[str]:
    """Rounds of requests that are disturbed in any step. What was answered is right, and nothing is held or lost. Returns how the
    requests ended."""
    for prompt in PROMPTS:
        engine.wanted(prompt, 64)
    salts = {place: engine.stored(prompt) for place, prompt in enumerate(PROMPTS)}
    ended = set()
    for number in range(ROUNDS):
        dice = random.Random(number)
        wait_until(engine.flush, "the engine's cache is empty")
        with ThreadPoolExecutor(2 * len(PROMPTS)) as threads:
            under_way = sent(engine, threads, dice, salts)
            time.sleep(dice.random() * 0.3)
            disturb(number, [rid for _, rid, _ in under_way])
            ended |= {check(engine, place, answer) for place, _, answer in under_way}
        engine.assert_nothing_held()
    for place, prompt in enumerate(PROMPTS):
        assert engine.loads(prompt, salts[place]) == whole(prompt)
    engine.assert_nothing_held()
    return ended


def test_aborted_requests_hold_nothing_and_spoil_nothing(engine: Engine) -> None:
    def abort(number: int, rids: Sequence[str]) -> None:
        if number % 2:
            abort_all(engine.engine)
        else:
            for rid in rids[::2]:
                engine.abort(rid)

    assert disturbed(engine, abort) == {"abort", "length"}


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_a_pause_ends_with_right_answers(engine: Engine, mode: str) -> None:
    """Requests wait for chunks, are loaded, computed and answered when it comes. In mode `retract` the cache is flushed, too."""

    def pause(number: int, rids: Sequence[str]) -> None:
        with paused(engine.engine, mode):
            if mode == "retract" and number % 2:
                assert engine.flush()

    assert disturbed(engine, pause) <= ({"abort", "length"} if mode == "abort" else {"length"})
