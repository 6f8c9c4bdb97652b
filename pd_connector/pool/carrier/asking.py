# SPDX-License-Identifier: Apache-2.0
"""An engine's connection to the carrier of its host. Without a carrier, or while it is silent, no request waits for
it."""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pd_connector.errors import Miss, PoolError
from pd_connector.pool.carrier.messages import (
    MOST_KEYS,
    MOST_MESSAGE,
    SOCKET,
    Answer,
    Ask,
    AskFar,
    Bring,
    Brought,
    Check,
    Checked,
    FarPage,
    Find,
    Request,
    Sizes,
    SocketFolder,
    Status,
    Waiting,
    answers,
    encode,
    is_own_user,
    new_socket,
)
from pd_connector.pool.load_breakeven import Answers

logger = logging.getLogger("pd_connector.pool")

FIND_S = 0.1
"""Longest wait for the answer to a look-up, in seconds."""
SILENT_S = 0.25
"""Longest silence of a carrier that brings a chunk, in seconds."""
BRING_S = 4.0
"""Longest time in which a carrier brings no chunk at all, in seconds."""
QUEUE_S = 10.0
"""Longest wait for a chunk while others come before it, in seconds."""
_CHECK_S = 60.0
"""Longest wait for a chunk that is checked, in seconds."""
_LOOKS_AGAIN_S = 1.0
"""After which a carrier that was not there is looked for again, in seconds."""
_NOTHING = Sizes([])
_CAUSES = {str(cause): cause for cause in Miss}


class AbsentError(OSError):
    """No carrier serves this host."""


class QueuedError(TimeoutError):
    """A chunk has waited for too long behind others, which have come."""


