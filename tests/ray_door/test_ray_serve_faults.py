# SPDX-License-Identifier: Apache-2.0
"""Replicas and nodes that come, go and die while requests run, in this order; routing among two."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

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
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextmanager
def load(rig, threads=2):
    """Requests one after the other in each thread, with room for what else starts. None fails."""
    stop = threading.Event()

    def run(n):
        for asked in itertools.count():
            assert len(ask(rig, f"{n} {asked} " + PROMPT[:400], 4).tokens) == 4
            if stop.wait(2.0):
                return

    with ThreadPoolExecutor(threads) as pool:
        running = [pool.submit(run, n) for n in range(threads)]
        try:
            yield
        finally:
            stop.set()
        for job in running:
            job.result()


def sending(rig):
    """Prefill replicas that have sent KV."""
    return {
        dict(labels)["ReplicaId"]
        for (name, labels), value in rig.metrics().items()
        if name == "ray_pd_connector_sent_chunks_total" and value
    }


def sessions(rig, gauge):
    """Sessions of all living engines. An engine reports while it answers."""
    ask(rig, "x", 1)
    return rig.metrics().total(f"ray_pd_connector_{gauge}")


def gone(engine):
    """Wait until nothing is left of an engine."""
    wait_until(
        lambda: not [pid for pid in engine if os.path.exists(f"/proc/{pid}")],
        f"processes {engine} have ended",
    )


def end_at_once(rig, deployment, replica):
    """Kill a replica; returns the processes of its engine."""
    pid = rig.pids(deployment)[replica]
    engine = rig.engine_of(pid)
    os.kill(pid, signal.SIGKILL)
    return engine


@contextmanager
def kv_held_by_all_prefill_replicas(rig, pool, prompt=PROMPT[:800], max_tokens=4):
    """Within, the decode engines stand still, and each prefill replica has computed prompts whose KV they are
    to fetch. Yields the requests, one for each of the pool's threads. Nothing else may be under way."""
    replicas = len(rig.pids(PREFILL))
    done = "CALL completions OK"
    with stopped(rig.engines(DECODE)):
        with stopped(rig.engines(PREFILL)):  # all are under way at once: load spreads what is new
            answers = [
                pool.submit(ask, rig, prompt if n == 0 else f"{n}: {prompt}", max_tokens)
                for n in range(pool._max_workers)
            ]
            wait_until(lambda: len(rig.asked(PREFILL)) == replicas, "all have a request")
            before = rig.logged(PREFILL, done)
        wait_until(
            lambda: rig.logged(PREFILL, done) == before + len(answers), "the prompts are computed"
        )
        held = rig.held()
        assert len(held) == replicas
        assert all(held), held
        yield answers


def test_one_to_two_replicas_under_load(rig):
    before = sending(rig)
    with load(rig), ThreadPoolExecutor(6) as pool:
        rig.scale(2, 2)
        # All are under way at once: as long as they come one by one, the first replica may get them all.
        with stopped(rig.engines(PREFILL)):
            answers = [pool.submit(ask, rig, f"new {n} " + PROMPT[:400], 4) for n in range(6)]
            wait_until(lambda: len(rig.asked(PREFILL)) == 2, "both prefill replicas are asked")
        assert all(len(answer.result().tokens) == 4 for answer in answers)
        wait_until(
            lambda: sending(rig) - before, "the new prefill replica has sent KV", every_s=0.25
        )
    rig.idle()


def test_prompts_that_begin_alike_go_to_the_same_prefill_replica(rig):
    """The router's choice is what the policy's `decide` says, and Serve does it."""

    def one(n):
        prompt = f"{n}: " + PROMPT[:800]
        return ask(rig, prompt, 2, user=f"prefix {n}", cache_salt=f"salt {n}")

    def routes():
        seen = [[r for r in each if str(r[0]).startswith("prefix ")] for each in rig.routes()]
        return seen, sum(map(len, seen))

    with ThreadPoolExecutor(6) as pool:
        with stopped(rig.engines(PREFILL)):  # all are under way at once: load spreads what is new
            first = pool.map(one, range(6))
            wait_until(lambda: routes()[1] == 6, lambda: f"six requests have a replica: {routes()}")
        list(first)
        for _ in range(2):
            list(pool.map(one, range(6)))
    seen, count = routes()
    assert count == 18
    assert {used for each in seen for _, _, used in each} == set(rig.pids(PREFILL))
    for each in seen:  # each decode replica knows what it has sent itself
        assert [used for _, _, used in each] == [decided for _, decided, _ in each]
        homes = {(user, used) for user, _, used in each}
        assert len(homes) == len({user for user, _ in homes})


