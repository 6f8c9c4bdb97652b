# SPDX-License-Identifier: Apache-2.0
"""The control channel: one listening socket per producer, one dialling socket per session.

Only sockets live here, no state of transfers. What arrives is bytes; callers decode them.
"""

import zmq
from zmq.utils.monitor import recv_monitor_message

from pd_connector.control.addresses import bound_port, endpoint, numeric, readable
from pd_connector.control.keys import CurveKeys
from pd_connector.errors import Cause, PDConnectorError
from pd_connector.protocol.fields import MAX_MESSAGE_BYTES

Context = zmq.Context[zmq.Socket[bytes]]

_LOST: dict[int, tuple[Cause, str]] = {
    zmq.EVENT_DISCONNECTED: (Cause.SESSION_LOST, "the connection broke"),
    zmq.EVENT_CONNECT_RETRIED: (Cause.UNREACHABLE, "connection refused or no route"),
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: (Cause.AUTHENTICATION, "the producer has another key"),
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: (Cause.AUTHENTICATION, "the other side has no key"),
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: (Cause.AUTHENTICATION, "handshake failed"),
}
_WATCHED = sum(_LOST)
_MAX_BATCH = 256
"""Messages that are taken from a socket at a time: a peer that floods it does not keep the thread from the others."""


class Listener:
    """A producer's control socket. Senders are known by a routing id that ZeroMQ gives them."""

    def __init__(self, context: Context, host: str, keys: CurveKeys | None, port: int = 0) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.maxmsgsize = MAX_MESSAGE_BYTES
        self.socket.ipv6 = True
        self.socket.router_mandatory = True
        if keys:
            keys.guard(self.socket)
        try:
            self.socket.bind(endpoint(numeric(host), port or "*"))
        except (zmq.ZMQError, OSError) as error:
            self.socket.close()
            raise PDConnectorError(
                f"control channel cannot listen on host {host!r}: {error}; "
                "set `host` to a name or address of this machine"
            ) from error
        self.port = bound_port(self.socket)

    def receive(self) -> list[tuple[bytes, bytes]]:
        """Messages that wait, as (sender, bytes). A message of several frames counts as malformed: its bytes
        are empty."""
        arrived: list[tuple[bytes, bytes]] = []
        while len(arrived) < _MAX_BATCH and readable(self.socket):
            sender, *frames = self.socket.recv_multipart()
            arrived.append((sender, frames[0] if len(frames) == 1 else b""))
        return arrived

    def send(self, receiver: bytes, data: bytes) -> bool:
        """Send a message, unless the receiver is gone or does not read; returns whether it was sent."""
        try:
            self.socket.send_multipart([receiver, data], flags=zmq.DONTWAIT)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        self.socket.close()


class Connection:
    """A consumer's control socket to one producer. It never connects again by itself: a producer that comes
    back knows nothing of the session, and a new one must be agreed with it."""

    def __init__(self, context: Context, host: str, port: int, keys: CurveKeys | None) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 100  # milliseconds, for a last `Cancel`
        self.socket.maxmsgsize = MAX_MESSAGE_BYTES
        self.socket.ipv6 = True
        self.socket.reconnect_ivl = 100
        if keys:
            keys.present(self.socket)
        self.monitor = self.socket.get_monitor_socket(_WATCHED)
        try:
            self.socket.connect(endpoint(host, port))
        except zmq.ZMQError as error:
            self.close()
            raise PDConnectorError(f"{host}:{port} cannot be dialled: {error}") from error

    def receive(self) -> list[bytes]:
        """Messages that wait."""
        arrived: list[bytes] = []
        while len(arrived) < _MAX_BATCH and readable(self.socket):
            frames = self.socket.recv_multipart()
            arrived.append(frames[0] if len(frames) == 1 else b"")
        return arrived

    def lost(self) -> tuple[Cause, str] | None:
        """Why the connection is no more, once that is so."""
        while readable(self.monitor):
            event = recv_monitor_message(self.monitor)
            if event["event"] in _LOST:
                return _LOST[event["event"]]
        return None

    def send(self, data: bytes) -> None:
        """Queue a message. One that cannot be queued is lost: the session's timeout notices that."""
        try:
            self.socket.send(data, flags=zmq.DONTWAIT)
        except zmq.Again:
            return

    def close(self) -> None:
        self.socket.disable_monitor()
        self.socket.close()
