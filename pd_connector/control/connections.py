# SPDX-License-Identifier: Apache-2.0
"""The connections of a listening socket. Connections without a session can be closed.

libzmq accepts every connection and keeps it. Each takes a descriptor. A peer that opens thousands of them
and says nothing would take the engine's last descriptor.
"""

import resource
import socket
import time
from collections.abc import Mapping
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from pd_connector.control.addresses import readable

_MOST_CONNECTIONS = 4096
_SHARE_OF_DESCRIPTORS = 4
"""Connections take one descriptor of the process in this many, at most."""
_MOST_EVENTS = 1024  # handled at a time


class Connections:
    """Connections of one listening socket, by descriptor. Used by one thread.

    Args:
        listening: the bound socket, without another monitor.
        port: the port that it is bound to. Only sockets with this local port are ever shut.
        patience_s: how long a connection may be without a session.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        listening: zmq.Socket[bytes],
        port: int,
        patience_s: float,
    ) -> None:
        self._port = port
        self._patience_s = patience_s
        self._waiting: dict[int, float] = {}  # without a session, since when; oldest first
        self._serving: dict[int, bytes] = {}  # whose session it is
        self._broken: list[bytes] = []  # whose connection has ended, and not the session
        self._listening = listening
        endpoint = f"inproc://connections-{id(self):x}-{port}"
        listening.monitor(endpoint, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        self.monitor = context.socket(zmq.PAIR)
        self.monitor.rcvhwm = 0  # a full queue would stop libzmq's I/O thread
        self.monitor.linger = 0
        self.monitor.connect(endpoint)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._serving)

    def serve(self, descriptor: int, sender: bytes, now: float) -> None:
        """There is a session with this sender over this connection."""
        while readable(self.monitor):  # libzmq has told of the connection before its first message
            self._read_events(now)
        if self._waiting.pop(descriptor, None) is not None:
            self._serving[descriptor] = sender

    def release(self, descriptor: int, now: float) -> None:
        """The session over this connection has ended; another one may follow."""
        if self._serving.pop(descriptor, None) is not None:
            self._waiting[descriptor] = now

    def broken(self) -> list[bytes]:
        """Senders whose connection has ended since the last call. Their earlier messages may still wait to be
        received."""
        broken, self._broken = self._broken, []
        return broken

    def tick(self, now: float) -> int:
        """Close connections that have been without a session for too long, and the oldest of them
        if there are too many; returns how many were closed."""
        self._read_events(now)
        closed = 0
        most = _most_connections() if self._waiting else 0
        for descriptor, since in list(self._waiting.items()):
            if since + self._patience_s > now and len(self) <= most:
                break
            self._close(descriptor)
            closed += 1
        return closed

    def stopped(self, listening: int, timeout_s: float) -> bool:
        """Whether libzmq has closed the descriptor that it listened on; waits for that."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            if self.monitor.poll(int(1000 * left_s)):
                event = recv_monitor_message(self.monitor)
                if event["event"] == zmq.EVENT_CLOSED and event["value"] == listening:
                    return True
        return False

    def close(self) -> None:
        """End all connections."""
        self._waiting |= dict.fromkeys(self._serving, 0.0)
        for descriptor in list(self._waiting):
            self._close(descriptor)
        self._listening.disable_monitor()
        self.monitor.close()

    def _read_events(self, now: float) -> None:
        events = 0
        while events < _MOST_EVENTS and readable(self.monitor):
            self._happened(recv_monitor_message(self.monitor), now)
            events += 1

    def _happened(self, event: Mapping[str, Any], now: float) -> None:
        descriptor = int(event["value"])
        self._waiting.pop(descriptor, None)
        if (sender := self._serving.pop(descriptor, None)) is not None:
            self._broken.append(sender)
        if event["event"] == zmq.EVENT_ACCEPTED:
            self._waiting[descriptor] = now

    def _close(self, descriptor: int) -> None:
        """Shut the connection; libzmq sees its end, and closes the descriptor."""
        del self._waiting[descriptor]
        try:
            # No duplicate: this is needed most when there is no descriptor left for one.
            connection = socket.socket(fileno=descriptor)
        except OSError:
            return  # it has gone by itself
        try:
            # The number may be another file's by now: only a connection of this port is shut.
            if connection.getsockname()[1] == self._port:
                connection.shutdown(socket.SHUT_RDWR)
        except (OSError, IndexError, TypeError):
            pass  # not connected any more, or no such socket
        finally:
            connection.detach()  # libzmq's to close


def _most_connections() -> int:
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return min(_MOST_CONNECTIONS, descriptors // _SHARE_OF_DESCRIPTORS)
