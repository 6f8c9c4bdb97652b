# SPDX-License-Identifier: Apache-2.0
"""The port of a producer, and the strangers who dial it.

Anybody can dial. A stranger has one frame of fixed size and a few seconds to prove that it was told
this transport's secret, and there are only so many strangers at a time: the oldest goes first.
"""

import errno
import socket
from collections.abc import Callable

from pd_connector.network import numeric
from pd_connector.transport.tcp.address import Address
from pd_connector.transport.tcp.cipher import dial_code, same
from pd_connector.transport.tcp.connection import Pace, tune
from pd_connector.transport.tcp.frames import DIAL_BYTES, MAGIC, Dial, FrameError, read_dial
from pd_connector.transport.tcp.watch import Watch

MAX_STRANGERS = 128
INTRODUCTION_S = 5.0
"""How long a stranger may take to dial, and a dialler may wait for a session to connect it."""
_BACKLOG = 1024
_BATCH = 64
_FULL = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))

Introduce = Callable[[socket.socket, Dial, float], bool]
"""Takes a proven dialler's socket over; returns whether it did, which it does not while no session
has connected that dialler."""


class Listening:
    """The listening socket.

    Args:
        host: name or address to listen on; looked up once, here.

    Raises:
        OSError: it is no address of this machine.
    """

    def __init__(self, host: str, watch: Watch, pace: Pace, introduce: Introduce) -> None:
        self.host = numeric(host)
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.bind((self.host, 0))
            self._socket.listen(_BACKLOG)
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])
        self._watch = watch
        self._pace = pace
        self._introduce = introduce
        self._strangers: dict[_Stranger, None] = {}
        self._shared = b""
        self._address: Address | None = None
        self._resumes = 0.0

    def open(self, shared: bytes, address: Address) -> None:
        """Begin to accept diallers who were told `address`."""
        self._shared, self._address = shared, address
        self._watch.wish(self._socket, self, read=True, write=False)

    def ready(self, now: float) -> None:
        """Accept who has dialled."""
        for _ in range(_BATCH):
            try:
                link, _ = self._socket.accept()
            except OSError as error:
                if error.errno in _FULL:  # descriptors: strangers make room, and time does
                    self._resumes = now + self._pace.heartbeat_s
                    self._watch.wish(self._socket, self, read=False, write=False)
                    self._dismiss_oldest()
                return
            try:
                tune(link, self._pace)
            except OSError:  # it has gone already
                link.close()
                continue
            stranger = _Stranger(link, now + INTRODUCTION_S, self)
            self._strangers[stranger] = None
            self._watch.wish(link, stranger, read=True, write=False)
            stranger.ready(now)
            if len(self._strangers) > MAX_STRANGERS:
                self._dismiss_oldest()

    def heard(self, stranger: "_Stranger", now: float) -> None:
        """A stranger has sent its frame, or more than that, or has gone."""
        try:
            dial = self._proven(stranger.frame)
        except FrameError:
            self._dismiss(stranger)
            return
        stranger.dial = dial
        if not self._offer(stranger, now):
            self._watch.wish(stranger.link, stranger, read=False, write=False)

    def connected(self, identity: bytes, now: float) -> None:
        """A session expects this dialler now; it may have dialled before."""
        for stranger in list(self._strangers):
            if stranger.dial is not None and stranger.dial.dialler == identity:
                self._offer(stranger, now)

    def dismiss(self, stranger: "_Stranger") -> None:
        self._dismiss(stranger)

    def tick(self, now: float) -> None:
        """End strangers who took too long."""
        for stranger in [one for one in self._strangers if one.deadline <= now]:
            self._dismiss(stranger)
        if self._resumes and self._resumes <= now:
            self._resumes = 0.0
            self._watch.wish(self._socket, self, read=True, write=False)

    def close(self) -> None:
        for stranger in list(self._strangers):
            self._dismiss(stranger)
        self._watch.close_link(self._socket)

    def _offer(self, stranger: "_Stranger", now: float) -> bool:
        assert stranger.dial is not None
        if not self._introduce(stranger.link, stranger.dial, now):
            return False
        self._strangers.pop(stranger, None)
        return True

    def _proven(self, frame: bytes) -> Dial:
        """Raises FrameError unless this is a dial by somebody who was told our secret."""
        assert self._address is not None
        dial, code = read_dial(frame)
        if dial.listener != self._address.identity:
            raise FrameError("somebody else was dialled")
        if not same(code, dial_code(self._shared, self._address, dial)):
            raise FrameError("the dialler does not know the secret")
        return dial

    def _dismiss_oldest(self) -> None:
        unproven = (one for one in self._strangers if one.dial is None)
        oldest = next(unproven, None) or next(iter(self._strangers), None)
        if oldest is not None:
            self._dismiss(oldest)

    def _dismiss(self, stranger: "_Stranger") -> None:
        if self._strangers.pop(stranger, self) is None:
            self._watch.close_link(stranger.link)


class _Stranger:
    """Somebody who has dialled."""

    def __init__(self, link: socket.socket, deadline: float, listening: Listening) -> None:
        self.link = link
        self.deadline = deadline
        self.frame = b""
        self.dial: Dial | None = None  # once proven
        self._listening = listening

    def ready(self, now: float) -> None:
        """Take the frame, and nothing behind it: what else comes is for the connection."""
        if self.dial is not None:  # it has been said that nothing more is read; this is its end
            self._listening.dismiss(self)
            return
        try:
            data = self.link.recv(DIAL_BYTES - len(self.frame))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        self.frame += data
        whole = len(self.frame) == DIAL_BYTES
        wrong = not self.frame.startswith(MAGIC[: len(self.frame)])
        if whole or wrong or not data:
            self._listening.heard(self, now)
