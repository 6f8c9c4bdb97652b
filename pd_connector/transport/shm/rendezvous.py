# SPDX-License-Identifier: Apache-2.0
"""Where the producers of one machine and user find a consumer: a Unix socket of the consumer.

A producer connects to it and presents a token and a descriptor of its sending slab. The consumer has learnt the
token over the control channel. A connection is pending until the consumer expects its token.
"""

import logging
import os
import secrets
import socket
import time
from collections.abc import Container, Sequence
from typing import NamedTuple

from pd_connector.control.sockets import no_more_files
from pd_connector.transport.shm.descriptors import is_of_same_user, recv_fds, send_fds

logger = logging.getLogger("pd_connector.transport.shm.rendezvous")

TOKEN_BYTES = 16
_MAX_PENDING = 64
_PAUSE_S = 0.5
"""Before the next connection is accepted, when there was no descriptor for one."""


class PendingConnection(NamedTuple):
    """A producer that has connected and is not expected (yet)."""

    link: socket.socket
    token: bytes = b""  # empty until it has presented one
    descriptors: tuple[int, ...] = ()  # its sending slab's, which came with the token

    def close(self) -> None:
        self.link.close()
        for descriptor in self.descriptors:
            os.close(descriptor)

    def receive(self) -> "PendingConnection | None":
        """This connection, with the token and descriptors that have arrived since. None if the peer closed it, or broke
        the protocol."""
        try:
            data, descriptors = recv_fds(self.link, TOKEN_BYTES, 1)
        except BlockingIOError:
            return self
        except OSError:
            return None
        if data and not self.token:
            return self._replace(token=data, descriptors=descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        return None


class Listener:
    """The consumer's socket. It lies in the abstract namespace, which ends where the network namespace ends.

    Attributes:
        name: the socket's, without the leading zero byte.
    """

    def __init__(self) -> None:
        self.name = f"pd-connector-{secrets.token_hex(12)}"
        self._pending: list[PendingConnection] = []  # oldest first
        self._resumes = 0.0  # when connections are accepted again
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(_MAX_PENDING)

    @property
    def pollables(self) -> list[object]:
        """Descriptors that turn readable when `accept` is due."""
        pending: list[object] = [greeting.link.fileno() for greeting in self._pending]
        return pending if self._resumes else [self._socket.fileno(), *pending]

    def accept(self, expected: Container[bytes]) -> list[PendingConnection]:
        """Take out the connections that present an expected token; they are the caller's to close."""
        self._accept_new()
        accepted = []
        pending = []
        for connection in self._pending:
            received = connection.receive()
            if received is None:
                connection.close()
            elif received.token in expected:
                accepted.append(received)
            else:
                pending.append(received)
        self._pending = pending
        return accepted

    def close(self) -> None:
        for connection in self._pending:
            connection.close()
        self._pending.clear()
        self._socket.close()

    def _accept_new(self) -> None:
        if self._resumes > time.monotonic():
            return
        self._resumes = 0.0
        while True:
            try:
                link, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:  # no descriptor is left: a waiting connection is dropped, or frees one in time
                why = no_more_files(error.errno) or error
                logger.warning("a producer cannot be let in: %s", why)
                self._resumes = time.monotonic() + _PAUSE_S
                if self._pending:
                    self._pending.pop(0).close()
                return
            if not is_of_same_user(link):
                link.close()
                continue
            link.setblocking(False)
            self._pending.append(PendingConnection(link))
            if len(self._pending) > _MAX_PENDING:
                self._pending.pop(0).close()


def connect(name: str, token: bytes, descriptors: Sequence[int]) -> socket.socket:
    """Connect to a listener, present a token with descriptors, and return the link.

    Raises:
        OSError: there is no such listener in this network namespace, or it is another user's.
    """
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        link.setblocking(False)
        link.connect(f"\0{name}")
        if not is_of_same_user(link):
            raise PermissionError("the socket belongs to another user")
        send_fds(link, token, descriptors)
    except BaseException:
        link.close()
        raise
    return link
