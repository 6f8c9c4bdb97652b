# SPDX-License-Identifier: Apache-2.0
"""The control channel: one listening socket per producer, one dialling socket per session.

Only sockets live here, no state of transfers. What arrives is bytes; callers decode them.
"""

import contextlib
import errno
import os
import resource
import socket

import zmq
from zmq.utils.monitor import recv_monitor_message

from pd_connector.control.addresses import bound_within, endpoint, numeric, readable
from pd_connector.control.connections import Connections
from pd_connector.control.keys import CurveKeys
from pd_connector.control.liveness import is_unanswered, keep_alive
from pd_connector.errors import Cause, PDConnectorError
from pd_connector.protocol.wire.fields import MAX_MESSAGE_BYTES

Context = zmq.Context[zmq.Socket[bytes]]

_LOST: dict[int, tuple[Cause, str]] = {
    zmq.EVENT_DISCONNECTED: (Cause.SESSION_LOST, "the connection broke"),
    zmq.EVENT_CONNECT_RETRIED: (Cause.UNREACHABLE, "connection refused or no route"),
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: (Cause.AUTHENTICATION, "the producer has another key"),
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: (Cause.AUTHENTICATION, "the other side has no key"),
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: (Cause.AUTHENTICATION, "handshake failed"),
}
_WATCHED = sum(_LOST)
_MOST_SENDERS = 8192
MAX_BATCH = 256
"""Messages that are taken from a socket at a time: a peer that floods it does not keep the thread from the others."""
_MOST_ARRIVED = MAX_BATCH
"""Messages that libzmq keeps of each peer until they are taken. Each may have `MAX_MESSAGE_BYTES`."""
_STOPS_S = 1.0
"""Until libzmq's thread has closed a socket that listens."""
_MOST_ANSWERS = 1 << 12
_MOST_ASKED = 1 << 16
"""Messages to a peer that wait for room in the connection: of a producer, and of a consumer, which may
ask for thousands of transfers at once."""


class Listener:
    """A producer's control socket. Senders are known by a routing id that ZeroMQ gives them.

    Args:
        host: to listen on. Names are looked up here, once.
        ports: the first free one is taken; 0 lets the system choose.
        patience_s: how long a connection may be without a session (`serve`).
    """

    def __init__(
        self,
        context: Context,
        host: str,
        keys: CurveKeys | None,
        ports: range = range(1),
        patience_s: float = 5.0,
    ) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.handshake_ivl = max(1, int(patience_s * 1000))
        self.socket.maxmsgsize = MAX_MESSAGE_BYTES
        self.socket.rcvhwm, self.socket.sndhwm = _MOST_ARRIVED, _MOST_ANSWERS
        self.socket.ipv6 = True
        self.socket.router_mandatory = True
        keep_alive(self.socket)
        if keys:
            keys.demand(self.socket)
        try:
            self.host = numeric(host)
            self._bound = bound_within(self.host, ports)
            self._listening = os.dup(self._bound.fileno())  # libzmq closes it
            self.socket.setsockopt(zmq.USE_FD, self._listening)
            self.port = int(self._bound.getsockname()[1])
            self.socket.bind(endpoint(self.host, self.port))
        except (zmq.ZMQError, OSError) as error:
            self.socket.close()
            raise PDConnectorError(
                f"control channel cannot listen on host {host!r}: {error}; "
                "set `host` to a name or address of this machine, and `control_port` to ports that are free"
            ) from error
        self._connections = Connections(context, self.socket, self.port, patience_s)
        # Senders that have a session, or just spoke, and their connections, either way.
        self._descriptors: dict[bytes, int] = {}
        self._senders: dict[int, bytes] = {}

    @property
    def pollables(self) -> list[object]:
        return [self.socket, self._connections.monitor]

    def serve(self, sender: bytes, now: float) -> None:
        """There is a session with this sender: its connection stays."""
        self._connections.serve(self._descriptors.get(sender, -1), sender, now)

    def release(self, sender: bytes, now: float) -> None:
        """The session with this sender has ended."""
        self._connections.release(self._forget(sender), now)

    def broken(self) -> list[bytes]:
        """Senders whose connection has ended, but whose session has not. Their earlier messages may still wait to be
        received."""
        return self._connections.broken()

    def tick(self, now: float) -> int:
        """Close connections without a session; returns how many."""
        return self._connections.tick(now)

    def receive(self) -> list[tuple[bytes, bytes]]:
        """Messages that wait, as (sender, bytes). A message of several frames counts as malformed: its bytes
        are empty."""
        arrived: list[tuple[bytes, bytes]] = []
        while len(arrived) < MAX_BATCH and readable(self.socket):
            first, *rest = self.socket.recv_multipart(copy=False)
            sender = first.bytes
            arrived.append((sender, rest[0].bytes if len(rest) == 1 else b""))
            if sender not in self._descriptors and rest:
                self._remember(sender, rest[0])
        return arrived

    def _remember(self, sender: bytes, frame: zmq.Frame) -> None:
        try:
            descriptor = int(frame.get(zmq.SRCFD))
        except zmq.ZMQError:  # libzmq does not tell, such as of a connection that has gone
            return
        # The sender that had this number before has lost its connection, even if its session still
        # stands. When that session ends, this connection must stay.
        self._descriptors.pop(self._senders.get(descriptor, b""), None)
        self._descriptors[sender], self._senders[descriptor] = descriptor, sender
        if len(self._descriptors) > _MOST_SENDERS:  # of those that never had a session, most
            self._forget(next(iter(self._descriptors)))

    def _forget(self, sender: bytes) -> int:
        """Returns its descriptor; -1 if it is not known to have one."""
        descriptor = self._descriptors.pop(sender, -1)
        self._senders.pop(descriptor, None)
        return descriptor

    def send(self, receiver: bytes, data: bytes) -> bool:
        """Send a message, unless the receiver is gone or does not read; returns whether it was sent."""
        try:
            self.socket.send_multipart([receiver, data], flags=zmq.DONTWAIT)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        """Close the sockets. Connections end and the port is free even if a forked process holds the sockets, too."""
        with contextlib.suppress(zmq.ZMQError):
            last = self.socket.getsockopt(zmq.LAST_ENDPOINT)
            assert isinstance(last, bytes)
            self.socket.unbind(last)
            if self._connections.stopped(self._listening, _STOPS_S):
                self._bound.shutdown(socket.SHUT_RDWR)
        self._bound.close()
        self._connections.close()
        self.socket.close()


