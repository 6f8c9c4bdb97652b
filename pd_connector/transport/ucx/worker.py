# SPDX-License-Identifier: Apache-2.0
"""A worker of UCX with its listening sockets, which UCX closes for good if no descriptors are left. Unlike ucxx's
worker, it can end while messages of dead senders are missing, and then frees UCX's memory."""

import contextlib
import ctypes
import logging
import os
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pd_connector.transport.keepalive import keep_accepted_alive, listening_sockets
from pd_connector.transport.ucx.address import Buffer

_MOST_FAILED_DIALS = 8
"""UCX keeps a socket of each for as long as the worker lives."""
_CLOSING_POLLS = 100
"""Polls before the end. Cancelled writes end at the first; the others let UCX notify its peers."""
_WHOLE_TAG = (1 << 64) - 1
_SERVICES, _PROTOCOLS = "libucs.so.0", "libucp.so.0"
"""UCX's libraries, as loaded by ucxx. NIXL's own copies have other names."""


class Move(NamedTuple):
    """A message under way, with the memory that UCX uses until it has ended."""

    request: Any
    buffer: Buffer
    tag: int = -1

    @property
    def problem(self) -> str:
        """What went wrong with a message that has ended, empty for nothing."""
        try:
            self.request.check_error()
        except Exception as error:  # ucxx's exceptions have no common base
            return repr(error)
        return ""


class UcxWorker:
    """Used by one thread.

    UCX closes a listening socket when there is no descriptor for a connection that it accepts. It
    reports nothing, and leaves the socket's number in its table of handlers: a later socket with that
    number fails, or UCX waits for ever for the end of the old handler.

    Args:
        api: ucxx's core.
        array: what wraps its buffers.
        context: context of UCX.

    Raises:
        Exception: UCX cannot make a worker (ucxx's exceptions have no common base).
    """

    def __init__(self, api: Any, array: Any, context: Any) -> None:
        self._api, self._array = api, array
        before = listening_sockets()
        self.worker = api.UCXWorker(context)
        self._listeners = {n: p for n, p in listening_sockets().items() if n not in before}
        self._inodes = {number: os.fstat(number).st_ino for number in self._listeners}
        self.address: bytes = self.worker.address.tobytes()
        self.users: set[int] = set()
        """Links and sources that need this worker."""
        self.failed_dials = 0
        self._arriving: list[Move] = []
        self._orphans: list[Move] = []  # no caller waits for them, but UCX uses their memory
        self._is_kept = False  # by ucxx, for ever

    @property
    def ports(self) -> set[int]:
        """On which UCX accepts connections."""
        return set(self._listeners.values())

    @property
    def is_deaf(self) -> bool:
        """Whether UCX has closed a listening socket: no new peer reaches this worker."""
        return len(self._inodes) < len(self._listeners) or bool(self._closed())

    def forget_closed(self) -> None:
        """Take the sockets that UCX has closed out of its table of handlers, so that their numbers
        can be used again.

        Raises OSError or AttributeError if UCX's library offers no way to do that.
        """
        for number in self._closed():
            # It also asks the system not to watch the socket any more, and warns: it is closed.
            ctypes.CDLL(_SERVICES).ucs_async_remove_handler(number, 0)
            del self._inodes[number]

    def keep_accepted_alive(self) -> None:
        """Turn on TCP keepalive for the connections of peers that have dialled this worker."""
        keep_accepted_alive(self.ports)

    def receive(self, tag: int, most_bytes: int, mask: int = _WHOLE_TAG) -> bool:
        """Give the next message that waits under this tag memory to arrive in; False if none waits.

        Args:
            most_bytes: a longer one is cut, and fails for that.
            mask: bits of the tag that are compared.

        Raises:
            Exception: UCX does not take it (ucxx's exceptions have no common base).
        """
        tags = self._api.UCXXTag(tag), self._api.UCXXTagMask(mask)
        message = self.worker.tag_probe(*tags, remove=True)
        if not message:
            return False
        buffer = np.empty(max(1, message.length) if message.length <= most_bytes else 1, np.uint8)
        request = self.worker.tag_recv_with_handle(self._array(buffer), message)
        self._arriving.append(Move(request, buffer, tag))
        return True

    def arrived(self) -> list[Move]:
        """Messages that have arrived, or failed, since the last call. Ended messages that no caller waits for are
        freed."""
        self._orphans = [move for move in self._orphans if not move.request.completed]
        ended = [move for move in self._arriving if move.request.completed]
        self._arriving = [move for move in self._arriving if not move.request.completed]
        return ended

    def forsake(self, tag: int) -> None:
        """No caller waits for messages with this tag any more."""
        self._orphans += [move for move in self._arriving if move.tag == tag]
        self._arriving = [move for move in self._arriving if move.tag != tag]

    def cancel(self, writes: Collection[Move]) -> None:
        """Called before the endpoint of these is closed."""
        self._orphans += writes
        self._is_kept |= not all(move.request.completed for move in writes)

    @property
    def is_worn(self) -> bool:
        """Whether the worker holds something that only its end frees: sockets of failed dials, or memory for messages
        whose sender has died."""
        has_orphans = not all(move.request.completed for move in self._orphans)
        return self.failed_dials >= _MOST_FAILED_DIALS or has_orphans

    def end(self) -> None:
        """This worker is no longer needed."""
        for _ in range(_CLOSING_POLLS):  # UCX ends what it can, and notifies its peers
            self.worker.progress()
            # Where the sender has died, ucxx would wait for the rest of a message, for ever.
            while self.receive(0, 0, mask=0):
                pass
        self.arrived()
        if self._arriving or self._orphans or self._is_kept:
            self._destroy()

    def _destroy(self) -> None:
        """Free UCX's worker: 5 MiB and six descriptors. ucxx (0.52) would not free it, because a request that has not
        ended, or was cancelled, and its worker refer to each other. ucxx's own object, 0.2 MiB, is left behind, so that
        it never frees UCX's worker a second time."""
        memory = [move.buffer for move in (*self._arriving, *self._orphans)]
        self._arriving, self._orphans = [], []  # ucxx cancels requests that go: it still can
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.worker))
        ctypes.CDLL(_PROTOCOLS).ucp_worker_destroy(ctypes.c_void_p(self.worker.handle))
        del memory  # UCX has written to it until now

    def _closed(self) -> list[int]:
        return [number for number, inode in self._inodes.items() if not _is_open(number, inode)]


