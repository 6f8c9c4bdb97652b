# SPDX-License-Identifier: Apache-2.0
"""The control channel's sockets: they never wait, and tell why a connection has gone."""

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest
import zmq
from support.descriptors import no_descriptors
from support.free_ports import free_ports
from support.waits import until

from pd_connector.control import sockets
from pd_connector.control.keys import CurveKeys, Gatekeeper
from pd_connector.control.sockets import Connection, Context, Listener
from pd_connector.errors import Cause, PDConnectorError
from pd_connector.transport import keepalive

KEY = "a key of more than sixteen characters"


@pytest.fixture
def context() -> Iterator[Context]:
    made: Context = zmq.Context()
    yield made
    made.destroy(linger=0)


def lost(connection: Connection) -> Cause:
    return until(connection.lost, "loss of the connection")[0]


def greeted(context: Context, listener: Listener) -> tuple[Connection, bytes]:
    connection = Connection(context, "127.0.0.1", listener.port, None)
    connection.send(b"hello")
    ((sender, data),) = until(listener.receive)
    assert data == b"hello"
    return connection, sender


def test_messages_go_both_ways(context: Context):
    listener = Listener(context, "localhost", None)
    connection, sender = greeted(context, listener)
    assert listener.send(sender, b"welcome")
    assert until(connection.receive) == [b"welcome"]
    assert connection.receive() == []
    assert listener.receive() == []
    assert connection.lost() is None


def test_more_than_one_frame_counts_as_no_message(context: Context):
    listener = Listener(context, "127.0.0.1", None)
    connection, sender = greeted(context, listener)
    connection.socket.send_multipart([b"a", b"b"])
    assert until(listener.receive) == [(sender, b"")]
    listener.socket.send_multipart([sender, b"a", b"b"])
    assert until(connection.receive) == [b""]


def test_who_floods_a_socket_is_read_in_portions_and_completely(context: Context):
    listener = Listener(context, "127.0.0.1", None)
    connection, _ = greeted(context, listener)
    connection.socket.sndhwm = 0
    for i in range(900):
        connection.socket.send(i.to_bytes(4, "little"))
    portions: list[list[tuple[bytes, bytes]]] = []
    while sum(map(len, portions)) < 900:
        portions.append(until(listener.receive))
    assert max(map(len, portions)) <= 256
    arrived = [int.from_bytes(data, "little") for portion in portions for _, data in portion]
    assert arrived == list(range(900))


def test_sending_to_someone_unknown_or_gone_does_not_wait(context: Context):
    listener = Listener(context, "127.0.0.1", None)
    connection, sender = greeted(context, listener)
    assert not listener.send(b"nobody", b"x")
    connection.close()
    until(lambda: not listener.send(sender, b"x"))


def test_sending_to_someone_who_does_not_read_does_not_wait(context: Context):
    listener = Listener(context, "127.0.0.1", None)
    _, sender = greeted(context, listener)
    assert not all(listener.send(sender, bytes(1 << 16)) for _ in range(10_000))


def test_a_connection_that_lost_a_message_is_of_no_use(
    context: Context, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sockets, "_MOST_ASKED", 100)
    listener = Listener(context, "127.0.0.1", None)
    connection, _ = greeted(context, listener)
    assert connection.lost() is None
    assert not all(connection.send(bytes(1 << 16)) for _ in range(10_000))
    assert lost(connection) == Cause.SESSION_LOST


def test_a_peer_that_floods_a_thread_which_does_not_look_takes_bounded_memory(context: Context):
    listener = Listener(context, "127.0.0.1", None)
    peer = context.socket(zmq.DEALER)
    peer.sndhwm = 1
    peer.connect(f"tcp://127.0.0.1:{listener.port}")
    sent = 0
    while sent < 600 and peer.poll(2000, zmq.POLLOUT):
        peer.send(bytes(1 << 19))
        sent += 1
    assert sent < 600, "what is not taken waits at the peer, and in the system"
    arrived = 0
    while arrived < sent:
        arrived += len(until(listener.receive))
    assert arrived == sent


def test_a_message_above_the_limit_ends_the_connection(context: Context):
    listener = Listener(context, "127.0.0.1", None)
    connection, _ = greeted(context, listener)
    connection.send(bytes((1 << 20) + 1))
    assert lost(connection) == Cause.SESSION_LOST
    assert listener.receive() == []


def test_a_listener_that_ends_is_noticed(context: Context):
    listener = Listener(context, "127.0.0.1", None)
    connection, _ = greeted(context, listener)
    listener.close()
    assert lost(connection) == Cause.SESSION_LOST


def test_a_consumer_that_has_gone_is_named_once_and_what_it_said_last_is_received(
    context: Context,
):
    listener = Listener(context, "127.0.0.1", None)
    connection, sender = greeted(context, listener)
    listener.serve(sender, 0.0)
    assert listener.broken() == []
    connection.send(b"last")
    connection.close()

    def broken() -> list[bytes]:
        listener.tick(0.0)
        return listener.broken()

    assert until(broken) == [sender]
    assert listener.receive() == [(sender, b"last")]
    assert broken() == []