class Connection:
    """A consumer's control socket to one producer. It never connects again by itself: a producer that comes back does
    not know the session, so a new session must be opened."""

    def __init__(self, context: Context, host: str, port: int, keys: CurveKeys | None) -> None:
        """Raises PDConnectorError if the address cannot be dialled, or no descriptor is left."""
        self._is_full = False
        self._port = port
        self._descriptor = -1  # of the connection, since something has come over it
        with contextlib.ExitStack() as undo:
            try:
                self.socket = context.socket(zmq.DEALER)
                undo.callback(self.close)
                self.socket.linger = 100  # milliseconds, for a last `Cancel`
                self.socket.maxmsgsize = MAX_MESSAGE_BYTES
                self.socket.rcvhwm, self.socket.sndhwm = _MOST_ARRIVED, _MOST_ASKED
                self.socket.ipv6 = True
                self.socket.reconnect_ivl = 100
                keep_alive(self.socket)
                if keys:
                    keys.present(self.socket)
                self.monitor = self.socket.get_monitor_socket(_WATCHED)
                self.socket.connect(endpoint(host, port))
            except zmq.ZMQError as error:
                why = no_more_files(error.errno) or error
                raise PDConnectorError(f"{host}:{port} cannot be dialled: {why}") from error
            undo.pop_all()

    def receive(self, most: int = MAX_BATCH) -> list[bytes]:
        """Messages that wait, at most `most`. If `most` are returned, more may wait; otherwise ZeroMQ's
        descriptor tells of the next one."""
        arrived: list[bytes] = []
        try:  # mostly there is just one, so this does not ask first
            while True:
                frame = self.socket.recv(zmq.DONTWAIT, copy=False)
                arrived.append(b"" if frame.more else frame.bytes)
                if self._descriptor < 0:
                    self._descriptor = int(frame.get(zmq.SRCFD))
                while frame.more:
                    frame = self.socket.recv(copy=False)
                if len(arrived) >= most or not readable(self.socket):
                    break
        except zmq.Again:
            pass
        return arrived

    def lost(self) -> tuple[Cause, str] | None:
        """Why the connection has ended or cannot be used; None while it can be used."""
        while readable(self.monitor):
            event = recv_monitor_message(self.monitor)
            if event["event"] in _LOST:
                return _LOST[event["event"]]
        # Last: where there is no connection, nothing can be sent either, and why is the news.
        return (Cause.SESSION_LOST, "the producer takes no messages") if self._is_full else None

    @property
    def is_unanswered(self) -> bool:
        """Whether the producer's machine acknowledges nothing any more (`liveness.is_unanswered`)."""
        try:
            connection = socket.socket(fileno=self._descriptor)
        except (OSError, ValueError):
            return False  # it has ended, or not begun
        try:
            # The number may be another file's by now.
            return connection.getpeername()[1] == self._port and is_unanswered(connection)
        except (OSError, IndexError, TypeError):
            return False
        finally:
            connection.detach()  # libzmq's to close

    def send(self, data: bytes) -> bool:
        """Queue a message; returns whether it was queued. If not, the connection must not be used any more, because a
        message is missing."""
        try:
            self.socket.send(data, flags=zmq.DONTWAIT)
        except zmq.Again:
            self._is_full = True
            return False
        return True

    def close(self) -> None:
        self.socket.disable_monitor()
        self.socket.close()


def no_more_files(error: int | None = None) -> str:
    """The error and advice if this process can open no more files; empty if it can.

    Args:
        error: number of an error that may have this reason; None: try to open a file.
    """
    if error is None:
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as failed:
            error = failed.errno
    if error not in (errno.EMFILE, errno.ENFILE):
        return ""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"this process has all the {most} open files that it may have (ulimit -n); raise that limit"
    )