def _is_open(number: int, inode: int) -> bool:
    try:
        return os.fstat(number).st_ino == inode
    except OSError:
        return False


logger = logging.getLogger("pd_connector.transport.ucx")


class UcxWorkers:
    """Used by one thread.

    Args:
        api: ucxx's core.
        array: what wraps its buffers.
        options: options of UCX.

    Raises:
        Exception: UCX cannot make a worker (ucxx's exceptions have no common base).
    """

    def __init__(self, api: Any, array: Any, options: Mapping[str, str]) -> None:
        context = api.UCXContext(dict(options), feature_flags=(api.Feature.TAG,))
        self._make = partial(UcxWorker, api, array, context)
        self._current = self._make()
        self._spent: list[UcxWorker] = []  # they serve the peers that have reached them

    def __iter__(self) -> Iterator[UcxWorker]:
        return iter((self._current, *self._spent))

    @property
    def current(self) -> UcxWorker:
        """The worker that dials, and whose address peers get."""
        return self._current

    def renew_if_spent(self) -> None:
        """Make a new worker if UCX does not listen any more, or the current worker is worn."""
        if self._current.is_deaf:
            logger.warning(
                "ucx: its listening socket is closed (no descriptors?), and is opened again"
            )
            self._renew()
        else:
            self.renew_if_worn()

    def renew_if_worn(self) -> None:
        """Make a new worker if the current worker is worn (`is_worn`)."""
        if self._current.is_worn:
            self._renew()

    def progress(self) -> None:
        """Let UCX go on."""
        for worker in self:
            worker.worker.progress()
        if self._current.is_deaf:
            with contextlib.suppress(Exception):  # reported at the next dial
                self._current.forget_closed()

    def leave(self, user: int) -> None:
        """A link or a source was removed: end the workers that serve no other peer."""
        for worker in self:
            worker.users.discard(user)
        for worker in [worker for worker in self._spent if not worker.users]:
            self._spent.remove(worker)
            worker.end()

    def close(self) -> None:
        """End the current worker; earlier ones are no longer used."""
        self._current.end()
        del self._current

    def _renew(self) -> None:
        """If there can be no other worker now, the next call tries again."""
        old = self._current
        with contextlib.suppress(Exception):
            old.forget_closed()
            self._current = self._make()
            if old.users:
                self._spent.append(old)
            else:
                old.end()
