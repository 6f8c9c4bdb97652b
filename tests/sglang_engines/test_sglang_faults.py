# SPDX-License-Identifier: Apache-2.0
"""Requests that end early, engines that die and peers that are none: each ends with its cause, no
answer is wrong, and nothing is left behind."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sglang_engines.sglang_harness import (
    TOLERANCE,
    Answer,
    EnginePool,
    SglangEngine,
    abort_all,
    assert_idle,
    assert_same,
    body,
    ended,
    handed_over,
    new_room,
    paused,
    refused,
    send,
    text,
)
from sglang_engines.sglang_recipes import DECODE, LARGE_PAGES, PREFILL, SMALL_PAGES
from support.waits import until

from pd_connector.tools.launch import RouterProcess, stop_services
from scheduler_plugins.router.handoff.prefill import REFUSAL_GRACE_S

LONG = 2000
EVICTING = 8
"""Requests of `LONG` tokens whose leases together exceed `lease_share` of the prefill engine's cache."""
SOON_S = 20.0
"""Well below the five minutes of silence after which SGLang itself gives up."""


@pytest.fixture
def pair(engines: EnginePool) -> tuple[SglangEngine, SglangEngine]:
    return engines.pair(PREFILL, DECODE)


@pytest.fixture
def wanted(engines: EnginePool) -> Answer:
    return engines.reference([text(200)])[0]


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_abort_in_any_queue_leaves_nothing_behind(
    pair: tuple[SglangEngine, SglangEngine], wanted: Answer, side: str, after_s: float
) -> None:
    p, d = pair
    asked = [send(p, d, text(LONG, seed=seed)) for seed in range(3)]
    time.sleep(after_s)
    abort_all(p if side == "prefill" else d)
    for prefill, decode in asked:
        ended(prefill, decode)
    assert_idle(p, d)
    assert_same(handed_over(p, d, text(200)), wanted)


