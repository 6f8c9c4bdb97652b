# SPDX-License-Identifier: Apache-2.0
"""Host names, addresses and endpoints."""

import socket
from collections.abc import Iterator

import pytest
import zmq

from pd_connector.control.addresses import endpoint, numeric, readable


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.mark.parametrize("address", ["127.0.0.1", "10.1.2.3", "::1", "2001:db8::1"])
def test_an_address_is_itself(address: str) -> None:
    assert numeric(address) == address


def test_a_name_becomes_its_ipv4_address_where_it_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert numeric("localhost") in ("127.0.0.1", "::1")
    found = [
        (socket.AF_INET6, socket.SOCK_STREAM, 0, "", ("2001:db8::7", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("192.0.2.7", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: list(found))
    assert numeric("both.example") == "192.0.2.7"
    del found[1]
    assert numeric("six.example") == "2001:db8::7"


def test_a_name_that_does_not_resolve_raises_oserror() -> None:
    with pytest.raises(OSError, match=r".+"):
        numeric("name.invalid")


@pytest.mark.parametrize(
    ("host", "port", "expected"),
    [
        ("127.0.0.1", 80, "tcp://127.0.0.1:80"),
        ("::1", "*", "tcp://[::1]:*"),
        ("host.example", 1, "tcp://host.example:1"),
    ],
)
def test_endpoints_bracket_ipv6(host: str, port: int | str, expected: str) -> None:
    assert endpoint(host, port) == expected


def test_a_socket_is_readable_when_there_is_something_to_receive(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    listener = context.socket(zmq.PULL)
    port = listener.bind_to_random_port("tcp://127.0.0.1")
    assert not readable(listener)
    dialler = context.socket(zmq.PUSH)
    dialler.connect(endpoint("127.0.0.1", port))
    dialler.send(b"hello")
    assert listener.poll(60_000)
    assert readable(listener)
    assert listener.recv() == b"hello"