def test_a_session_that_outlived_its_connection_does_not_end_the_next_one(context: Context):
    """The system gives the number of the connection that was lost to the next one."""
    listener = Listener(context, "127.0.0.1", None, patience_s=1.0)
    for _ in range(50):
        lost_one, former = greeted(context, listener)
        listener.serve(former, 0.0)
        number = listener._descriptors[former]
        lost_one.close()
        until(lambda sender=former: not listener.send(sender, b"x"), "loss of the connection")
        connection, sender = greeted(context, listener)
        listener.serve(sender, 0.0)
        if listener._descriptors[sender] == number:
            break
    else:
        raise AssertionError("no number was used again")
    broken = listener.broken()
    assert former in broken
    assert sender not in broken
    listener.release(former, 1.0)  # its session has ended by its timeout
    assert listener.tick(100.0) == 0
    assert listener.send(sender, b"still here")
    assert until(connection.receive) == [b"still here"]
    listener.release(sender, 100.0)
    assert listener.tick(200.0) == 1, "without a session it is closed"


def test_a_port_where_nobody_listens_is_noticed(context: Context):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        assert lost(Connection(context, "127.0.0.1", port, None)) == Cause.UNREACHABLE


@pytest.mark.parametrize(("theirs", "ours"), [(KEY, ""), ("", KEY), (KEY, KEY + " but another")])
def test_unlike_keys_are_noticed(context: Context, theirs: str, ours: str):
    derived = CurveKeys.derive(theirs) if theirs else None
    gatekeeper = Gatekeeper(context, derived) if derived else None
    listener = Listener(context, "127.0.0.1", derived)
    keys = CurveKeys.derive(ours) if ours else None
    connection = Connection(context, "127.0.0.1", listener.port, keys)
    connection.send(b"hello")

    def noticed() -> tuple[Cause, str] | None:
        if gatekeeper:
            gatekeeper.answer()
        return connection.lost()

    cause, detail = until(noticed)
    assert cause == Cause.AUTHENTICATION, detail
    assert listener.receive() == []


def test_why_there_is_no_connection_counts_and_not_that_nothing_can_be_sent(context: Context):
    listener = Listener(context, "127.0.0.1", None)
    connection = Connection(context, "127.0.0.1", listener.port, CurveKeys.derive(KEY))
    assert connection.monitor.poll(60_000), "the handshake has failed"
    connection._is_full = True  # as when the handshake fails before anything is sent
    assert lost(connection) == Cause.AUTHENTICATION


def test_the_system_asks_whether_the_other_end_of_a_connection_is_there(context: Context):
    listener = Listener(context, "127.0.0.1", None)
    connection = Connection(context, "127.0.0.1", listener.port, None)
    connection.send(b"hello")
    until(listener.receive)
    asks = []
    for _, sock, port in keepalive._sockets():
        with contextlib.suppress(
            OSError
        ):  # not connected, as the listener, or another test's that has ended
            if listener.port in (sock.getpeername()[1], port):
                asks.append(sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))
    assert asks == [1, 1], "of both ends"


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host.invalid"])
def test_a_host_that_is_not_here_is_an_error_that_names_it(context: Context, host: str):
    with pytest.raises(PDConnectorError, match=host):
        Listener(context, host, None)


def test_a_port_that_is_none_is_an_error_that_names_it(context: Context):
    with pytest.raises(PDConnectorError, match=r"127\.0\.0\.1:-1"):
        Connection(context, "127.0.0.1", -1, None)


@pytest.mark.parametrize("left", range(3))
def test_a_dial_without_descriptors_fails_as_one_that_is_refused(left: int):
    context: Context = zmq.Context()
    context.socket(zmq.PAIR)  # libzmq's own descriptors are there; a close gives one back later
    before = len(os.listdir("/proc/self/fd"))
    try:
        problem = r"127\.0\.0\.1:9 cannot be dialled: .* \(ulimit -n\); raise that limit"
        with no_descriptors(but=left), pytest.raises(PDConnectorError, match=problem):
            Connection(context, "127.0.0.1", 9, None)
        until(lambda: len(os.listdir("/proc/self/fd")) <= before, "descriptors given back")
    finally:
        context.destroy(linger=0)


def test_ranks_of_a_host_share_a_range_of_ports(context: Context):
    ports = free_ports(2)
    listeners = [Listener(context, "127.0.0.1", None, ports) for _ in ports]
    assert [one.port for one in listeners] == list(ports)
    with pytest.raises(
        PDConnectorError, match=f"ports {ports[0]}-{ports[-1]} are all taken.*control_port"
    ):
        Listener(context, "127.0.0.1", None, ports)
    listeners[0].close()
    assert Listener(context, "127.0.0.1", None, ports).port == ports[0], "it is to be had again"