def test_a_prompt_whose_prefill_was_aborted_is_computed_again(
    engines: EnginePool, pair: tuple[SglangEngine, SglangEngine]
) -> None:
    p, d = pair
    prompts = [text(LONG, seed=20 + number) for number in range(3)]
    answers = engines.reference(prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        prefill, decode = send(p, d, prompt)
        time.sleep(0.1)
        abort_all(p)
        assert_same(Answer.of(decode.result()), answer)
        ended(prefill)
    assert d.metrics().total("pd_connector:second_prefills_total") > 0
    assert_idle(p, d)


def test_leases_that_a_prefill_engine_evicts_cost_no_answer(
    pair: tuple[SglangEngine, SglangEngine], wanted: Answer, tmp_path: Path
) -> None:
    """Behind the router. It must not end a decode engine's attempt that has the prompt computed again."""
    p, d = pair
    router = RouterProcess([p.base_url], [d.base_url], log_path=tmp_path / "router.log").start()
    try:
        router.wait_ready()
        request = {"model": router.client.model(), "prompt": text(LONG), "logprobs": 1}
        request |= {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
        first = _answered(router, request)
        leases, again = _ended_leases(p), _computed_again(d)
        with ThreadPoolExecutor(EVICTING) as pool:
            with paused(d, "in_place"):  # its KV waits at the prefill engine
                asked = [pool.submit(_answered, router, request) for _ in range(EVICTING)]
                until(lambda: _ended_leases(p) > leases, "a lease is evicted")
                time.sleep(1.5 * REFUSAL_GRACE_S)  # the decode engine would be given up by now
            for future in asked:
                assert future.result()["tokens"] == first["tokens"]
                assert future.result()["token_logprobs"] == pytest.approx(
                    first["token_logprobs"], abs=TOLERANCE
                )
        until(lambda: _computed_again(d) > again, "it was computed again")
        assert router.client.metrics().total("pd_router:retries_total") == 0
    finally:
        stop_services([router])
    assert_idle(p, d)
    assert_same(handed_over(p, d, text(200)), wanted)


def _answered(router: RouterProcess, request: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = router.client.post("/v1/completions", request)["choices"][0]
    return dict(answer["logprobs"])


def _computed_again(d: SglangEngine) -> float:
    return d.client.metrics().total("pd_connector:second_prefills_total")


def _ended_leases(p: SglangEngine) -> float:
    """Leases that were evicted, or on a slow machine have expired before."""
    samples = p.client.metrics()
    causes = ("lease_evicted", "lease_expired")
    return sum(samples.total("pd_connector:releases_total", cause=cause) for cause in causes)


def test_rooms_that_are_none_end_their_request_and_no_engine(
    pair: tuple[SglangEngine, SglangEngine], wanted: Answer
) -> None:
    p, d = pair
    for room in (-1, 0, 1 << 63, 1 << 200, None, "one", 1.5, {}):
        for future in send(p, d, text(20), bootstrap_room=room):
            assert "bootstrap" in refused(future), room
    assert_same(handed_over(p, d, text(200)), wanted)


def test_one_room_twice_at_once_is_answered_once_at_most(
    pair: tuple[SglangEngine, SglangEngine], wanted: Answer
) -> None:
    p, d = pair
    room = new_room()
    asked = [send(p, d, text(200), bootstrap_room=room) for _ in range(2)]
    for _, decode in asked:
        if decode.exception(timeout=60) is None:
            assert_same(Answer.of(decode.result()), wanted)
    ended(*(prefill for prefill, _ in asked))
    assert_idle(p, d)
    assert_same(handed_over(p, d, text(200)), wanted)


def test_other_tokens_on_the_decode_side_are_refused(
    pair: tuple[SglangEngine, SglangEngine], wanted: Answer
) -> None:
    p, d = pair
    room = {"bootstrap_room": new_room(), "bootstrap_host": p.host}
    room["bootstrap_port"] = p.bootstrap_port
    with ThreadPoolExecutor(2) as pool:
        prefill = pool.submit(p.client.post, "/generate", body(text(200), **room))
        decode = pool.submit(d.client.post, "/generate", body(text(200, seed=5), **room))
        assert "tokens" in refused(decode)
        abort_all(p)  # it would wait for another decode engine until its lease ends
        ended(prefill)
    assert_idle(p, d)
    assert_same(handed_over(p, d, text(200)), wanted)


def test_ports_where_nobody_or_something_else_listens(
    pair: tuple[SglangEngine, SglangEngine], wanted: Answer
) -> None:
    p, d = pair
    with socket.socket() as unused, socket.create_server(("127.0.0.1", 0)) as silent:
        unused.bind(("127.0.0.1", 0))
        ports = unused.getsockname()[1], silent.getsockname()[1], d.port
        began = time.monotonic()
        asked = [send(p, d, text(20), bootstrap_port=port) for port in ports]
        for _, decode in asked:
            assert "prefill engine at" in refused(decode)
            assert time.monotonic() - began < SOON_S
        abort_all(p)
        ended(*(prefill for prefill, _ in asked))
    assert_idle(p, d)
    assert_same(handed_over(p, d, text(200)), wanted)


def test_addresses_that_are_none_end_their_request_and_no_engine(
    pair: tuple[SglangEngine, SglangEngine], wanted: Answer
) -> None:
    p, d = pair
    wrong = [{"bootstrap_port": port} for port in (-1, 0, 1 << 16, 1 << 70, "http", 1.5)]
    wrong += [
        {"bootstrap_host": host} for host in (None, "", "no such host", "::1]", "10.0.0.1", 7)
    ]
    asked = [(each, send(p, d, text(20), **each)) for each in wrong]
    for each, (_, decode) in asked:
        told = refused(decode)
        assert "prefill engine at" in told or "bootstrap" in told, (each, told)
    abort_all(p)
    ended(*(prefill for _, (prefill, _) in asked))
    assert_idle(p, d)
    assert_same(handed_over(p, d, text(200)), wanted)


def test_a_prefill_engine_that_dies_and_comes_back(
    engines: EnginePool, pair: tuple[SglangEngine, SglangEngine], wanted: Answer
) -> None:
    """At the same addresses, and with pages of another size."""
    p, d = pair
    _, decode = send(p, d, text(LONG, seed=9))
    time.sleep(0.1)
    began = time.monotonic()
    p.kill()
    assert "session_lost" in refused(decode) or "unreachable" in refused(decode)
    _, decode = send(p, d, text(200))
    assert "unreachable" in refused(decode)
    assert time.monotonic() - began < SOON_S
    engines.replace(p, SMALL_PAGES)
    engines.start_ahead(LARGE_PAGES)
    p, d = engines.pair(SMALL_PAGES, DECODE)
    assert_same(handed_over(p, d, text(200)), wanted)
    assert_idle(p, d)


def test_a_decode_engine_that_dies_leaves_no_lease_at_the_prefill(
    engines: EnginePool, wanted: Answer
) -> None:
    p, d = engines.pair(SMALL_PAGES, DECODE)
    prefill, _ = send(p, d, text(LONG, seed=11))
    time.sleep(0.1)
    d.kill()
    ended(prefill)
    assert_idle(p)
    p, d = engines.pair(SMALL_PAGES, LARGE_PAGES)
    assert_same(handed_over(p, d, text(200)), wanted)
    assert_idle(p, d)
