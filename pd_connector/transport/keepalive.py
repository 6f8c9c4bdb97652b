# SPDX-License-Identifier: Apache-2.0
"""TCP keepalive: the kernel detects that the other end of a connection is gone."""

import contextlib
import errno
import os
import socket
from collections.abc import Collection, Iterator

from pd_connector.control.liveness import IDLE_S, INTERVAL_S, PROBES


def keep_alive(connection: socket.socket) -> None:
    """Let the system probe whether the other end is there."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)


def hang_up(connection: socket.socket) -> None:
    """Close a socket. The other end notices even if a forked process holds it, too."""
    with contextlib.suppress(OSError):  # not connected, or not any more
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def listening_sockets() -> dict[int, int]:
    """Descriptors with which this process accepts TCP connections, and their ports.

    Raises OSError if there is no descriptor to look with.
    """
    return {
        number: port
        for number, sock, port in _sockets()
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }


def keep_accepted_alive(ports: Collection[int]) -> None:
    """`keep_alive` for the connections that any library has accepted on these ports, as far as there are
    descriptors."""
    with contextlib.suppress(OSError):
        for _, sock, port in _sockets():
            if port in ports and not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                with contextlib.suppress(OSError):  # it has ended
                    keep_alive(sock)


def _sockets() -> Iterator[tuple[int, socket.socket, int]]:
    """Yield the descriptor of each TCP socket of this process, a duplicate that stays open until
    the next is taken, and the port."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            copy = socket.socket(fileno=os.dup(int(name)))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            continue  # closed meanwhile
        with copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                yield int(name), copy, int(copy.getsockname()[1])
