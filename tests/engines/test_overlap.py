# SPDX-License-Identifier: Apache-2.0
"""KV moves while the prompt is still computed; what is interrupted halfway is answered right."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.request import ProxyHandler, build_opener

import pytest
from harness import (
    Answer,
    Prompt,
    assert_same_logprobs,
    completion,
    fresh_salt,
    prefill_step,
    wait_until,
)
from pairs import (
    Pair,
    Setup,
)
from recipes import NEW
from test_handoff import prompt_of
from told import halves, told_at_once
from tools import TOLERANCE, delta, leaving_client

from pd_connector.tools.launch import VllmEngine

LONG = 3000

PORTIONS = ("--max-num-batched-tokens", "256")
# One long prompt and a part of a second one, which begins although there is no room for it all.
FEW_PAGES = ("--num-gpu-blocks-override", "131", "--no-scheduler-reserve-full-isl")

# The one that prefills sends step by step, the one that decodes defers; turned round, nothing is
# sent early, and pages are allocated at once.
STEP = Setup.of(
    vllm=NEW,
    prefill_extra={"overlap": "step", "defer_pages": False},
    decode_extra={"overlap": "off", "defer_pages": True},
    args=PORTIONS,
    prefill_args=FEW_PAGES,
    both=True,
    worker_apart=True,
)
# A whole prompt in one step: only layer by layer can anything be sent early.
LAYER = Setup.of(
    prefill_extra={"overlap": "layer"},
    decode_extra={"overlap": "step"},
    args=("--max-num-batched-tokens", "4096"),
    both=True,
    worker_apart=True,
)
in_steps = pytest.mark.parametrize("setup", [STEP], indirect=True, ids=["step"])
in_one_step = pytest.mark.parametrize("setup", [LAYER], indirect=True, ids=["layer"])


def assert_right_side_by_side(pair: Pair, reference, prompts: Sequence[Prompt]) -> None:
    """All at once, the prompts are answered as one engine answers each."""
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda prompt: told_at_once(pair, prompt), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_same_logprobs(answer, reference(prompt), TOLERANCE)


def number_of(engine: VllmEngine, state: str) -> float:
    """Requests that are running or waiting in the engine."""
    return engine.metrics().total(f"vllm:num_requests_{state}")


def early_chunks(pair: Pair, prompt: Prompt) -> tuple[float, Answer]:
    """Chunks that the prefill engine has sent while it computed the prompt; and the answer."""
    with (
        delta(pair.p, "pd_connector:early_chunks_total") as early,
        delta(pair.p, "pd_connector:sent_chunks_total") as sent,
        delta(pair.d, "pd_connector:received_chunks_total") as received,
        delta(pair.d, "pd_connector:received_transfers_total") as transfers,
    ):
        answer = told_at_once(pair, prompt)
        wait_until(lambda: transfers.so_far() == 1, "the decode engine has counted its chunks")
        wait_until(lambda: sent.so_far() == received.so_far(), "and the prefill engine, too")
        assert sent.amount > 1
    return early.amount, answer


@in_steps
def test_chunks_are_sent_before_the_prefill_has_ended(pair: Pair, reference) -> None:
    prompt = prompt_of(LONG, start=20)
    early, answer = early_chunks(pair, prompt)
    assert early > 1
    assert_same_logprobs(answer, reference(prompt), TOLERANCE)


def pairs_shown(pair: Pair) -> list[dict[str, Any]]:
    """The rows of pairs on the router's live page."""
    with build_opener(ProxyHandler({})).open(f"{pair.router.base_url}/live", timeout=60) as events:
        told = json.loads(events.readline().removeprefix(b"data: "))
    return list(told["pairs"])


@in_steps
def test_the_routers_page_shows_what_has_moved_between_two_engines(pair: Pair) -> None:
    with delta(pair.d, "pd_connector:received_bytes_total") as moved:
        completion(pair.router, prompt_of(LONG, start=60))
        wait_until(lambda: moved.so_far() > 0, "KV has come")
    wait_until(lambda: pairs_shown(pair), "the router has read the engine's metrics")
    (row,) = [one for one in pairs_shown(pair) if one["decode"] == pair.d.base_url]
    assert row["prefill"] == pair.p.base_url
    assert set(row["codecs"]) == {"raw"}
    assert row["early_chunks"] > 0
    assert row["transfers"] > 0


