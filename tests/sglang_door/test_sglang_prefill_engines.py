# SPDX-License-Identifier: Apache-2.0
"""A prefill engine is found by its registry or by a control port; other listeners are told apart."""

import contextlib
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from support.agents import KEY, LONG, Ranks, ranks, until

from pd_connector.config import Config
from pd_connector.errors import Cause
from pd_connector.sglang.prefill_engines import AT_ONCE, MOST_FAILED, LookupResult, PrefillEngines

__all__ = ["ranks"]

Registry = Callable[..., str]


patient = pytest.mark.parametrize("connect_timeout_s", [60.0])
"""What is looked for is there, however long that takes on a busy machine."""


def serve(servers: list[ThreadingHTTPServer], handler: type[BaseHTTPRequestHandler]) -> str:
    """Start a server of the kind; returns its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    servers.append(server)
    return f"127.0.0.1:{server.server_port}"


def end(servers: list[ThreadingHTTPServer]) -> None:
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def registry() -> Iterator[Registry]:
    """SGLang's registry as far as it is asked: a status and a body for each `GET /route`."""
    servers: list[ThreadingHTTPServer] = []

    def start(*answers: tuple[int, bytes]) -> str:
        left = list(answers)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = left.pop(0) if len(left) > 1 else left[0]
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                pass

        return serve(servers, Handler)

    yield start
    end(servers)


@pytest.fixture
def connect_timeout_s() -> float:
    """Some tests wait for its end."""
    return 2.0


@pytest.fixture
def engines(connect_timeout_s: float) -> Iterator[PrefillEngines]:
    made = PrefillEngines(Config(connect_timeout_s=connect_timeout_s))
    yield made
    made.close()


def found(engines: PrefillEngines, address: str) -> LookupResult:
    until(lambda: engines.look_up(address) is not None, "the end of the look-up")
    end = engines.look_up(address)
    assert end is not None
    return end


def row(port: int, host: str = "127.0.0.1") -> bytes:
    return json.dumps({"rank_ip": host, "rank_port": port}).encode()


@patient
def test_a_registry_names_a_rank_and_the_rank_names_all(
    ranks: Ranks, registry: Registry, engines: PrefillEngines
) -> None:
    rank = ranks(LONG)
    address = registry((503, b"not all ranks have registered"), (200, row(rank.agent.port)))
    assert found(engines, address) == LookupResult(((rank.peer,),))


@patient
def test_each_replica_of_an_engine_is_asked_for_its_own_ranks(
    ranks: Ranks, registry: Registry, engines: PrefillEngines
) -> None:
    one, other = ranks(LONG), ranks(LONG)
    engine = json.dumps({"dp_size": 2, "follow_bootstrap_room": True}).encode()
    address = registry((200, engine), (200, row(one.agent.port)), (200, row(other.agent.port)))
    assert found(engines, address) == LookupResult(((one.peer,), (other.peer,)))


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ({"dp_size": 2, "follow_bootstrap_room": False}, "--load-balance-method"),
        ({"dp_size": 1 << 40}, "replicas"),
        ({"dp_size": -1}, "replicas"),
        ({"dp_size": "x"}, "invalid literal"),
    ],
)
def test_a_registry_cannot_make_an_engine_ask_without_end(
    registry: Registry, engines: PrefillEngines, engine: Any, told: str
) -> None:
    problem = found(engines, registry((200, json.dumps(engine).encode()))).problem
    assert problem is not None
    assert problem[0] is Cause.UNREACHABLE
    assert told in problem[1]


@patient
def test_a_control_port_is_an_address_too(ranks: Ranks, engines: PrefillEngines) -> None:
    """So a prefill engine that is not SGLang's is reached."""
    rank = ranks(LONG)
    assert found(engines, f"127.0.0.1:{rank.agent.port}") == LookupResult(((rank.peer,),))


@patient
def test_looking_up_does_not_make_the_engine_wait(engines: PrefillEngines) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        assert engines.look_up(f"127.0.0.1:{silent.getsockname()[1]}") is None
        assert time.monotonic() - began < 30.0


def test_a_registry_is_not_believed_about_what_may_not_be_dialled(
    registry: Registry, engines: PrefillEngines
) -> None:
    problem = found(engines, registry((200, row(1, host="192.0.2.1")))).problem
    assert problem is not None
    assert problem[0] is Cause.INSECURE_ADDRESS