class CarrierLink:
    """Any thread may use it. Connections are made when they are needed.

    Attributes:
        moved_s: when the carrier last told that chunks come, for whatever engine, on the steady clock.

    Args:
        folder: the memory tier's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder
        self._folder: SocketFolder | None = None
        self._free: list[socket.socket] = []
        self._busy: set[socket.socket] = set()
        self._closed = False
        self._lock = threading.Lock()
        self._absent_until_s = 0.0
        self._answers = Answers()
        self._probing = False
        self.moved_s = 0.0

    def find(self, keys: Sequence[bytes]) -> Sizes:
        """The first chunks of a chain that the far store has. Empty without a carrier, or while it is silent."""
        if not keys or not self.is_there:
            return _NOTHING
        with self._lock:
            if not self._answers.waited_for:
                if not self._probing and self._answers.asks(time.monotonic()):
                    self._probing = True
                    threading.Thread(target=self._probe, args=(list(keys),), daemon=True).start()
                return _NOTHING
        return self._find(keys)

    def bring(self, key: bytes) -> None:
        """Wait until a chunk is in the host's memory.

        Without a carrier it is not brought.

        Raises:
            PoolError: why it is not there.
        """
        try:
            answer = self._request(Bring([key]), SILENT_S, BRING_S)
        except AbsentError:
            return
        except QueuedError as error:  # the far store answers: it is not left alone
            raise PoolError(Miss.NOT_WORTH, str(error)) from None
        except (OSError, msgspec.MsgspecError) as error:
            self._late(f"the carrier brings no chunk ({error!r})")
            raise PoolError(
                Miss.LATE, f"the carrier of this host does not answer: {error!r}"
            ) from None
        if not isinstance(answer, Brought):
            raise PoolError(Miss.LATE, "the carrier of this host answers something else")
        if answer.cause:
            cause = _CAUSES.get(answer.cause, Miss.REFUSED)
            if cause is Miss.LATE:
                self._late(answer.detail)
            raise PoolError(cause, answer.detail)
        self.moved_s = time.monotonic()

    def prefetch(self, keys: Sequence[bytes]) -> None:
        """Have chunks brought, one after another. Returns when the carrier has noted all, so that no `bring` that follows
        comes before them."""
        if not keys or not self.is_there or not self._answers.waited_for:
            return
        try:
            self._request(Bring(list(keys[:MOST_KEYS]), waits=False), FIND_S, FIND_S)
        except AbsentError:
            return
        except (OSError, msgspec.MsgspecError) as error:
            self._late(f"the carrier notes no chunks within {FIND_S:g} s ({error!r})")

    def status(self, within_s: float = 2.0) -> Status | None:
        """The carrier's status; None without a carrier, or if it does not answer in time."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            answer = self._request(Ask(), within_s, within_s)
            return answer if isinstance(answer, Status) else None
        return None

    def check(self, key: bytes, *, removes: bool) -> Checked:
        """Have a chunk of the far store read and checked, for `pd-connector` commands.

        Args:
            removes: remove it there if it is damaged.
        """
        try:
            answer = self._request(Check(key, removes), _CHECK_S, _CHECK_S)
        except (OSError, msgspec.MsgspecError) as error:
            return Checked(0, silent=f"the carrier of this host does not answer: {error!r}")
        return answer if isinstance(answer, Checked) else Checked(0, silent="an answer to another")

    def far_page(self, after: int, within_s: float = 1.0) -> FarPage | None:
        """A page of the far store's contents, as far as this host's carrier knows; None without a carrier, or if it
        does not answer in time."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            answer = self._request(AskFar(after), within_s, within_s)
            return answer if isinstance(answer, FarPage) else None
        return None

    def close(self) -> None:
        """Hang up. Requests under way fail."""
        with self._lock:
            self._closed = True
            for channel in self._busy:
                with contextlib.suppress(OSError):
                    channel.shutdown(socket.SHUT_RDWR)
            for channel in self._free:
                channel.close()
            self._free.clear()
            if self._folder is not None:
                self._folder.close()
                self._folder = None

    @property
    def has_served(self) -> bool:
        """Whether a carrier serves this host, or has served it: a carrier that has ended leaves its lock file."""
        return any(os.path.lexists(self._path / name) for name in (SOCKET, f"{SOCKET}.lock"))

    @property
    def is_there(self) -> bool:
        """Whether a carrier may be there."""
        return time.monotonic() >= self._absent_until_s

    def _probe(self, keys: Sequence[bytes]) -> None:
        """A look-up for which no request waits."""
        try:
            self._find(keys)
        finally:
            self._probing = False

    def _find(self, keys: Sequence[bytes]) -> Sizes:
        try:
            answer = self._request(Find(list(keys[:MOST_KEYS])), FIND_S, FIND_S)
        except AbsentError:
            return _NOTHING
        except (OSError, msgspec.MsgspecError) as error:
            self._late(f"the carrier answers no look-up within {FIND_S:g} s ({error!r})")
            return _NOTHING
        if not isinstance(answer, Sizes) or answer.silent:
            self._late("the carrier says that it does not answer")
            return _NOTHING
        with self._lock:
            self._answers.in_time()
        return answer

    def _late(self, why: str) -> None:
        with self._lock:
            if self._answers.waited_for:
                logger.info("pool: the far store is left alone for a while: %s", why)
            self._answers.late(time.monotonic())

    def _request(self, message: Request, silent_s: float, most_s: float) -> Answer:
        """Raises OSError or MsgspecError. A connection on which something went wrong is closed.

        Args:
            most_s: longest wait for the answer. It begins again when the carrier tells that other chunks have come.
        """
        channel = self._taken()
        with self._lock:
            self._busy.add(channel)
        try:
            began_s = time.monotonic()
            until_s = began_s + most_s
            ended: int | None = None
            channel.settimeout(silent_s)
            channel.sendall(encode(message))
            while True:
                if not (data := channel.recv(MOST_MESSAGE)):
                    raise ConnectionResetError("the carrier has ended")
                answer = answers.decode(data)
                if not isinstance(answer, Waiting):
                    break
                now_s = time.monotonic()
                if ended is not None and answer.ended != ended:
                    until_s, self.moved_s = now_s + most_s, now_s
                ended = answer.ended
                if now_s >= until_s:
                    raise TimeoutError(f"no chunk has come for {most_s:g} s")
                if now_s >= began_s + QUEUE_S:
                    raise QueuedError(f"a chunk has waited for {QUEUE_S:g} s behind others")
        except BaseException:
            channel.close()
            raise
        finally:
            with self._lock:
                self._busy.discard(channel)
        self._give_back(channel)
        return answer

    def _give_back(self, channel: socket.socket) -> None:
        with self._lock:
            if self._closed:
                channel.close()
            else:
                self._free.append(channel)

    def _taken(self) -> socket.socket:
        """A connection. Raises OSError."""
        with self._lock:
            while self._free:
                channel = self._free.pop()
                if not _is_over(channel):
                    return channel
                channel.close()
        channel, folder = new_socket(), None
        try:
            with self._lock:
                if self._folder is None:
                    self._folder = SocketFolder(self._path)
                folder = self._folder
            channel.settimeout(FIND_S)
            channel.connect(folder.path)
            if not is_own_user(channel):
                raise PermissionError("the carrier is of another user")
        except OSError as error:
            channel.close()
            with self._lock:  # the folder may have been removed and made again
                if (
                    folder is not None and self._folder is folder
                ):  # another thread may have made it again
                    folder.close()
                    self._folder = None
            self._absent_until_s = time.monotonic() + _LOOKS_AGAIN_S
            raise AbsentError(*error.args) from None
        return channel


def _is_over(channel: socket.socket) -> bool:
    """Whether the carrier has closed the connection. It only sends answers, so readable data without a request means
    that."""
    channel.setblocking(False)
    try:
        channel.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
