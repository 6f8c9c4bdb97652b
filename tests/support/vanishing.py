# SPDX-License-Identifier: Apache-2.0
"""Connections whose packets vanish, as behind a middlebox that has forgotten them."""

import ctypes
import socket
import struct

from pd_connector.transport.keepalive import _sockets

_SO_ATTACH_FILTER = 26
_DROP = ctypes.create_string_buffer(struct.pack("=HBBI", 6, 0, 0, 0))
"""One instruction of classic BPF, `ret #0`: the system drops what comes, acknowledgements too."""


def swallow(connection: socket.socket) -> None:
    """From now on nothing reaches this end of a connection, and its system answers nothing."""
    attached = struct.pack("HxxxxxxP", 1, ctypes.addressof(_DROP))
    connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, attached)


def forget(*ports: int) -> int:
    """Both ends in this process of every connection to these ports hear nothing any more; new ones work.
    Returns how many ends there were."""
    ends = 0
    for _, sock, port in _sockets():
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            continue
        try:
            peer = sock.getpeername()[1]
        except OSError:
            continue  # not connected (any more)
        if {port, peer} & {*ports}:
            swallow(sock)
            ends += 1
    return ends
