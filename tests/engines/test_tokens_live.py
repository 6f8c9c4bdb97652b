# SPDX-License-Identifier: Apache-2.0
"""Token ids in and out (vLLM's `--enable-scale-out`): a pair answers as one engine does, and pools serve it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import Answer, assert_same_logprobs, fresh_salt, wait_until
from pairs import Pair, Setup
from pools import CHUNKS, PROMPT, counted, sharing_a_pool
from recipes import NEW
from test_handoff import prompt_of
from tools import TOLERANCE, delta

from pd_connector.tools.launch import Client, VllmEngine
from scheduler_plugins.admission.endpoints import GENERATE

SCALE_OUT = "--enable-scale-out"
SETUP = Setup.of(vllm=NEW, args=(SCALE_OUT, "--max-num-batched-tokens", "256"), lease_s=6)
LONG = 700
TRANSFERS = "pd_connector:received_transfers_total"


def body_of(prompt: list[int], tokens: int = 32, **sampling: Any) -> dict[str, Any]:
    asked = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "logprobs": 5, **sampling}
    return {"token_ids": prompt, "sampling_params": asked, "cache_salt": fresh_salt()}


def as_answer(raw: dict[str, Any]) -> Answer:
    """An answer of token ids, in the form of the completions that it is compared with."""
    (choice,) = raw["choices"]
    rows = choice["logprobs"]["content"]
    assert [row["token_id"] for row in rows] == choice["token_ids"]
    return Answer(
        tuple(f"token_id:{row['token_id']}" for row in rows),
        tuple(row["logprob"] for row in rows),
        tuple(
            {f"token_id:{one['token_id']}": one["logprob"] for one in row["top_logprobs"]}
            for row in rows
        ),
        "",
        raw,
    )


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """A stream's events as one answer."""
    choices = [choice for event in events for choice in event["choices"]]
    rows = [row for choice in choices for row in choice["logprobs"]["content"]]
    ids = [token for choice in choices for token in choice["token_ids"]]
    return {"choices": [{"token_ids": ids, "logprobs": {"content": rows}}]}


@pytest.mark.parametrize("stream", [False, True])
def test_a_pair_answers_token_ids_as_one_engine_does(pair: Pair, reference, stream: bool) -> None:
    router, prompt = Client(pair.router.base_url), prompt_of(LONG, start=10 + stream)
    with delta(pair.d, TRANSFERS) as moved:
        if stream:
            found = joined(list(router.stream(GENERATE, body_of(prompt))))
        else:
            found = router.post(GENERATE, body_of(prompt))
            assert found["usage"]["prompt_tokens"] == LONG
            assert found["kv_transfer_params"] is None, "no address reaches a client"
        wait_until(lambda: moved.so_far() == 1, "the KV moved")
    assert_same_logprobs(as_answer(found), reference(prompt), TOLERANCE)


def test_several_answers_and_stops_are_the_engines_own(pair: Pair) -> None:
    router, prompt = Client(pair.router.base_url), prompt_of(LONG, start=30)
    whole = router.post(GENERATE, body_of(prompt))["choices"][0]["token_ids"]
    # vLLM wants one answer where it is greedy.
    several = router.post(GENERATE, body_of(prompt, n=2, temperature=0.01))["choices"]
    assert [len(one["token_ids"]) for one in several] == [32, 32]
    end = whole[9]
    (stopped,) = router.post(GENERATE, body_of(prompt, stop_token_ids=[end]))["choices"]
    assert stopped["token_ids"] == whole[: whole.index(end) + 1]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", end)


def test_a_client_that_leaves_ends_both_halves(pair: Pair) -> None:
    events = Client(pair.router.base_url).stream(GENERATE, body_of(prompt_of(LONG, start=50), 2000))
    next(events)
    events.close()
    # The fixture waits until both engines are idle.


def test_a_text_becomes_tokens_and_its_answer_text_again(pair: Pair) -> None:
    router = Client(pair.router.base_url)
    sent = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    (rendered,) = router.post("/v1/completions/render", sent)
    generated = router.post(GENERATE, rendered)
    back = {"generate_responses": [generated], "generate_response": generated, "model": "tiny"}
    text = router.post("/v1/completions/derender", {**back, "stream": False})
    wanted = router.post("/v1/completions", sent)
    assert text["choices"][0]["text"] == wanted["choices"][0]["text"]
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    assert router.post("/v1/chat/completions/render", chat)["token_ids"]


def test_a_pool_serves_token_ids(tmp_path: Path) -> None:
    with sharing_a_pool(tmp_path) as engines:
        writer = engines.start(32, SCALE_OUT)
        asked = body_of(list(PROMPT))
        wanted = as_answer(generated(writer, asked))
        wait_until(lambda: len(engines.files()) >= CHUNKS, "the chunks in the pool")
        reader = engines.start(64, SCALE_OUT)
        assert_same_logprobs(as_answer(generated(reader, asked)), wanted, TOLERANCE)
        wait_until(lambda: counted(reader, "pool_hits") == CHUNKS, "the chunks are counted")


def generated(engine: VllmEngine, body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = Client(engine.base_url).post(GENERATE, body)
    return found
