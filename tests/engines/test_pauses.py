# SPDX-License-Identifier: Apache-2.0
"""Engines that an operator pauses (`/pause`) while KV moves: the pause comes at once, and no answer is wrong."""

from __future__ import annotations

import time

from harness import assert_same_logprobs, completion, fresh_salt, wait_until
from pairs import Pair, Setup
from pauses import fetching_while_paused, in_background, loading, no_generation
from recipes import NEW
from test_handoff import prompt_of
from told import halves
from tools import TOLERANCE

SETUP = Setup(vllm=NEW)


def test_a_pause_that_keeps_requests_does_not_wait_for_kv_that_comes(pair: Pair, reference) -> None:
    prompt, salt = prompt_of(900, start=60), fresh_salt()
    with fetching_while_paused(pair, prompt, salt) as answer:
        time.sleep(1.0)  # KV comes meanwhile
        assert not answer.done()
    assert_same_logprobs(answer.result(), reference(prompt), TOLERANCE)


def test_pauses_do_not_wait_for_prompts_that_are_queued_on_both_engines(
    pair: Pair, reference
) -> None:
    prompt = prompt_of(900, start=61)
    prefill, decode = halves(pair.p)
    with (
        no_generation(pair.p, "keep"),  # vLLM 0.33 refuses new requests in the other modes
        in_background(completion, pair.p, prompt, 1, **prefill),
        in_background(completion, pair.d, prompt, **decode) as answer,
    ):
        wait_until(lambda: loading(pair), "the decode engine waits for the prefill")
        with no_generation(pair.d, "wait"), no_generation(pair.p, "wait"):
            assert not answer.done()
        assert_same_logprobs(answer.result(), reference(prompt), TOLERANCE)
