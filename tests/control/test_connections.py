# SPDX-License-Identifier: Apache-2.0
"""Connections without a session are closed, those with one stay, and no other socket is touched."""

import os
import socket
import time
from collections.abc import Iterator

import pytest
import zmq
from support.descriptors import no_descriptors
from support.waits import until

from pd_connector.control import connections
from pd_connector.control.sockets import Context, Listener

Link = socket.socket


@pytest.fixture
def patience_s() -> float:
    """No test waits for its end, unless it says otherwise."""
    return 60.0


@pytest.fixture
def listener(patience_s: float) -> Iterator[Listener]:
    context: Context = zmq.Context()
    made = Listener(context, "127.0.0.1", None, patience_s=patience_s)
    yield made
    made.close()
    context.destroy(linger=0)


def connect(listener: Listener) -> Link:
    return socket.create_connection(("127.0.0.1", listener.port))


def closed(link: Link) -> bool:
    link.setblocking(False)
    try:
        while link.recv(1000):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


def turn(listener: Listener, seconds: float) -> int:
    """Let some time pass for the listener; returns how many connections it closed."""
    total, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        listener.receive()
        total += listener.tick(time.monotonic())
        time.sleep(0.01)
    return total


def test_with_too_many_connections_the_oldest_without_a_session_go(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(connections, "_MOST_CONNECTIONS", 10)
    links = [connect(listener) for _ in range(30)]
    gone = 0

    def few_left() -> bool:
        nonlocal gone
        gone += turn(listener, 0.05)
        return gone >= 20

    until(few_left, "the oldest closed")
    turn(listener, 0.1)
    assert sum(not closed(link) for link in links) == 10
    for link in links:
        link.close()


@pytest.mark.parametrize("patience_s", [1.0])
def test_a_session_keeps_its_connection_until_it_ends(listener: Listener):
    context: Context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(f"tcp://127.0.0.1:{listener.port}")
    dealer.send(b"hello")
    sender = b""
    while not sender:
        sender = next((who for who, _ in listener.receive()), b"")
    # Before the listener has been told of the connection, as an agent does it.
    listener.serve(sender, time.monotonic())
    assert turn(listener, 1.5) == 0
    listener.release(sender, time.monotonic())
    assert until(lambda: turn(listener, 0.1), "its connection closed") == 1
    context.destroy(linger=0)


def test_a_descriptor_that_is_another_sockets_by_now_is_left_alone(listener: Listener):
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    held = listener._connections
    for descriptor in (ours.fileno(), os.pipe()[0], 99_999):
        held._waiting[descriptor] = 0.0
    held.tick(time.monotonic())
    assert len(held) == 0
    ours.send(b"x")
    assert theirs.recv(1) == b"x"
    ours.close()
    theirs.close()


def test_without_a_free_descriptor_connections_are_closed_all_the_same(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
):
    links = [connect(listener) for _ in range(5)]
    until(lambda: turn(listener, 0.05) == 0 and len(listener._connections) == 5, "all known")
    monkeypatch.setattr(connections, "_MOST_CONNECTIONS", 0)
    with no_descriptors():
        assert turn(listener, 0.3) == 5
    assert all(closed(link) for link in links)
