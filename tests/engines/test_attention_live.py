# SPDX-License-Identifier: Apache-2.0
"""An engine that decodes with pd_kernels answers as one with vLLM's own attention: alone, with KV that
another engine has prefilled, with prompts in portions beside decodes, and when it runs out of pages."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from harness import (
    assert_same_logprobs,
    completion,
    fresh_salt,
    largest_difference,
    prefill_step,
    two_step,
)
from pairs import (
    Pair,
    Setup,
)
from test_handoff import LENGTHS, PAGE, prompt_of
from tools import TOLERANCE, delta, probe

OURS = "Decoding with pd_kernels.paged_decode"

# The decode engine takes long prompts in portions, and has pages for one of 4096 tokens, and few more.
SETUP = Setup.of(
    decode_args=[
        *("--attention-backend", "CUSTOM"),
        *("--max-num-batched-tokens", "256"),
        *("--num-gpu-blocks-override", "130"),
    ]
)


@pytest.mark.parametrize("length", ["shorter than a page", "a partial last page", "many chunks"])
def test_kv_of_another_engine_is_decoded_as_one_engine_decodes(
    pair: Pair, reference, length: str
) -> None:
    prompt = prompt_of(LENGTHS[length], start=11)
    with delta(pair.d, "pd_connector:received_transfers_total") as received:
        answer = two_step(pair.p, pair.d, prompt)
    assert received.amount == 1
    assert_same_logprobs(answer, reference(prompt), TOLERANCE)


def test_the_flag_selects_our_backend(pair: Pair) -> None:
    assert OURS in pair.d.log_path.read_text(), (
        f"no line {OURS!r} in {pair.d.log_path}: is the package reinstalled, with its entry point?"
    )
    assert OURS not in pair.p.log_path.read_text()


def test_prompts_in_portions_beside_decodes(pair: Pair, reference) -> None:
    prompts = [prompt_of(40 + 90 * i, start=300 * i) for i in range(10)]
    with ThreadPoolExecutor(10) as threads:
        answers = list(threads.map(lambda prompt: completion(pair.d, prompt), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_same_logprobs(answer, reference(prompt), TOLERANCE)


def test_a_prompt_that_is_cached_in_part(pair: Pair, reference) -> None:
    prompt, salt = prompt_of(20 * PAGE + 1, start=900), fresh_salt()
    completion(pair.d, prompt[: 8 * PAGE + 3], 1, cache_salt=salt)
    with delta(pair.d, "vllm:prefix_cache_hits_total") as hits:
        # The second time, one token is left of the prompt: it looks like a decode.
        answers = [completion(pair.d, prompt, cache_salt=salt) for _ in range(2)]
    assert hits.amount == 28 * PAGE
    for answer in answers:
        assert_same_logprobs(answer, reference(prompt), TOLERANCE)


def test_requests_that_are_preempted(pair: Pair, reference) -> None:
    """130 pages for ten requests that grow to 15 pages each."""
    prompts = [prompt_of(300, start=170 * i) for i in range(10)]
    with (
        delta(pair.d, "vllm:num_preemptions_total") as preempted,
        ThreadPoolExecutor(10) as threads,
    ):
        answers = list(threads.map(lambda p: two_step(pair.p, pair.d, p, 150), prompts))
        wanted = list(threads.map(lambda p: reference(p, 150), prompts))
    assert preempted.amount > 0
    for answer, one in zip(answers, wanted, strict=True):
        assert_same_logprobs(answer, one, TOLERANCE)


def test_one_damaged_page_moves_the_logprobs(pair: Pair, reference) -> None:
    """The negative control: it is these pages that are decoded."""
    prompt, salt = prompt_of(3500, start=11), fresh_salt()
    params = prefill_step(pair.p, prompt, cache_salt=salt)
    probe(pair.p, "damage_page", params["remote_block_ids"][0][54])
    answer = completion(pair.d, prompt, cache_salt=salt, kv_transfer_params=params)
    assert largest_difference(answer, reference(prompt)) > 2 * TOLERANCE
