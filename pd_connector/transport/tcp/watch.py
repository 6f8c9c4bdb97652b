# SPDX-License-Identifier: Apache-2.0
"""Which sockets are ready."""

import select
import socket
from collections.abc import Iterator
from typing import Protocol

from pd_connector.transport.keepalive import hang_up


class Owner(Protocol):
    """What a socket belongs to."""

    def ready(self, now: float) -> None:
        """The socket can be read or written, as was wanted."""

    def give_up(self, why: str, now: float) -> None:
        """An unforeseen error: close the socket."""


class Watch:
    """Any number of sockets behind one descriptor, which is readable when any of them is ready."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._owners: dict[int, tuple[Owner, int]] = {}

    def fileno(self) -> int:
        return self._epoll.fileno()

    def wish(self, sock: socket.socket, owner: Owner, *, read: bool, write: bool) -> None:
        """Tell `owner` when the socket can be read or written; takes the place of earlier wishes."""
        events = select.EPOLLIN * read | select.EPOLLOUT * write
        current = self._owners.get(sock.fileno())
        if current is None:
            self._epoll.register(sock, events)
        elif current[1] != events:
            self._epoll.modify(sock, events)
        self._owners[sock.fileno()] = owner, events

    def close_socket(self, sock: socket.socket) -> None:
        """Forget a socket and close it."""
        if self._owners.pop(sock.fileno(), None) is not None:
            self._epoll.unregister(sock)
        hang_up(sock)

    def ready(self) -> Iterator[Owner]:
        """The owners whose sockets are ready now, as long as they are still watched."""
        for descriptor, _ in self._epoll.poll(0):
            if owner := self._owners.get(descriptor):
                yield owner[0]

    def close(self) -> None:
        self._epoll.close()