@in_steps
def test_a_prefill_that_is_preempted_while_it_streams(pair: Pair, reference) -> None:
    """A first prompt's pages stay leased until it is fetched: the second finds no room to end in,
    loses what it has computed, and begins again."""
    first, second, salt = prompt_of(LONG, start=40), prompt_of(LONG, start=900), fresh_salt()
    params = prefill_step(pair.p, first, cache_salt=salt)
    with (
        delta(pair.p, "vllm:num_preemptions_total") as preempted,
        delta(pair.d, "pd_connector:received_transfers_total") as received,
        delta(pair.d, "pd_connector:received_chunks_total") as chunks,
        ThreadPoolExecutor(1) as threads,
    ):
        waiting = threads.submit(told_at_once, pair, second)
        wait_until(lambda: chunks.so_far() > 0, "KV of the second prompt has come")
        # vLLM counts a preemption when the request goes on; until then it only waits again.
        wait_until(lambda: number_of(pair.p, "running") == 0, "the second prompt is preempted")
        assert number_of(pair.p, "waiting") == 1
        answer = completion(pair.d, first, cache_salt=salt, kv_transfer_params=params)
        assert_same_logprobs(answer, reference(first), TOLERANCE)
        assert_same_logprobs(waiting.result(), reference(second), TOLERANCE)
    assert received.amount == 2
    assert preempted.amount > 0


@in_steps
def test_several_long_prompts_in_too_small_a_cache(pair: Pair, reference) -> None:
    prompts = [prompt_of(1500 + 300 * i, start=200 * i) for i in range(6)]
    assert_right_side_by_side(pair, reference, prompts)


@in_steps
def test_a_prefill_that_is_aborted_while_it_streams_is_recomputed(pair: Pair, reference) -> None:
    prompt = prompt_of(3500, start=5)
    prefill, decode = halves(pair.p)
    with (
        delta(pair.d, "pd_connector:failed_transfers_total", cause="prefill_ended") as failed,
        delta(pair.d, "pd_connector:received_chunks_total") as chunks,
        ThreadPoolExecutor(1) as threads,
    ):
        answer = threads.submit(completion, pair.d, prompt, 32, **decode)
        with leaving_client(pair.p, prompt, 1, **prefill):
            wait_until(lambda: chunks.so_far() > 0, "the first chunk has come")
        assert_same_logprobs(answer.result(), reference(prompt), TOLERANCE)
    assert failed.amount == 1


@in_steps
def test_a_request_holds_no_pages_before_its_prefill_has_begun(pair: Pair, reference) -> None:
    assert_pages_while_waiting(pair, reference, held=False)


@in_steps
def test_with_defer_pages_off_it_holds_them_all_along(pair: Pair, reference) -> None:
    """The negative control of the one above."""
    assert_pages_while_waiting(pair.turned(), reference, held=True)


def assert_pages_while_waiting(pair: Pair, reference, *, held: bool) -> None:
    """The decode engine is told of a request long before the prefill engine."""
    prompt = prompt_of(LONG, start=60)
    prefill, decode = halves(pair.p)

    def usage() -> float:
        return pair.d.metrics().total("vllm:kv_cache_usage_perc")

    def waits() -> bool:
        return pair.d.metrics().total("pd_connector:incoming_transfers") > 0

    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(completion, pair.d, prompt, 32, **decode)
        wait_until(waits, "the decode engine waits")
        if held:
            wait_until(usage, "it holds pages")
        else:
            assert [usage() for _ in range(20)] == [0] * 20
            assert waits()
        completion(pair.p, prompt, 1, **prefill)
        assert_same_logprobs(answer.result(), reference(prompt), TOLERANCE)


@in_steps
def test_without_overlap_nothing_is_sent_before_the_prefill_has_ended(
    pair: Pair, reference
) -> None:
    prompt = prompt_of(LONG, start=20)
    early, answer = early_chunks(pair.turned(), prompt)
    assert early == 0
    assert_same_logprobs(answer, reference(prompt), TOLERANCE)


@in_one_step
def test_layers_are_sent_before_the_step_that_computes_them_has_ended(
    pair: Pair, reference
) -> None:
    prompts = [prompt_of(3500, start=start) for start in (20, 700)]
    found = [early_chunks(pair, prompt) for prompt in prompts]
    assert max(early for early, _ in found) > 0
    for prompt, (_, answer) in zip(prompts, found, strict=True):
        assert_same_logprobs(answer, reference(prompt), TOLERANCE)


@in_one_step
def test_layers_of_several_prompts_at_once(pair: Pair, reference) -> None:
    prompts = [prompt_of(100 + 333 * i, start=100 * i) for i in range(8)]
    assert_right_side_by_side(pair, reference, prompts)


@in_one_step
def test_step_by_step_a_prompt_of_one_step_is_not_sent_early(pair: Pair, reference) -> None:
    """The negative control of the one with layers."""
    prompt = prompt_of(3500, start=20)
    early, answer = early_chunks(pair.turned(), prompt)
    assert early == 0
    assert_same_logprobs(answer, reference(prompt), TOLERANCE)
