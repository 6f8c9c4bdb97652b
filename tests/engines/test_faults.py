# SPDX-License-Identifier: Apache-2.0
"""Clients that leave, engines that die, input that is wrong: the answer is right, nothing is kept.

`SETUP` shortens leases and timeouts, so that recovery is seen within a test; the behaviour is the
same. The `pair` fixture asserts after each test that pages, slots and leases are at zero.
"""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from harness import (
    TWO_STEP_PARAMS,
    assert_no_leaks,
    assert_same_logprobs,
    completion,
    fresh_salt,
    prefill_step,
    two_step,
    wait_until,
)
from pairs import (
    Pair,
    Setup,
)
from pauses import in_background, loading, paused
from recipes import NEW
from test_handoff import PAGE, prompt_of
from tools import TOLERANCE, delta, leaving_client

from pd_connector.tools.launch import Census

SETUP = Setup.of(
    vllm=NEW,
    worker_apart=True,  # more processes that can die
    transports=["tcp"],
    key="91e026d37e3cd5093c131e20630bff59862845a3af6ceab8eaec7251e353bec0",
    peers=["127.0.0.0/8", "no-such-host.invalid"],
    lease_s=6,
    heartbeat_s=0.5,
    session_timeout_s=3,
    stall_timeout_s=6,
    connect_timeout_s=4,
    wait_timeout_s=60,
)


def test_a_handoff_with_a_key_over_tcp(pair: Pair, reference) -> None:
    prompt = prompt_of(700, start=40)
    with delta(pair.d, "pd_connector:received_transfers_total") as received:
        assert_same_logprobs(two_step(pair.p, pair.d, prompt), reference(prompt), TOLERANCE)
    assert received.amount == 1


def test_a_client_that_leaves_before_the_transfer_frees_the_lease(pair: Pair) -> None:
    """The decode engine waits for a prefill that has not begun."""
    prompt, salt = prompt_of(600), fresh_salt()
    describe = {**TWO_STEP_PARAMS, "describe": True}
    address = completion(pair.p, "a", 1, kv_transfer_params=describe).kv_transfer_params
    params = {
        "do_remote_prefill": True,
        "remote_request_id": "left-before",
        "remote_host": address["remote_host"],
        "remote_port": address["remote_port"],
        "remote_engine_id": address["remote_engine_id"],
        "remote_block_ids": None,
    }
    with leaving_client(pair.d, prompt, cache_salt=salt, kv_transfer_params=params):
        wait_until(lambda: loading(pair), "the decode engine waits for the prefill")
    # The prefill may be faster than the news that the client has left.
    wait_until(lambda: not loading(pair), "the decode engine has heard that its client left")
    ours = {**TWO_STEP_PARAMS, "transfer_id": "left-before"}
    with delta(pair.p, "pd_connector:releases_total", cause="aborted") as freed:
        completion(pair.p, prompt, 1, cache_salt=salt, kv_transfer_params=ours)
        wait_until(lambda: freed.so_far() == 1, "pages that nobody wants are freed at once")


def test_a_client_that_leaves_during_the_transfer_frees_both_sides(pair: Pair) -> None:
    prompt, salt = prompt_of(3500, start=3), fresh_salt()
    params = prefill_step(pair.p, prompt, cache_salt=salt)
    with paused(pair.p):
        with leaving_client(pair.d, prompt, cache_salt=salt, kv_transfer_params=params):
            wait_until(lambda: loading(pair), "the transfer is under way")
        wait_until(lambda: not loading(pair), "the transfer is given up")


def test_a_client_that_leaves_after_the_transfer_frees_its_pages(pair: Pair) -> None:
    prompt, salt = prompt_of(300), fresh_salt()
    params = prefill_step(pair.p, prompt, cache_salt=salt)
    with (
        delta(pair.d, "pd_connector:received_transfers_total") as received,
        leaving_client(pair.d, prompt, 3000, cache_salt=salt, kv_transfer_params=params),
    ):
        wait_until(lambda: received.so_far() == 1, "the transfer is over, the engine decodes")


def test_a_prefill_whose_client_leaves_is_withdrawn(pair: Pair) -> None:
    prompt = prompt_of(3500, start=17)
    with leaving_client(pair.p, prompt, 1, kv_transfer_params=dict(TWO_STEP_PARAMS)):
        wait_until(
            lambda: pair.p.metrics().total("pd_connector:outgoing_transfers") > 0, "it is expected"
        )


def test_pages_that_nobody_fetches_are_freed_when_the_lease_ends(pair: Pair) -> None:
    with delta(pair.p, "pd_connector:releases_total", cause="lease_expired") as freed:
        prefill_step(pair.p, prompt_of(200))
        wait_until(lambda: freed.so_far() == 1, "the lease ends")


def test_a_request_that_comes_after_the_lease_is_recomputed(pair: Pair, reference) -> None:
    prompt, salt = prompt_of(200, start=70), fresh_salt()
    with delta(pair.p, "pd_connector:releases_total", cause="lease_expired") as freed:
        params = prefill_step(pair.p, prompt, cache_salt=salt)
        wait_until(lambda: freed.so_far() == 1, "the lease ends")
    with delta(pair.d, "pd_connector:failed_transfers_total", cause="unknown_transfer") as failed:
        answer = completion(pair.d, prompt, cache_salt=salt, kv_transfer_params=params)
    assert failed.amount == 1
    assert_same_logprobs(answer, reference(prompt), TOLERANCE)


def test_a_producer_that_hangs_costs_the_stall_timeout_and_no_request(
    pair: Pair, reference
) -> None:
    prompt, salt = prompt_of(900, start=5), fresh_salt()
    params = prefill_step(pair.p, prompt, cache_salt=salt)
    with paused(pair.p):
        answer = completion(pair.d, prompt, cache_salt=salt, kv_transfer_params=params)
    assert_same_logprobs(answer, reference(prompt), TOLERANCE)


