# SPDX-License-Identifier: Apache-2.0
"""Replicas and nodes that come, go and die while requests run."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from harness import assert_same_logprobs, fresh_salt, request_body, wait_until
from ray_rig import DECODE, PREFILL, PROMPT, REQUESTS, TOLERANCE, ask, grown, hand_over

pytestmark = pytest.mark.ray


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
            rig.scale(2, 2)
            wait_until(lambda: len(engines() - before) >= 1, "the new prefill replica has sent KV")
            rig.scale(1, 1)
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
