# SPDX-License-Identifier: Apache-2.0
"""The system finds out that the other end of a connection has gone without a word."""

import socket
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
from support.vanishing import swallow
from transport_ends import End, drive, meet
from transport_kinds import UCX

from pd_connector.transport import keepalive
from pd_connector.transport.keepalive import (
    keep_accepted_alive,
    keep_alive,
    listening_sockets,
)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket, int]]:
    """A connection's dialling end, its accepted end, and the port that accepted it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialled = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        with dialled, accepted:
            yield dialled, accepted, server.getsockname()[1]


def asks(connection: socket.socket) -> bool:
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))


def test_connections_of_a_port_are_asked_for_whoever_accepted_them(
    pair: tuple[socket.socket, socket.socket, int],
) -> None:
    dialled, accepted, port = pair
    assert port in listening_sockets().values()
    assert dialled.getsockname()[1] not in listening_sockets().values()
    keep_accepted_alive({port + 1})
    assert not asks(accepted)
    keep_accepted_alive({port})
    assert asks(accepted)
    assert not asks(dialled)
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == keepalive.IDLE_S


def test_a_connection_that_went_silent_ends(
    pair: tuple[socket.socket, socket.socket, int],
) -> None:
    _, accepted, _ = pair
    with mock.patch.multiple(keepalive, IDLE_S=1, INTERVAL_S=1, PROBES=1):
        keep_alive(accepted)
    swallow(accepted)
    accepted.settimeout(60.0)
    with pytest.raises(TimeoutError, match="timed out") as ended:
        accepted.recv(1)
    assert ended.value.errno is not None  # the connection's end, and not that of our patience


@pytest.mark.parametrize("kind", [UCX])
def test_what_a_producer_opened_over_ucx_does_not_outlive_it(make_end: Callable[..., End]) -> None:
    producer, consumer = make_end(), make_end()
    route, source = meet(producer, consumer)
    producer.send(route, b"header", b"payload", 0)
    drive(producer, consumer, until=lambda: bool(consumer.landed))
    ports = consumer.transport._workers.current.ports  # type: ignore[attr-defined]
    accepted = [
        asks(sock)
        for _, sock, port in keepalive._sockets()
        if port in ports and not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    ]
    assert accepted, "UCX has accepted a connection"
    assert not any(accepted), "UCX asks by itself: nothing need be done here"
    consumer.transport.dismiss(source)
    assert all(
        asks(sock)
        for _, sock, port in keepalive._sockets()
        if port in ports and not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    )
