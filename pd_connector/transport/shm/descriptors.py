# SPDX-License-Identifier: Apache-2.0
"""Passes descriptors of memory over a Unix socket, and gets the kernel's facts about the process at its other end."""

import array
import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pd_connector.memory.slab import SLAB_SEALS

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def send_fds(link: socket.socket, data: bytes, descriptors: Sequence[int]) -> None:
    """Send bytes and descriptors in one message. Raises OSError."""
    socket.send_fds(link, [data], descriptors)


def recv_fds(link: socket.socket, nbytes: int, most: int = 1) -> tuple[bytes, tuple[int, ...]]:
    """Receive one message of at most `nbytes` bytes, and at most `most` descriptors with it; further
    descriptors are closed. Raises OSError.

    Python's own `socket.recv_fds` leaves descriptors open in child processes.
    """
    space = socket.CMSG_SPACE(4 * most)
    data, ancillary, _, _ = link.recvmsg(nbytes, space, socket.MSG_CMSG_CLOEXEC)
    received = array.array("i")
    for level, kind, rights in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received.frombytes(rights[: len(rights) - len(rights) % received.itemsize])
    for descriptor in received[most:]:  # alignment may make room for more than requested
        os.close(descriptor)
    return data, tuple(received[:most])


def map_slab(descriptor: int, nbytes: int, access: int) -> npt.NDArray[np.uint8] | None:
    """Map a peer's slab, uint8 `[nbytes]`, and close the descriptor; None if it is not such memory.

    Args:
        access: `mmap.ACCESS_READ` or `mmap.ACCESS_WRITE`.
    """
    try:
        # Memory that its owner may shrink would kill this process on an access.
        sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SLAB_SEALS == SLAB_SEALS
        if sealed and os.fstat(descriptor).st_size == nbytes:
            return np.frombuffer(mmap.mmap(descriptor, nbytes, access=access), np.uint8)
    except (OSError, ValueError, OverflowError):  # not such memory, or more than can be mapped
        pass
    finally:
        os.close(descriptor)
    return None


def is_of_same_user(link: socket.socket) -> bool:
    """Whether the process at the other end has this process' user, as the kernel says."""
    return _credentials(link)[1] == os.geteuid()


def peer_process(link: socket.socket) -> int:
    """Id of the process at the other end, in this process's namespace; 0 if it is not visible there."""
    return _credentials(link)[0]


def _credentials(link: socket.socket) -> tuple[int, int, int]:
    """Process, user and group of the other end."""
    data = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(data)
    return pid, uid, gid
