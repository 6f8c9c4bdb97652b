# SPDX-License-Identifier: Apache-2.0
"""Real engines of which the prefill engine has the shorter context, and requests that are retracted while they run."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from sglang_engines.sglang_harness import Answer, EnginePool, SglangEngine, assert_idle, send, text
from sglang_engines.sglang_recipes import CHUNKED, SHORT_LEASE, Recipe

from pd_connector.tools.launch import RouterProcess, stop_services
from pd_connector.tools.launch.client import HttpError

CONTEXT = 1024
LONGEST = CONTEXT - 7
"""SGLang keeps a few tokens of its context for itself."""
SHORT = Recipe(
    "prefill",
    args=(*CHUNKED, "--context-length", str(CONTEXT)),
    config=SHORT_LEASE,
    sleeps=False,
)
LONG = Recipe("decode", config=SHORT_LEASE, sleeps=False)
"""The one pair whose idle loops have no pause, as by default."""


@pytest.fixture
def pair(engines: EnginePool) -> tuple[SglangEngine, SglangEngine]:
    return engines.pair(SHORT, LONG)


@pytest.fixture
def router(pair: tuple[SglangEngine, SglangEngine]) -> Iterator[RouterProcess]:
    p, d = pair
    router = RouterProcess([p.base_url], [d.base_url]).start()
    router.wait_ready()
    yield router
    stop_services([router])


def status(router: RouterProcess, tokens: int, max_tokens: int) -> int:
    prompt = {"model": "m", "prompt": text(tokens, seed=tokens), "max_tokens": max_tokens}
    try:
        router.client.post("/v1/completions", prompt)
    except HttpError as error:
        return error.status
    return 200


def generated(engine: SglangEngine) -> int:
    """How many requests to `/generate` its log tells of."""
    return engine.log_path.read_text().count("POST /generate")


def test_a_prompt_beyond_the_prefill_engines_context_is_a_400(
    pair: tuple[SglangEngine, SglangEngine], router: RouterProcess
) -> None:
    """As of one engine alone, and not 503; an answer that goes beyond it is not limited by the prefill engine."""
    found = [status(router, tokens, 1) for tokens in (LONGEST, LONGEST + 1, CONTEXT, CONTEXT + 100)]
    assert found == [200, 400, 400, 400]
    assert status(router, LONGEST, 2 * CONTEXT - LONGEST) == 200
    assert_idle(*pair)


def test_a_running_request_goes_on_after_a_pause_that_retracts_it(
    engines: EnginePool, pair: tuple[SglangEngine, SglangEngine]
) -> None:
    p, d = pair
    prompts = [text(200, seed=70 + number) for number in range(3)]
    wanted = engines.reference(prompts, 200)
    before = generated(p)
    asked = [send(p, d, prompt, 200) for prompt in prompts]
    for _ in range(2):
        time.sleep(0.7)
        d.client.post("/pause_generation", {"mode": "retract"})
        d.client.post("/continue_generation", {})
    for (_, decode), answer in zip(asked, wanted, strict=True):
        assert Answer.of(decode.result()).tokens == answer.tokens
    assert generated(p) >= before + 4, "one was asked for again at least"
    assert_idle(p, d)
