# SPDX-License-Identifier: Apache-2.0
"""Engines that split the model and its cache in unlike ways hand over to each other, bit for bit.

Every pair runs in both roles, so that each is tried both ways.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from caches import both_sides, cached, unlike, while_decoding
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
from test_handoff import PAGE, prompt_of, token_bytes
from told import told_at_once
from tools import TOLERANCE, delta, probe_all

from pd_connector.tools.launch import VllmEngine

TENSOR_PARALLEL = Setup.of(prefill_args=["--tensor-parallel-size", "2"], both=True)
# vLLM's CPU pipeline parallelism fails with --enforce-eager.
PIPELINE_PARALLEL = Setup.of(
    prefill_args=[
        "--pipeline-parallel-size",
        "2",
        "--no-enforce-eager",
        "--compilation-config",
        '{"backend": "eager"}',
    ],
    both=True,
)
PAGE_SIZES = Setup.of(decode_args=["--block-size", str(2 * PAGE)], both=True)

SETUPS = {
    "tp 2 and 1": TENSOR_PARALLEL,
    "pp 2 and 1": PIPELINE_PARALLEL,
    "pages of 32 and 64": PAGE_SIZES,
}

pytestmark = pytest.mark.parametrize("setup", SETUPS.values(), indirect=True, ids=list(SETUPS))


@pytest.fixture(params=["there", "back"])
def ways(pair: Pair, request: pytest.FixtureRequest) -> Pair:
    """The pair, one way round and the other."""
    return pair if request.param == "there" else pair.turned()


def ranks(engine: VllmEngine) -> int:
    return len(probe_all(engine, "running_tables"))


def test_the_answer_is_that_of_one_engine(ways: Pair, reference) -> None:
    prompt = prompt_of(22 * PAGE + 7, start=11)
    with delta(ways.d, "pd_connector:received_transfers_total") as received:
        answer = two_step(ways.p, ways.d, prompt)
    assert received.amount == ranks(ways.d)  # each receives its part
    assert_same_logprobs(answer, reference(prompt), TOLERANCE)


@pytest.mark.parametrize("tokens", [5, 4 * PAGE, 22 * PAGE + 7])
def test_both_caches_hold_the_same_bits(ways: Pair, tokens: int) -> None:
    there, here = both_sides(ways, prompt_of(tokens, start=500))
    assert len(here) == 4
    assert here[0].key.shape == (tokens - 1, 4, 64)
    assert here[3].key.any()
    assert unlike(here, there) == []


def test_one_flipped_byte_is_noticed_in_caches_and_logprobs(ways: Pair, reference) -> None:
    """The negative control of the comparisons in this file. The byte is one of the token before the
    last, to which attention is large."""
    prompt, salt = prompt_of(4 * PAGE + 1, start=11), fresh_salt()
    params = prefill_step(ways.p, prompt, cache_salt=salt)
    tables = params["remote_block_ids"]
    there = cached(ways.p, tables, len(prompt) - 1)
    probe_all(ways.p, "flip_byte", tables[0][-2])
    answer = completion(ways.d, prompt, cache_salt=salt, kv_transfer_params=params)
    assert largest_difference(answer, reference(prompt)) > 2 * TOLERANCE
    # The pages are in the decode engine's prefix cache by now.
    assert unlike(while_decoding(ways.d, prompt, cache_salt=salt), there)


def test_only_what_the_prefix_cache_lacks_is_moved(ways: Pair, reference) -> None:
    known, whole = 4 * PAGE, 9 * PAGE + 7
    prompt, salt = prompt_of(whole, start=900), fresh_salt()
    completion(ways.d, [*prompt[:known], 0], 1, cache_salt=salt)
    with delta(ways.d, "pd_connector:received_bytes_total") as received:
        answer = two_step(ways.p, ways.d, prompt, cache_salt=salt)
    assert_same_logprobs(answer, reference(prompt), TOLERANCE)
    assert 0 < received.amount <= (10 * PAGE - known) * token_bytes()


def test_a_long_prompt_of_which_both_are_told_at_once(ways: Pair, reference) -> None:
    prompt = prompt_of(3000, start=70)
    with delta(ways.d, "pd_connector:received_transfers_total") as received:
        answer = told_at_once(ways, prompt)
    assert received.amount == ranks(ways.d)  # each receives its part
    assert_same_logprobs(answer, reference(prompt), TOLERANCE)


def test_through_the_router(pair: Pair, reference) -> None:
    prompt = prompt_of(3000, start=300)
    with delta(pair.d, "pd_connector:received_transfers_total") as received:
        answer = completion(pair.router, prompt)
    assert received.amount == ranks(pair.d)
    assert_same_logprobs(answer, reference(prompt), TOLERANCE)


def test_eight_requests_at_once_do_not_mix(ways: Pair, reference) -> None:
    prompts = [prompt_of(40 + 91 * i, start=300 * i) for i in range(8)]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda prompt: told_at_once(ways, prompt), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_same_logprobs(answer, reference(prompt), TOLERANCE)