def test_a_registry_that_names_a_stranger_ends_the_look_up(
    ranks: Ranks, registry: Registry, engines: PrefillEngines
) -> None:
    """The registry is plain HTTP: an engine that it names must have the key."""
    stranger = ranks({**LONG, "key": KEY})
    address = registry((200, row(stranger.agent.port)))
    problem = found(engines, address).problem
    assert problem is not None
    assert problem[0] in (Cause.AUTHENTICATION, Cause.UNREACHABLE)


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[]", b"<html>", row(1 << 40), b'{"rank_ip": 7, "rank_port": "x"}']
)
def test_a_server_that_answers_something_else_is_no_prefill_engine(
    registry: Registry, engines: PrefillEngines, body: bytes
) -> None:
    problem = found(engines, registry((200, body))).problem
    assert problem is not None
    assert problem[0] is Cause.UNREACHABLE


def test_nobody_there_is_told_in_time_and_asked_for_anew_when_forgotten(
    ranks: Ranks, engines: PrefillEngines
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        problem = found(engines, address).problem
        assert problem is not None
        assert problem[0] is Cause.UNREACHABLE
    assert engines.look_up(address) is not None
    engines.forget(address)
    assert engines.look_up(address) is None


@pytest.mark.parametrize("address", ["", "127.0.0.1", "127.0.0.1:x", "None:8998", "[::1]:99999999"])
def test_addresses_that_are_none_end_the_request_and_nothing_else(
    engines: PrefillEngines, address: str
) -> None:
    assert found(engines, address).problem is not None


class Elsewhere(BaseHTTPRequestHandler):
    """Redirects every client to another address."""

    to = ""

    def do_GET(self) -> None:
        self.send_response(302)
        self.send_header("Location", f"http://{self.to}{self.path}")
        self.end_headers()

    def log_message(self, *args: Any) -> None: ...


def test_a_registry_cannot_send_an_engine_to_another_address(
    ranks: Ranks, registry: Registry, engines: PrefillEngines
) -> None:
    """That one would not be asked whether it is within `peers`."""
    there = registry((200, row(ranks(LONG).agent.port)))
    servers: list[ThreadingHTTPServer] = []
    address = serve(servers, type("There", (Elsewhere,), {"to": there}))
    try:
        problem = found(engines, address).problem
    finally:
        end(servers)
    assert problem is not None
    assert problem[0] is Cause.UNREACHABLE
    assert "status 302" in problem[1]


@patient
def test_a_proxy_of_the_environment_is_not_asked_for_an_engine(
    ranks: Ranks, registry: Registry, engines: PrefillEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        urllib.request, "_opener", None
    )  # which keeps the proxies of an earlier day
    monkeypatch.setenv("http_proxy", f"http://{registry((502, b'no such host'))}")
    rank = ranks(LONG)
    assert found(engines, registry((200, row(rank.agent.port)))) == LookupResult(((rank.peer,),))


class Dripping(BaseHTTPRequestHandler):
    """Answers a byte at a time, and never ends."""

    in_body = False

    def do_GET(self) -> None:
        with contextlib.suppress(OSError):
            self.wfile.write(b"HTTP/1.0 200 OK\r\n" + b"\r\n" * self.in_body)
            while True:
                self.wfile.write(b" " if self.in_body else b"a")
                time.sleep(0.05)

    def log_message(self, *args: Any) -> None: ...


@pytest.mark.parametrize("in_body", [False, True])
def test_a_registry_that_answers_without_end_keeps_nobody_waiting(
    ranks: Ranks, registry: Registry, engines: PrefillEngines, in_body: bool
) -> None:
    """There is one for each look-up thread, so others would never be looked up."""
    servers: list[ThreadingHTTPServer] = []
    handler = type("Slow", (Dripping,), {"in_body": in_body})
    slow = [serve(servers, handler) for _ in range(AT_ONCE)]
    rank = ranks(LONG)
    good = registry((200, row(rank.agent.port)))
    try:
        for address in (*slow, good):
            engines.look_up(address)
        for address in slow:
            problem = found(engines, address).problem
            assert problem is not None
            assert problem[0] is Cause.UNREACHABLE
        assert found(engines, good) == LookupResult(((rank.peer,),))
    finally:
        end(servers)


def test_addresses_that_clients_made_up_are_forgotten_although_nobody_asks_how_it_ended() -> None:
    """Their requests were aborted meanwhile. An engine that was found stays known."""
    engines = PrefillEngines(Config(peers=("10.0.0.1",)))
    try:
        for number in range(3 * MOST_FAILED):
            engines.look_up(f"192.0.2.1:{number}")  # not within peers: it ends at once
            until(lambda: all(one.done() for one in engines._lookups.values()), "ended")
        assert len(engines._lookups) <= MOST_FAILED
    finally:
        engines.close()
