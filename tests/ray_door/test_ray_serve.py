# SPDX-License-Identifier: Apache-2.0
"""Requests through a Serve application whose engines are unlike: pages of 32 and of 64 tokens, and our
scheduler on the decode side."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from harness import assert_same_logprobs, completion, fresh_salt, request_body, wait_until
from ray_rig import DECODE, PREFILL, TWO_STEPS, grown

pytestmark = pytest.mark.ray

REQUESTS = "serve_requests"
PROMPT = "def quicksort(items):\n    " * 45  # about 1,200 tokens: five steps of a prefill
TOLERANCE = 2e-4
"""Pages of another size are added up in another order."""


def ask(rig, prompt=PROMPT, max_tokens=16, **extra):
    return completion(rig.url, prompt, max_tokens, **extra)


def hand_over(rig):
    """Ask until KV is received: the first prompt of a producer is computed on both sides (audit)."""
    before = rig.metrics()

    def received():
        ask(rig, max_tokens=2)
        return grown(rig.metrics(), before, "received_transfers")

    wait_until(received, "a prefill replica hands KV over")


@contextmanager
def stopped(pids):
    """Processes that stand still within."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            if os.path.exists(f"/proc/{pid}"):
                os.kill(pid, signal.SIGCONT)


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


def test_with_rays_default_backend_nothing_comes_early(rig):
    """The control: the same engines, one step after the other."""
    before = rig.metrics()
    for n in range(4):
        ask(rig, PROMPT + str(n), user=TWO_STEPS)
    ask(rig, "x")  # its count is exported after those before it

    def found(name):
        return grown(rig.metrics(), before, name)

    wait_until(lambda: found("received_transfers") >= 4, "four transfers received")
    wait_until(lambda: found("sent_chunks") >= 4, "chunks sent")
    assert found("early_chunks") == 0
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


def test_what_one_transfer_cannot_carry_is_answered_by_the_decode_replica(rig):
    with rig.counts(REQUESTS, 1, outcome="batch"):
        body = request_body(rig.url, "", 4) | {"prompt": ["one", "two"]}
        answer = rig.client.post("/v1/completions", body)
    assert len(answer["choices"]) == 2


def test_one_to_two_replicas_and_back_under_load(rig):
    """No request fails, and new replicas are met at once."""
    stop = []

    def load(n):
        asked = 0
        while not stop:
            assert len(ask(rig, f"{n} {asked} " + PROMPT[:400], 4).tokens) == 4
            asked += 1
        return asked

    def engines():
        samples = rig.metrics()
        named = "ray_pd_connector_sent_chunks_total"
        return {
            dict(labels).get("ReplicaId") for (n, labels), v in samples.items() if n == named and v
        }

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(load, n) for n in range(3)]
        try:
            before = engines()
            rig.deploy(2, 2)
            wait_until(lambda: len(engines() - before) >= 1, "the new prefill replica has sent KV")
            rig.deploy(1, 1)
        finally:
            stop.append(True)
        assert all(job.result() for job in running)
    rig.idle()


def test_a_prefill_replica_killed_during_its_prefill(rig):
    """Its engine stands still when the request comes, so that it dies with the prefill under way."""
    wanted = ask(rig)
    pid = rig.pid(PREFILL)
    with (
        rig.counts(REQUESTS, 1, outcome="prefill_failed"),
        ThreadPoolExecutor(1) as pool,
        stopped(rig.engine_of(pid)),
    ):
        answer = pool.submit(ask, rig)
        wait_until(lambda: rig.asked(PREFILL), "the prefill replica has the request")
        os.kill(pid, signal.SIGKILL)
        assert_same_logprobs(answer.result(), wanted, TOLERANCE)
    # Killed before: nobody has noticed yet, or there is none to bind. Both are answered.
    assert_same_logprobs(ask(rig), wanted, TOLERANCE)
    wait_until(lambda: not rig.up(PREFILL), "Serve has seen it")
    wait_until(lambda: rig.up(PREFILL), "Serve has started another")
    hand_over(rig)


def test_a_prefill_replica_killed_after_its_prefill(rig):
    body = request_body(rig.url, PROMPT, 64, cache_salt=fresh_salt())
    events = rig.client.stream("/v1/completions", body)
    first = next(events)
    os.kill(rig.pid(PREFILL), signal.SIGKILL)
    text = "".join(e["choices"][0]["text"] for e in [first, *events] if e["choices"])
    assert text == ask(rig, max_tokens=64).text
    wait_until(lambda: not rig.up(PREFILL), "Serve has seen it")
    wait_until(lambda: rig.up(PREFILL), "Serve has started another")


def test_a_decode_replica_killed(rig):
    """Its requests are lost, as Serve has it. What the prefill replica kept for it comes home."""
    body = request_body(rig.url, PROMPT, 2000, cache_salt=fresh_salt())
    events = rig.client.stream("/v1/completions", body)
    next(events)
    os.kill(rig.pid(DECODE), signal.SIGKILL)
    wait_until(lambda: not rig.up(DECODE), "Serve has seen it")
    wait_until(lambda: rig.up(DECODE), "Serve has started another")
    assert len(ask(rig, max_tokens=4).tokens) == 4
    rig.idle()


def test_the_node_of_all_prefill_replicas_is_lost(rig):
    """Last: the node does not come back, and no process is left when Serve ends."""
    wanted, before = ask(rig), rig.metrics()
    rig.lose_node()
    for _ in range(2):
        assert_same_logprobs(ask(rig), wanted, TOLERANCE)
    causes = ("unbound", "prefill_failed")
    wait_until(
        lambda: sum(grown(rig.metrics(), before, REQUESTS, outcome=c) for c in causes) == 2,
        "both were computed by the decode replica",
    )
    rig.end()
    wait_until(lambda: not rig.processes("VLLM") + rig.processes("ServeReplica"), "all gone")