def test_a_prefill_engine_killed_during_the_transfer(pair: Pair, reference) -> None:
    prompt, salt = prompt_of(900, start=123), fresh_salt()
    params = prefill_step(pair.p, prompt, cache_salt=salt)
    pair.p.pause()
    with in_background(
        completion, pair.d, prompt, cache_salt=salt, kv_transfer_params=params
    ) as answer:
        wait_until(lambda: loading(pair), "the transfer is under way")
        pair.p.kill()
        assert_same_logprobs(answer.result(), reference(prompt), TOLERANCE)
    pair.start()
    with delta(pair.d, "pd_connector:received_transfers_total") as received:
        assert_same_logprobs(two_step(pair.p, pair.d, prompt), reference(prompt), TOLERANCE)
    assert received.amount == 1


def test_a_decode_engine_killed_during_the_transfer(pair: Pair, reference) -> None:
    prompt, salt = prompt_of(3500, start=77), fresh_salt()
    params = prefill_step(pair.p, prompt, cache_salt=salt)
    with (
        paused(pair.p),
        leaving_client(pair.d, prompt, cache_salt=salt, kv_transfer_params=params),
    ):
        wait_until(lambda: loading(pair), "the transfer is under way")
        pair.d.kill()
    pair.start()
    with delta(pair.d, "pd_connector:received_transfers_total") as received:
        assert_same_logprobs(two_step(pair.p, pair.d, prompt), reference(prompt), TOLERANCE)
    assert received.amount == 1


BAD_PARAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "a port that is not a number": ("malformed_params", {"remote_port": "high"}),
    "a port out of range": ("malformed_params", {"remote_port": 65536}),
    "no host": ("malformed_params", {"remote_host": None}),
    "a host that is a list": ("malformed_params", {"remote_host": ["127.0.0.1"]}),
    "no request id": ("malformed_params", {"remote_request_id": None}),
    "an endless request id": ("malformed_params", {"remote_request_id": "x" * 100_000}),
    "both directions": ("malformed_params", {"do_remote_decode": True}),
    "a flag that is a word": ("malformed_params", {"do_remote_prefill": "yes"}),
    "an address that no producer has sealed": ("untrusted_address", {"remote_host": "192.0.2.1"}),
}


@pytest.mark.parametrize("case", list(BAD_PARAMS))
def test_parameters_that_cannot_be_followed_are_ignored(pair: Pair, reference, case: str) -> None:
    cause, wrong = BAD_PARAMS[case]
    prompt = prompt_of(100, start=9)
    params = {
        "do_remote_prefill": True,
        "remote_request_id": "nothing",
        "remote_host": "127.0.0.1",
        "remote_port": 9,
        "remote_block_ids": [[1]],
    }
    with delta(pair.d, "pd_connector:ignored_params_total", cause=cause) as ignored:
        answer = completion(pair.d, prompt, kv_transfer_params={**params, **wrong})
    assert ignored.amount == 1
    assert_same_logprobs(answer, reference(prompt), TOLERANCE)


UNREACHABLE = {
    "nothing listens there": ("127.0.0.1", 9, "unreachable"),
    "a name that does not exist": ("no-such-host.invalid", 9, "unreachable"),
}


@pytest.mark.parametrize("case", list(UNREACHABLE))
def test_a_peer_that_cannot_be_reached_costs_no_request(pair: Pair, reference, case: str) -> None:
    host, port, cause = UNREACHABLE[case]
    prompt = prompt_of(100, start=9)
    params = {
        "do_remote_prefill": True,
        "remote_request_id": "nothing",
        "remote_host": host,
        "remote_port": port,
        "remote_block_ids": [[1]],
    }
    with delta(pair.d, "pd_connector:failed_transfers_total", cause=cause) as failed:
        answer = completion(pair.d, prompt, kv_transfer_params=params)
    assert failed.amount == 1
    assert_same_logprobs(answer, reference(prompt), TOLERANCE)


def test_what_a_role_does_not_do_is_ignored(pair: Pair) -> None:
    with delta(pair.d, "pd_connector:ignored_params_total", cause="role") as ignored:
        answer = completion(pair.d, "abc", 1, kv_transfer_params=dict(TWO_STEP_PARAMS))
    assert ignored.amount == 1
    assert answer.kv_transfer_params == {}


def test_garbage_on_the_control_port_harms_nobody(pair: Pair, reference) -> None:
    prompt, salt = prompt_of(400, start=31), fresh_salt()
    params = prefill_step(pair.p, prompt, cache_salt=salt)
    before = threading.active_count()
    for size in (1, 10, 64, 1000, 100_000):
        with socket.create_connection((params["remote_host"], params["remote_port"])) as talker:
            talker.sendall(os.urandom(size))
    with delta(pair.d, "pd_connector:received_transfers_total") as received:
        answer = completion(pair.d, prompt, cache_salt=salt, kv_transfer_params=params)
    assert received.amount == 1
    assert_same_logprobs(answer, reference(prompt), TOLERANCE)
    assert threading.active_count() == before


def test_a_hundred_transfers_leave_no_thread_file_or_process(pair: Pair) -> None:
    def some(count: int) -> None:
        with ThreadPoolExecutor(4) as threads:
            list(
                threads.map(
                    lambda i: two_step(pair.p, pair.d, prompt_of(2 * PAGE, start=20 * i), 2),
                    range(count),
                )
            )

    some(8)
    pair.assert_idle()
    before = [Census.of(engine.family) for engine in pair.engines]
    some(100)
    for engine, census in zip(pair.engines, before, strict=True):
        assert_no_leaks(engine, census)
