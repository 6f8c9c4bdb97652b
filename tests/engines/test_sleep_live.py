# SPDX-License-Identifier: Apache-2.0
"""Engines that sleep and wake up (vLLM 0.33): nothing is lost, and nothing that pages held before is used."""

from __future__ import annotations

import pytest
from harness import (
    assert_same_logprobs,
    completion,
    fresh_salt,
    prefill_step,
    two_step,
    wait_until,
)
from pairs import Pair, Setup
from pauses import LEASED, in_background
from recipes import NEW
from test_handoff import prompt_of
from tools import TOLERANCE, delta, probe

from pd_connector.tools.launch import VllmEngine

SETUP = Setup.of(vllm=NEW, lease_s=600.0)

pytestmark = pytest.mark.skipif(NEW != "0.33", reason="no vLLM 0.33: read .venv/vllm-0.33.log")


@pytest.fixture(autouse=True)
def sleepers(pair: Pair) -> None:
    for engine in pair.engines:
        probe(engine, "sleep_as_on_a_gpu")


def sleep(engine: VllmEngine, mode: str = "wait") -> None:
    engine.client.post(f"/sleep?level=1&mode={mode}", {})


def wake(engine: VllmEngine, *tags: str) -> None:
    engine.client.post(
        "/wake_up" + "".join(f"{'&' if n else '?'}tags={tag}" for n, tag in enumerate(tags)), {}
    )


def assert_hands_over(pair: Pair, reference, start: int) -> None:
    prompt = prompt_of(700, start=start)
    with delta(pair.d, "pd_connector:received_transfers_total") as received:
        answer = two_step(pair.p, pair.d, prompt)
    assert received.amount == 1
    assert_same_logprobs(answer, reference(prompt), TOLERANCE)


def test_it_sleeps_when_its_kv_has_been_fetched(pair: Pair, reference) -> None:
    prompt, salt = prompt_of(700, start=70), fresh_salt()
    params = prefill_step(pair.p, prompt, cache_salt=salt)
    wait_until(lambda: pair.p.metrics().total(LEASED), "the KV is on offer")
    with in_background(sleep, pair.p) as asleep:
        answer = completion(pair.d, prompt, cache_salt=salt, kv_transfer_params=params)
        asleep.result()
    assert_same_logprobs(answer, reference(prompt), TOLERANCE)
    assert pair.d.metrics().total("pd_connector:received_transfers_total")
    wake(pair.p)


def test_afterwards_engines_hand_over_as_before(pair: Pair, reference) -> None:
    assert_hands_over(pair, reference, 71)
    for engine in pair.engines:
        sleep(engine)
    for tag in ("weights", "kv_cache"):
        for engine in pair.engines:
            wake(engine, tag)
    assert_hands_over(pair, reference, 72)


def test_a_prompt_of_before_is_computed_again(pair: Pair, reference) -> None:
    prompt, salt = prompt_of(700, start=73), fresh_salt()
    two_step(pair.p, pair.d, prompt, cache_salt=salt)
    for engine in pair.engines:
        sleep(engine)
        wake(engine)
        answer = completion(engine, prompt, cache_salt=salt)
        assert_same_logprobs(answer, reference(prompt), TOLERANCE)


def test_an_answer_that_is_kept_is_right(pair: Pair, reference) -> None:
    prompt, salt = prompt_of(700, start=74), fresh_salt()
    params = prefill_step(pair.p, prompt, cache_salt=salt)
    extra = {"cache_salt": salt, "kv_transfer_params": params}
    with (
        delta(pair.d, "vllm:generation_tokens_total") as said,
        in_background(completion, pair.d, prompt, 32, **extra) as answer,
    ):
        wait_until(said.so_far, "the answer has begun")
        sleep(pair.d, "keep")
        assert not answer.done()
        wake(pair.d)
        assert_same_logprobs(answer.result(), reference(prompt), TOLERANCE)
