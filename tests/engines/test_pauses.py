# SPDX-License-Identifier: Apache-2.0
"""Engines that an operator pauses (`/pause`) while KV moves: the pause comes at once, and no answer is wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from harness import assert_same_logprobs, completion, fresh_salt, prefill_step, wait_until
from pairs import Pair
from test_faults import in_background, loading, paused
from test_handoff import prompt_of
from told import halves
from tools import TOLERANCE

from pd_connector.tools.launch import VllmEngine

AT_ONCE_S = 5.0
"""Half of the time after which a decode engine gives a silent prefill engine up, and much less than `wait_timeout_s`."""


@contextmanager
def no_generation(engine: VllmEngine, mode: str) -> Iterator[None]:
    """Within the block the engine generates nothing."""
    began = time.monotonic()
    engine.client.post(f"/pause?mode={mode}&clear_cache=false", {})
    took_s = time.monotonic() - began
    try:
        yield
    finally:
        engine.client.post("/resume", {})
    assert took_s < AT_ONCE_S, f"{engine.name}: {took_s:.1f} s until it was paused"


def test_a_pause_that_keeps_requests_does_not_wait_for_kv_that_comes(pair: Pair, reference) -> None:
    prompt, salt = prompt_of(900, start=60), fresh_salt()
    params = prefill_step(pair.p, prompt, cache_salt=salt)
    with paused(pair.p), ThreadPoolExecutor(1) as threads:
        extra = {"cache_salt": salt, "kv_transfer_params": params}
        answer = threads.submit(completion, pair.d, prompt, **extra)
        wait_until(lambda: loading(pair), "the transfer is under way")
        with no_generation(pair.d, "keep"):
            pair.p.resume()
            time.sleep(1.0)  # KV comes meanwhile
            assert not answer.done()
        assert_same_logprobs(answer.result(), reference(prompt), TOLERANCE)


def test_pauses_do_not_wait_for_prompts_that_are_queued_on_both_engines(
    pair: Pair, reference
) -> None:
    prompt = prompt_of(900, start=61)
    prefill, decode = halves(pair.p)
    with (
        no_generation(pair.p, "wait"),
        in_background(completion, pair.p, prompt, 1, **prefill),
        in_background(completion, pair.d, prompt, **decode) as answer,
    ):
        wait_until(lambda: loading(pair), "the decode engine waits for the prefill")
        with no_generation(pair.d, "wait"), no_generation(pair.p, "keep"):
            assert not answer.done()
        assert_same_logprobs(answer.result(), reference(prompt), TOLERANCE)
