# SPDX-License-Identifier: Apache-2.0
"""The port of a producer, and connections that are not authenticated yet.

Any program can dial. A dialler has a few seconds to prove, by one frame of fixed size, that it was told
this transport's secret. The number of pending connections is bounded: the oldest is closed first.
"""

import errno
import socket
from collections.abc import Callable

from pd_connector.control.addresses import bound_within, numeric
from pd_connector.transport.tcp.address import TcpAddress
from pd_connector.transport.tcp.cipher import dial_code, same
from pd_connector.transport.tcp.connection import Pace, tune
from pd_connector.transport.tcp.frames import DIAL_BYTES, MAGIC, DialFrame, FrameError, read_dial
from pd_connector.transport.tcp.watch import Watch

MAX_PENDING = 128
HANDSHAKE_S = 5.0
"""How long a dialler may take to prove itself, and a dialler may wait for a session to connect it."""
_BATCH = 64
_FULL = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))

Introduce = Callable[[socket.socket, DialFrame, float], bool]
"""Takes a proven dialler's socket over; returns whether it did, which it does not while no session
has connected that dialler."""


class Listening:
    """The listening socket.

    Args:
        host: name or address to listen on; looked up once, here.
        ports: the first free one is taken; 0 lets the system choose.

    Raises:
        OSError: it is not an address of this machine, or no port is free.
    """

    def __init__(
        self, host: str, ports: range, watch: Watch, pace: Pace, introduce: Introduce
    ) -> None:
        self.host = numeric(host)
        self._socket = bound_within(self.host, ports)
        self.port = int(self._socket.getsockname()[1])
        self._watch = watch
        self._pace = pace
        self._introduce = introduce
        self._pending: dict[_PendingConnection, None] = {}
        self._shared = b""
        self._address: TcpAddress | None = None
        self._resumes = 0.0

    def open(self, shared: bytes, address: TcpAddress) -> None:
        """Begin to accept diallers that know `address`."""
        self._shared, self._address = shared, address
        self._watch.wish(self._socket, self, read=True, write=False)

    def ready(self, now: float) -> None:
        """Accept waiting connections."""
        for _ in range(_BATCH):
            try:
                sock, _ = self._socket.accept()
            except OSError as error:
                if (
                    error.errno in _FULL
                ):  # of descriptors: a pending connection makes room, and time does
                    self._pause(now)
                    self._dismiss_oldest()
                return
            try:
                tune(sock, self._pace)
            except OSError:  # it has gone already
                sock.close()
                continue
            pending = _PendingConnection(sock, now + HANDSHAKE_S, self)
            self._pending[pending] = None
            self._watch.wish(sock, pending, read=True, write=False)
            pending.ready(now)
            if len(self._pending) > MAX_PENDING:
                self._dismiss_oldest()

    def give_up(self, why: str, now: float) -> None:
        self._pause(now)

    def heard(self, pending: "_PendingConnection", now: float) -> None:
        """A pending connection has data: its frame, something else, or its end."""
        try:
            dial = self._proven(pending.frame)
        except FrameError:
            self._dismiss(pending)
            return
        pending.dial = dial
        if not self._offer(pending, now):
            self._watch.wish(pending.sock, pending, read=False, write=False)

    def connected(self, identity: bytes, now: float) -> None:
        """A session expects this dialler now; it may have dialled before."""
        for pending in list(self._pending):
            if pending.dial is not None and pending.dial.dialler == identity:
                self._offer(pending, now)

    def dismiss(self, pending: "_PendingConnection") -> None:
        self._dismiss(pending)

    def tick(self, now: float) -> None:
        """Close pending connections that took too long."""
        for pending in [each for each in self._pending if each.deadline <= now]:
            self._dismiss(pending)
        if self._resumes and self._resumes <= now:
            self._resumes = 0.0
            self._watch.wish(self._socket, self, read=True, write=False)

    def close(self) -> None:
        for pending in list(self._pending):
            self._dismiss(pending)
        self._watch.close_socket(self._socket)

    def _pause(self, now: float) -> None:
        """Accept no connection for a while."""
        self._resumes = now + self._pace.heartbeat_s
        self._watch.wish(self._socket, self, read=False, write=False)

    def _offer(self, pending: "_PendingConnection", now: float) -> bool:
        assert pending.dial is not None
        if not self._introduce(pending.sock, pending.dial, now):
            return False
        self._pending.pop(pending, None)
        return True

    def _proven(self, frame: bytes) -> DialFrame:
        """Raises FrameError unless the dialler knows our secret."""
        assert self._address is not None
        dial, code = read_dial(frame)
        if dial.listener != self._address.identity:
            raise FrameError("the dialler wanted another listener")
        if not same(code, dial_code(self._shared, self._address, dial)):
            raise FrameError("the dialler does not know the secret")
        return dial

    def _dismiss_oldest(self) -> None:
        unproven = (each for each in self._pending if each.dial is None)
        oldest = next(unproven, None) or next(iter(self._pending), None)
        if oldest is not None:
            self._dismiss(oldest)

    def _dismiss(self, pending: "_PendingConnection") -> None:
        if self._pending.pop(pending, self) is None:
            self._watch.close_socket(pending.sock)


class _PendingConnection:
    """A connection that has been accepted."""

    def __init__(self, sock: socket.socket, deadline: float, listening: Listening) -> None:
        self.sock = sock
        self.deadline = deadline
        self.frame = b""
        self.dial: DialFrame | None = None  # once proven
        self._listening = listening

    def ready(self, now: float) -> None:
        """Take the frame, and nothing behind it: what else comes is for the connection."""
        if (
            self.dial is not None
        ):  # the peer was informed that nothing more is read; this is its end
            self._listening.dismiss(self)
            return
        try:
            data = self.sock.recv(DIAL_BYTES - len(self.frame))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        self.frame += data
        whole = len(self.frame) == DIAL_BYTES
        wrong = not self.frame.startswith(MAGIC[: len(self.frame)])
        if whole or wrong or not data:
            self._listening.heard(self, now)

    def give_up(self, why: str, now: float) -> None:
        self._listening.dismiss(self)
