# SPDX-License-Identifier: Apache-2.0
"""An error that nobody has thought of ends no thread of a carrier: the next step follows, and the status counts it."""

import subprocess
import threading
from collections.abc import Callable
from typing import Any

import pytest
from chunks import chain, save
from support.far_hosts import Host, NewHost
from support.redis_servers import RedisServer
from support.waits import until

from pd_connector.pool.carrier import lasting, server
from pd_connector.pool.carrier.bringing import Bringing
from pd_connector.pool.carrier.client import FarClient
from pd_connector.pool.store.local import LocalStore


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lasting, "PAUSE_S", 0.05)


def fails_once(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The next call raises an error; it is set then."""
    call, failed = getattr(owner, name), threading.Event()

    def fails(*args: Any, **more: Any) -> Any:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("nobody has thought of this")
        return call(*args, **more)

    monkeypatch.setattr(owner, name, fails)
    return failed


def test_a_thread_goes_on_until_its_end() -> None:
    ends, calls = threading.Event(), []

    def step() -> None:
        calls.append(1)
        if len(calls) < 4:
            raise KeyError("x")
        ends.set()

    thread = lasting.LastingThread("pd-test", step, ends)
    thread.join(60)
    assert (len(calls), thread.errors) == (4, 3)


@pytest.mark.parametrize(
    ("owner", "name"), [(LocalStore, "journal"), (LocalStore, "chunks"), (Bringing, "_take_asked")]
)
def test_a_carrier_puts_and_brings_after_an_error(
    new_host: NewHost, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    writer, reader = new_host("a"), new_host("b")
    failed = fails_once(owner, name, monkeypatch)
    keys = chain("prompt", 3)
    assert save(writer.own, keys) == 3
    until(lambda: writer.count("put") == 3, "the chunks in the far store")

    def all_come() -> bool:
        reader.store.carrier.prefetch(keys)
        return all(future.result(60).cause == "" for future in reader.carrier.bring(keys))

    until(all_come, "the chunks on the other host")
    assert failed.is_set()
    assert writer.count("errors") + reader.count("errors") == 1


def test_a_client_is_started_after_the_system_refused_a_process(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = fails_once(subprocess, "Popen", monkeypatch)
    client = FarClient("test", redis.address, 5.0)
    try:
        until(lambda: client.is_ready, "the client")
        assert failed.is_set()
        assert client.errors == 1
    finally:
        client.close()


def test_connections_are_served_after_one_that_could_not_be(
    new_host: NewHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host: Host = new_host("a")
    failed = fails_once(server, "is_own_user", monkeypatch)
    answers: Callable[[], bool] = lambda: host.store.carrier.status() is not None  # noqa: E731
    until(answers, "an answer")
    assert failed.is_set()
