# SPDX-License-Identifier: Apache-2.0
"""A worker of UCX with its listening sockets, which UCX closes for good when there are no descriptors."""

import ctypes
import os
from collections.abc import Mapping
from typing import Any

from pd_connector.transport.keepalive import keep_accepted_alive, listening_sockets

_CLOSING_POLLS = 100
"""Cancelled writes end at the next poll; more is for what UCX wants to tell."""
_LIBRARY = "libucs.so.0"
"""UCX's services, as loaded by ucxx. NIXL's own copy has another name."""


class UcxWorker:
    """Used by one thread.

    UCX closes a listening socket when there is no descriptor for a connection that it accepts. It
    tells nobody, and leaves the socket's number in its table of handlers: a later socket with that
    number fails, or UCX waits for ever for the end of the old handler.

    Args:
        api: ucxx's core.
        options: of UCX.

    Raises:
        Exception: UCX cannot make a worker (ucxx's exceptions have no common base).
    """

    def __init__(self, api: Any, options: Mapping[str, str]) -> None:
        context = api.UCXContext(dict(options), feature_flags=(api.Feature.TAG,))
        before = listening_sockets()
        self.worker = api.UCXWorker(context)
        self._listeners = {n: p for n, p in listening_sockets().items() if n not in before}
        self._inodes = {number: os.fstat(number).st_ino for number in self._listeners}
        self.address: bytes = self.worker.address.tobytes()
        self.users: set[int] = set()
        """Links and sources that need this worker."""
        self.failed_dials = 0

    @property
    def ports(self) -> set[int]:
        """On which UCX accepts connections."""
        return set(self._listeners.values())

    @property
    def is_deaf(self) -> bool:
        """Whether UCX has closed a listening socket: nobody new reaches this worker."""
        return len(self._inodes) < len(self._listeners) or bool(self._closed())

    def forget_closed(self) -> None:
        """Take the sockets that UCX has closed out of its table of handlers, so that their numbers
        can be used again.

        Raises OSError or AttributeError if UCX's library offers no way to do that.
        """
        for number in self._closed():
            # It also asks the system not to watch the socket any more, and warns: it is closed.
            ctypes.CDLL(_LIBRARY).ucs_async_remove_handler(number, 0)
            del self._inodes[number]

    def keep_accepted_alive(self) -> None:
        """Let the system ask whether those that have dialled this worker are there."""
        keep_accepted_alive(self.ports)

    def drain(self) -> None:
        """Let UCX end what it has under way, and tell its peers."""
        for _ in range(_CLOSING_POLLS):
            self.worker.progress()

    def _closed(self) -> list[int]:
        return [number for number, inode in self._inodes.items() if not _is_open(number, inode)]


def _is_open(number: int, inode: int) -> bool:
    try:
        return os.fstat(number).st_ino == inode
    except OSError:
        return False
