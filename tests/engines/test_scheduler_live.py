# SPDX-License-Identifier: Apache-2.0
"""vLLM's engines with `PrefixAwareScheduler`: alone, and on both sides of a handoff.

The prefill engine runs one request at a time, so that the order in which requests end is the order
in which they were taken.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import pytest
from harness import (
    assert_same_logprobs,
    completion,
    fresh_salt,
    request_body,
    two_step,
    wait_until,
)
from pairs import Pair, Setup
from recipes import NEW
from test_handoff import LENGTHS, prompt_of
from tools import TOLERANCE, delta

from pd_connector.tools.launch import Service
from scheduler_plugins.admission.board import default_folder
from scheduler_plugins.admission.post import Posted, read_post

FLAG = "scheduler_plugins.vllm.PrefixAwareScheduler"
CLASSES = """
scheduler:
  qos_classes:
    - {name: premium, reserved_fraction: 0.3, priority: 100, slo: {ttft_ms: 60000}}
    - {name: free, reserved_fraction: 0.7, priority: 10}
"""
WAITING = "vllm:num_requests_waiting"


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    path = tmp_path_factory.mktemp("scheduler") / "scheduler.yaml"
    path.write_text(CLASSES)
    return Setup.of(
        vllm=NEW,
        args=[
            "--scheduler-cls",
            FLAG,
            "--additional-config",
            json.dumps({"pd_scheduler": str(path)}),
        ],
        prefill_args=["--max-num-seqs", "1"],
    )


def posted(engine: Service) -> Posted:
    """What the engine's core has told last: its parent is the process that we started."""
    assert engine.family is not None
    (path,) = default_folder().glob(f"*-{engine.family.pid}.dp0")
    found = read_post(path)
    assert found is not None
    return found


@contextmanager
def burst(engine: Service) -> Iterator[Burst]:
    """Requests that all wait before the first of them is taken: until then the engine answers another one."""
    body = request_body(engine, prompt_of(40), 1500, cache_salt=fresh_salt())
    with (
        ThreadPoolExecutor(32) as threads,
        closing(engine.client.stream("/v1/completions", body)) as blocker,
    ):
        next(blocker)
        all_of_it = Burst(engine, threads)
        yield all_of_it
        wait_until(
            lambda: engine.metrics().total(WAITING) == len(all_of_it.ended), "all of them wait"
        )


class Burst:
    """Names of requests, and when each ended."""

    def __init__(self, engine: Service, threads: ThreadPoolExecutor) -> None:
        self.ended: dict[str, Future[float]] = {}
        self._engine = engine
        self._threads = threads

    def send(self, name: str, prompt: list[int], **extra: Any) -> None:
        def ask() -> float:
            completion(self._engine, prompt, 8, **extra)
            return time.monotonic()

        self.ended[name] = self._threads.submit(ask)

    def order(self) -> list[str]:
        return sorted(self.ended, key=lambda name: self.ended[name].result())


@pytest.mark.parametrize("tokens", LENGTHS.values(), ids=list(LENGTHS))
def test_the_answer_is_that_of_vllms_own_scheduler(pair: Pair, reference, tokens: int) -> None:
    prompt = prompt_of(tokens, start=5)
    assert_same_logprobs(completion(pair.p, prompt), reference(prompt), TOLERANCE)


def test_answers_under_load_are_the_same(pair: Pair, reference) -> None:
    prompts = [prompt_of(tokens, start=31) for tokens in LENGTHS.values()] * 3
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda prompt: completion(pair.d, prompt), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_same_logprobs(answer, reference(prompt), TOLERANCE)


def test_kv_is_handed_over_with_our_scheduler_on_both_sides(pair: Pair, reference) -> None:
    prompts = [prompt_of(tokens, start=17) for tokens in LENGTHS.values()]
    with (
        delta(pair.d, "pd_connector:received_transfers_total") as received,
        ThreadPoolExecutor(8) as threads,
    ):
        answers = list(threads.map(lambda one: two_step(pair.p, pair.d, one), prompts * 2))
    assert received.amount == 2 * len(prompts)
    for prompt, answer in zip(prompts * 2, answers, strict=True):
        assert_same_logprobs(answer, reference(prompt), TOLERANCE)


def test_a_burst_is_taken_by_what_is_not_cached(pair: Pair) -> None:
    salt = fresh_salt()
    profile = prompt_of(1600, start=300)
    completion(pair.p, profile, 1, cache_salt=salt)
    with burst(pair.p) as requests:
        for name, tokens in (("2000", 2000), ("100", 100), ("900", 900)):
            requests.send(name, prompt_of(tokens, start=tokens))
        requests.send("1600 cached, 300 more", profile + prompt_of(300), cache_salt=salt)
    assert requests.order() == ["100", "1600 cached, 300 more", "900", "2000"]


def test_the_class_in_the_body_reaches_the_scheduler(pair: Pair) -> None:
    with burst(pair.p) as requests:
        requests.send("free", prompt_of(50, start=1), vllm_xargs={"qos": "free"})
        requests.send("none", prompt_of(60, start=2))
        requests.send("premium", prompt_of(2000, start=3), vllm_xargs={"qos": "premium"})
        requests.send("premium too", prompt_of(1000, start=4), vllm_xargs={"qos": "premium"})
        wait_until(lambda: posted(pair.p).report.classes["premium"].waiting == 2, "premium waits")
        waiting = {name: one.waiting for name, one in posted(pair.p).report.classes.items()}
        assert waiting == {"premium": 2, "free": 2}
    assert requests.order()[0] == "premium too"
    record = posted(pair.p).classes["premium"]
    assert sum(record.ttft.counts) == sum(record.predicted_ttft.counts) >= 2


def test_the_cost_model_is_learnt_from_the_engines_own_steps(pair: Pair) -> None:
    for n in range(40):
        completion(pair.d, prompt_of(40 + 50 * n, start=n), 8)
    model = posted(pair.d).report.model
    assert model.a > 0
    assert model.d0 + model.d1 > 0
    report = posted(pair.d).report
    assert report.decode_tokens == pytest.approx(8, abs=8)
