# SPDX-License-Identifier: Apache-2.0
"""Where producers of the same machine and user call: a Unix socket, and who waits at it.

A producer presents a token, which has come over the control channel, and with it descriptors of
its sending slab and its cache. It waits here until somebody expects that token.
"""

import array
import contextlib
import fcntl
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Container, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pd_connector.memory.slab import SLAB_SEALS

TOKEN_BYTES = 16
_MAX_STRANGERS = 64
_MAX_DESCRIPTORS = 2
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Guest(NamedTuple):
    """A producer that has called."""

    link: socket.socket
    token: bytes = b""  # empty until it has presented one
    descriptors: tuple[int, ...] = ()  # of its sending slab, and of its cache if it shares that

    def leave(self) -> None:
        self.link.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


class Lobby:
    """See the module. `name` is the socket's, in the abstract namespace."""

    def __init__(self) -> None:
        self.name = f"pd-connector-{secrets.token_hex(12)}"
        self._strangers: list[Guest] = []  # not (yet) expected, longest first
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(_MAX_STRANGERS)

    @property
    def pollables(self) -> list[object]:
        return [self._listener.fileno(), *(guest.link.fileno() for guest in self._strangers)]

    def admit(self, expected: Container[bytes]) -> list[Guest]:
        """Take out those who present an expected token; their link is the caller's to close."""
        self._welcome()
        admitted = []
        staying = []
        for guest in self._strangers:
            heard = _listen(guest)
            if heard is None:
                guest.leave()
            elif heard.token in expected:
                admitted.append(heard)
            else:
                staying.append(heard)
        self._strangers = staying
        return admitted

    def close(self) -> None:
        for stranger in self._strangers:
            stranger.leave()
        self._strangers.clear()
        self._listener.close()

    def _welcome(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except BlockingIOError:
                return
            if not is_of_same_user(link):
                link.close()
                continue
            link.setblocking(False)
            self._strangers.append(Guest(link))
            if len(self._strangers) > _MAX_STRANGERS:
                self._strangers.pop(0).leave()


def call(name: str, token: bytes, descriptors: Sequence[int]) -> socket.socket:
    """Call at a lobby, hand over descriptors, and return the link.

    Raises:
        OSError: there is no such lobby in this network namespace, or it is another user's.
    """
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        link.setblocking(False)
        link.connect(f"\0{name}")
        if not is_of_same_user(link):
            raise PermissionError("the socket belongs to another user")
        give(link, token, descriptors)
    except BaseException:
        link.close()
        raise
    return link


def is_of_same_user(link: socket.socket) -> bool:
    """Whether the process at the other end has this process' user, as the kernel says."""
    return _credentials(link)[1] == os.geteuid()


def peer_process(link: socket.socket) -> int:
    """The process at the other end, as this process numbers it; 0 if it cannot see it."""
    return _credentials(link)[0]


def _credentials(link: socket.socket) -> tuple[int, int, int]:
    """Process, user and group of the other end."""
    data = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(data)
    return pid, uid, gid


def give(link: socket.socket, data: bytes, descriptors: Sequence[int]) -> None:
    """Send bytes and descriptors in one message. Raises OSError."""
    rights = array.array("i", descriptors)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else []
    link.sendmsg([data], ancillary)


def take(link: socket.socket, nbytes: int, most: int = 1) -> tuple[bytes, tuple[int, ...]]:
    """Receive one message of at most `nbytes` bytes, and its descriptors, `most` at most. Raises OSError."""
    space = socket.CMSG_SPACE(4 * most)
    data, ancillary, _, _ = link.recvmsg(nbytes, space, socket.MSG_CMSG_CLOEXEC)
    received = array.array("i")
    for level, kind, rights in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received.frombytes(rights[: len(rights) - len(rights) % received.itemsize])
    for descriptor in received[most:]:  # there may be room for more, for the sake of alignment
        os.close(descriptor)
    return data, tuple(received[:most])


def map_shared(descriptor: int, nbytes: int, access: int) -> npt.NDArray[np.uint8] | None:
    """Map a peer's memory and close the descriptor; None if it is not what a `Slab` shares."""
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


def _listen(guest: Guest) -> Guest | None:
    """The guest with what it has presented since; None if it is gone, or talks out of turn."""
    try:
        data, descriptors = take(guest.link, TOKEN_BYTES, _MAX_DESCRIPTORS)
    except BlockingIOError:
        return guest
    except OSError:
        return None
    if data and not guest.token:
        return guest._replace(token=data, descriptors=descriptors)
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    return None
