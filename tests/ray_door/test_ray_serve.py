# SPDX-License-Identifier: Apache-2.0
"""Requests through a Serve application whose engines are unlike: pages of 32 and of 64 tokens, and our
scheduler on the decode side."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from harness import assert_same_logprobs, fresh_salt, request_body, wait_until
from ray_rig import DECODE, PREFILL, PROMPT, REQUESTS, TOLERANCE, ask, grown, hand_over
from ray_watched import RAYS_SERVER, TWO_STEPS

pytestmark = pytest.mark.ray


def test_with_rays_default_backend_nothing_comes_early(rig):
    """The control: the same engines, one step after the other. It comes first, so that no early chunk of
    another test is exported late."""
    hand_over(rig, user=TWO_STEPS)
    before = rig.metrics()
    for n in range(4):
        ask(rig, PROMPT + str(n), user=TWO_STEPS)
    for name in ("received_transfers", "sent_chunks"):
        wait_until(lambda name=name: grown(rig.metrics(), before, name) >= 4, f"four {name}")
    assert rig.metrics().total("ray_pd_connector_early_chunks_total") == 0
    rig.idle()


def test_answers_are_those_of_one_engine_and_kv_comes_while_the_prompt_is_computed(rig):
    hand_over(rig)
    with (
        rig.counts("early_chunks", 1),
        rig.counts("received_transfers", 4),
        rig.counts(REQUESTS, 4, outcome="handed_over"),
    ):
        for n in range(4):
            prompt, salt = PROMPT + str(n), fresh_salt()
            wanted = rig.alone(prompt, 16, salt)
            found = ask(rig, prompt, cache_salt=salt + "'")
            assert_same_logprobs(found, wanted, TOLERANCE)
    rig.idle()


def test_rays_own_server_hands_over_with_our_backend(rig):
    """What an application of Ray's own builder does with a request after `register()`."""
    hand_over(rig)
    with rig.counts("early_chunks", 1), rig.counts("received_transfers", 4):
        for n in range(4):
            prompt, salt = PROMPT + str(n), fresh_salt()
            wanted = rig.alone(prompt, 16, salt)
            found = ask(rig, prompt, cache_salt=salt + "'", user=RAYS_SERVER)
            assert_same_logprobs(found, wanted, TOLERANCE)
    for fields in (
        {"n": 2, "temperature": 1.0},
        {"prompt": ["one", "two"]},
    ):  # no transfer carries these
        body = request_body(rig.url, "one", 4) | fields | {"user": RAYS_SERVER}
        assert len(rig.client.post("/v1/completions", body)["choices"]) == 2
    rig.idle()


def test_a_chat_is_streamed(rig):
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
    }
    whole = rig.client.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    with rig.counts(REQUESTS, 1, outcome="handed_over"):
        events = list(rig.client.stream("/v1/chat/completions", body))
    parts = [e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"]]
    assert "".join(parts) == whole
    assert len([part for part in parts if part]) > 1


def test_sixteen_at_once(rig):
    prompts = [f"{n}: " + PROMPT[: 300 + 40 * n] for n in range(16)]
    alone = [ask(rig, prompt, 8) for prompt in prompts]
    with rig.counts(REQUESTS, 16, outcome="handed_over"), ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda prompt: ask(rig, prompt, 8), prompts))
    assert [a.tokens for a in together] == [a.tokens for a in alone]
    rig.idle()


def test_the_id_of_a_request_is_in_the_logs_of_both_replicas(rig):
    name = ask(rig).raw["id"].removeprefix("cmpl-")
    for deployment in (PREFILL, DECODE):
        wait_until(
            lambda deployment=deployment: rig.logged(deployment, name),
            f"{deployment} logs {name}",
        )


def test_what_one_transfer_cannot_carry_is_answered_by_the_decode_replica(rig):
    with rig.counts(REQUESTS, 1, outcome="batch"):
        body = request_body(rig.url, "", 4) | {"prompt": ["one", "two"]}
        answer = rig.client.post("/v1/completions", body)
    assert len(answer["choices"]) == 2