def test_a_decode_replica_killed_with_requests_under_way(rig):
    """Those that it has not begun to answer are answered by another. What it was to fetch comes home."""
    prompts = [f"{n}: " + PROMPT for n in range(8)]
    wanted = ask(rig, prompts[0])
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask, rig, prompt) for prompt in prompts]
        victim = wait_until(lambda: rig.asked(DECODE), "a decode replica has a request").pop()
        engine = end_at_once(rig, DECODE, victim)
        assert_same_logprobs(answers[0].result(), wanted, TOLERANCE)
        assert all(len(answer.result().tokens) == 16 for answer in answers)
    gone(engine)
    rig.idle()


def test_a_prefill_replica_killed_during_its_prefill_and_before(rig):
    """Its engine stands still when the request comes, so that it dies with the prefill under way. Ray says so, or the
    decode engine's connector loses the producer and computes the prompt: which of them is first is chance."""
    wanted = ask(rig)
    with (
        rig.counts(REQUESTS, 1),
        ThreadPoolExecutor(1) as pool,
        stopped(rig.engines(PREFILL)),
    ):
        answer = pool.submit(ask, rig)
        victim = wait_until(lambda: rig.asked(PREFILL), "a prefill replica has it").pop()
        engine = end_at_once(rig, PREFILL, victim)
        assert_same_logprobs(answer.result(), wanted, TOLERANCE)
    # A process that has not noticed yet may choose the dead replica before the other.
    assert_same_logprobs(ask(rig), wanted, TOLERANCE)
    gone(engine)


def test_two_replicas_to_one_under_load(rig):
    """Replicas that end give what they keep: no KV is missed. The dead are forgotten."""
    rig.wait_for(2, 2)
    hand_over(rig)
    engines = {*rig.engines(PREFILL), *rig.engines(DECODE)}
    before = rig.metrics()
    with ThreadPoolExecutor(6) as pool, ExitStack() as stack:
        with kv_held_by_all_prefill_replicas(rig, pool) as answers:
            stack.enter_context(load(rig))
            rig.want(PREFILL, 1)
            told = "stopping when decode replicas have fetched KV"
            wait_until(
                lambda: rig.logged(PREFILL, told), "a replica waits for its KV to be fetched"
            )
            assert rig.replicas()[PREFILL] == {"RUNNING": 1, "STOPPING": 1}
        assert all(len(answer.result().tokens) == 4 for answer in answers)
        rig.scale(1, 1)
    assert grown(rig.metrics(), before, "failed_transfers") == 0
    rig.idle()
    gone(engines - {*rig.engines(PREFILL), *rig.engines(DECODE)})
    for gauge in ("consumer_sessions", "producer_sessions"):
        wait_until(
            lambda gauge=gauge: sessions(rig, gauge) <= 1,
            lambda gauge=gauge: f"one session left: {gauge} {sessions(rig, gauge)}",
        )


def test_the_node_of_all_prefill_replicas_is_lost(rig):
    """One request has KV, that of another is computed and not fetched, others come. The node does not come
    back."""
    wanted, whole = ask(rig), ask(rig, max_tokens=64).text
    body = request_body(rig.url, PROMPT, 64, cache_salt=fresh_salt())
    events = rig.client.stream("/v1/completions", body)
    begun = next(events)
    with (
        ThreadPoolExecutor(1) as pool,
        rig.counts("failed_transfers", 1),
        ExitStack() as stack,
    ):
        with kv_held_by_all_prefill_replicas(rig, pool, PROMPT, 16) as (answer,):
            stack.enter_context(load(rig))
            rig.lose_node()
        text = "".join(e["choices"][0]["text"] for e in [begun, *events] if e["choices"])
        assert text == whole
        assert_same_logprobs(answer.result(), wanted, TOLERANCE)
        assert_same_logprobs(ask(rig), wanted, TOLERANCE)


def test_no_process_is_left_when_serve_ends(rig):
    """Last: nothing can be asked after it."""
    assert rig.processes("VLLM::")
    rig.end_serve()
    wait_until(lambda: not rig.processes("VLLM::"), lambda: f"left: {rig.processes('VLLM::')}")
    assert not rig.processes("ServeReplica")
