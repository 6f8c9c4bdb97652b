# SPDX-License-Identifier: Apache-2.0
"""Resets or silences all TCP connections of this process."""

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator

_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("=HBBI", 6, 0, 0, 0)  # classic BPF: `ret #0`


def reset_connections() -> int:
    """End every connection with a reset, so no data on its way arrives. Returns the number of connections."""
    libc = ctypes.CDLL(None, use_errno=True)
    nowhere = ctypes.create_string_buffer(16)  # a struct sockaddr of AF_UNSPEC: TCP disconnects
    return sum(libc.connect(found.fileno(), nowhere, 16) == 0 for found in _connections())


def silence_connections() -> int:
    """Keep every connection open, and drop everything that it receives, acknowledgements included, like a middlebox
    that has forgotten it. Returns the number of connections."""
    found = 0
    program = ctypes.create_string_buffer(_DROP_ALL)
    # struct sock_fprog: the number of instructions, and their address.
    filtered = struct.pack("HxxxxxxP", 1, ctypes.addressof(program))
    for connection in _connections():
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filtered)
            found += 1
    return found


def _connections() -> Iterator[socket.socket]:
    """Duplicates of the descriptors of established TCP connections. The originals stay unchanged."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            copy = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                with contextlib.suppress(OSError):
                    copy.getpeername()  # raises for a listener
                    yield copy
