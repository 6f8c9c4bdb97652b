# SPDX-License-Identifier: Apache-2.0
"""The same handoff under other settings: other transports, a cache too small, failures that are to
be shown."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest
from caches import both_sides, unlike
from harness import (
    assert_same_logprobs,
    completion,
    prefill_step,
    two_step,
)
from pairs import (
    Pair,
    Setup,
)
from test_handoff import LENGTHS, prompt_of
from tools import TOLERANCE, delta

from pd_connector.tools.launch import HttpError

pytest.importorskip("nixl", reason="the extra `nixl` is not installed")

# The prefill engine's settings count in each pair, so turning the pair round tries the other's.
NIXL = Setup.of(transports=["nixl"], prefill_extra={"direction": "read"}, both=True)
UCX_AND_SHM = Setup.of(
    direction="write",
    prefill_extra={"transports": ["ucx", "shm"]},
    decode_extra={"transports": ["shm", "ucx"]},
    both=True,
)
SMALL = Setup.of(
    on_failure="fail",
    prefill_extra={"codec": "int8"},  # on one side only: it must not be used
    slot_mib=1,
    slots=2,
    args=["--num-gpu-blocks-override", "130", "--max-num-batched-tokens", "256"],
)


def with_ucx(test: Callable[..., None]) -> Callable[..., None]:
    missing = find_spec("ucxx") is None
    skip = pytest.mark.skipif(missing, reason="the extra `ucx` is not installed")
    setups = [pytest.param(UCX_AND_SHM, marks=skip)]
    return pytest.mark.parametrize("setup", setups, indirect=True, ids=["ucx and shm"])(test)


def assert_hands_over(pair: Pair, reference) -> None:
    """Prompts of all lengths, one by one and all at once."""
    prompts = [prompt_of(tokens, start=11) for tokens in LENGTHS.values()]
    with delta(pair.d, "pd_connector:received_transfers_total") as received:
        answers = [two_step(pair.p, pair.d, prompt) for prompt in prompts]
        with ThreadPoolExecutor(16) as threads:
            answers += threads.map(lambda prompt: two_step(pair.p, pair.d, prompt), prompts * 3)
    assert received.amount == 4 * len(prompts)
    for prompt, answer in zip(prompts * 4, answers, strict=True):
        assert_same_logprobs(answer, reference(prompt), TOLERANCE)


@pytest.mark.parametrize("setup", [NIXL], indirect=True, ids=["nixl"])
def test_nixl_reads_the_same_pages(pair: Pair, reference) -> None:
    assert_hands_over(pair, reference)


@pytest.mark.parametrize("setup", [NIXL], indirect=True, ids=["nixl"])
def test_nixl_writes_the_same_pages(pair: Pair, reference) -> None:
    assert_hands_over(pair.turned(), reference)


@with_ucx
def test_ucx_moves_the_same_pages(pair: Pair, reference) -> None:
    assert_hands_over(pair, reference)


@with_ucx
def test_shared_memory_is_written_where_that_is_configured(pair: Pair, reference) -> None:
    assert_hands_over(pair.turned(), reference)


@pytest.mark.parametrize("setup", [SMALL], indirect=True, ids=["small"])
def test_preemption_chunked_prefill_and_few_slots(pair: Pair, reference) -> None:
    """130 pages for sixteen requests that grow to 16 pages each; two slots of 1 MiB."""
    prompts = [prompt_of(260, start=170 * i) for i in range(16)]
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda p: two_step(pair.p, pair.d, p, 250), prompts))
        wanted = list(threads.map(lambda p: reference(p, 250), prompts))
    assert pair.d.metrics().total("vllm:num_preemptions_total") > 0
    for answer, one in zip(answers, wanted, strict=True):
        assert_same_logprobs(answer, one, TOLERANCE)


@pytest.mark.parametrize("setup", [SMALL], indirect=True, ids=["small"])
def test_a_long_prompt_through_two_small_slots(pair: Pair, reference) -> None:
    prompt = prompt_of(3500, start=11)
    with delta(pair.d, "pd_connector:received_chunks_total") as chunks:
        assert_same_logprobs(two_step(pair.p, pair.d, prompt), reference(prompt), TOLERANCE)
    assert chunks.amount > 2


@pytest.mark.parametrize("setup", [SMALL], indirect=True, ids=["small"])
def test_a_codec_that_one_side_permits_alone_is_not_used(pair: Pair) -> None:
    there, here = both_sides(pair, prompt_of(700, start=90))
    assert unlike(here, there) == []


@pytest.mark.parametrize("setup", [SMALL], indirect=True, ids=["small"])
def test_failures_are_shown_where_that_is_configured(pair: Pair) -> None:
    params = prefill_step(pair.p, prompt_of(100))
    with pytest.raises(HttpError) as failure:
        completion(pair.d, prompt_of(100, start=1), kv_transfer_params=params)
    assert failure.value.status == 500
