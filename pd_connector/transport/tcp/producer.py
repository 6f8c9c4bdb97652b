# SPDX-License-Identifier: Apache-2.0
"""A consumer's view of one producer: it dials, and dials again when the connection is lost."""

import logging
import secrets
import socket
from collections.abc import Callable

from pd_connector.transport.base import Landed
from pd_connector.transport.tcp.address import TcpAddress
from pd_connector.transport.tcp.cipher import Handshake, dial_code, same
from pd_connector.transport.tcp.connection import BrokenError, Common, Connection, tune
from pd_connector.transport.tcp.events import Arrived
from pd_connector.transport.tcp.frames import (
    ACK,
    ANSWER_BYTES,
    GREET,
    NONCE_BYTES,
    DialFrame,
    FrameError,
    read_answer,
    token_body,
)
from pd_connector.transport.tcp.landing import Landing

logger = logging.getLogger("pd_connector.transport.tcp")

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


class ProducerPeer:
    """From the first `expect` to the last `dismiss`.

    Args:
        address: its own.
        dialler: ours.
        shared: secret of all engines; empty without a key.
        landed: called with every chunk.
    """

    def __init__(
        self,
        address: TcpAddress,
        dialler: TcpAddress,
        shared: bytes,
        common: Common,
        landing: Landing,
        landed: Callable[[Landed], None],
    ) -> None:
        self.address = address
        self.sources: set[int] = set()
        self._dialler = dialler
        self._shared = shared
        self._common = common
        self._watch = common.watch
        self._landing = landing
        self._pace = common.pace
        self._landed = landed
        self._greetings = 0  # that have not been sent
        self._sock: socket.socket | None = None  # until the connection stands
        self._dial: DialFrame | None = None  # since it was sent
        self._answer = b""
        self._connection: Connection | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._deadline = 0.0  # of an attempt, or of the pause before the next one

    def expect(self, source: int, now: float) -> None:
        """One more session expects to be written to."""
        self.sources.add(source)
        self._greetings += 1
        if self._connection is not None:
            self._greet(now)
        elif self._sock is None:
            self._begin(now)

    def ready(self, now: float) -> None:
        """The socket can be read or written."""
        if self._connection is not None:
            self._exchange(self._connection, now)
            return
        assert self._sock is not None
        try:
            if self._dial is None:
                self._say_dial(self._sock)
            else:
                self._hear_answer(self._sock, now)
        except (OSError, FrameError) as error:
            self._fail(str(error), now)

    def resume(self, now: float) -> None:
        """There may be landing memory again."""
        if self._connection is not None:
            self._exchange(self._connection, now)

    def tick(self, now: float) -> None:
        if self._connection is not None:
            try:
                self._connection.tick(now)
            except BrokenError as error:
                self._fail(str(error), now)
        elif self._deadline <= now:
            if self._sock is not None:
                self._fail("no answer in time", now)
            else:
                self._begin(now)

    def give_up(self, why: str, now: float) -> None:
        self._fail(why, now)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        elif self._sock is not None:
            self._watch.close_socket(self._sock)
        self._connection = self._sock = None

    def _begin(self, now: float) -> None:
        """DialFrame, without waiting."""
        self._deadline = now + self._pace.silence_s
        self._dial, self._answer = None, b""
        family = socket.AF_INET6 if ":" in self.address.host else socket.AF_INET
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            self._fail(str(error), now)
            return
        self._sock = sock
        try:
            tune(sock, self._pace)
            sock.connect((self.address.host, self.address.port))
        except BlockingIOError:
            pass
        except OSError as error:
            self._fail(str(error), now)
            return
        self._watch.wish(sock, self, read=False, write=True)

    def _say_dial(self, sock: socket.socket) -> None:
        if error := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(error, "cannot be reached")
        ours, theirs = self._dialler.identity, self.address.identity
        dial = DialFrame(ours, theirs, secrets.token_bytes(NONCE_BYTES))
        sock.send(dial.encode() + dial_code(self._shared, self.address, dial))  # there is room
        self._dial = dial
        self._watch.wish(sock, self, read=True, write=False)

    def _hear_answer(self, sock: socket.socket, now: float) -> None:
        try:
            data = sock.recv(ANSWER_BYTES - len(self._answer))
        except (BlockingIOError, InterruptedError):
            return
        if not data:
            raise ConnectionResetError("the producer refused the dial")
        self._answer += data
        if len(self._answer) < ANSWER_BYTES:
            return
        assert self._dial is not None
        nonce, code = read_answer(self._answer)
        handshake = Handshake(self._shared, self._dialler, self.address, self._dial, nonce)
        if not same(code, handshake.answer_code()):
            raise FrameError("the producer does not know the secret")
        seals = handshake.dialler_seals() if handshake.sealed else None
        self._connection = Connection(
            sock,
            self._common,
            self,
            seals,
            self._landing,
            self.address.record_bytes,
            now,
        )
        self._sock = None
        self._pause_s = _FIRST_PAUSE_S
        self._greetings = max(1, self._greetings)
        self._greet(now)

    def _greet(self, now: float) -> None:
        assert self._connection is not None
        for _ in range(self._greetings):
            self._connection.sending.say(GREET)
        self._greetings = 0
        self._send(self._connection, now)

    def _exchange(self, connection: Connection, now: float) -> None:
        try:
            events = connection.exchange(now)
        except BrokenError as error:
            self._fail(str(error), now)
            return
        for event in events:
            if isinstance(event, Arrived):
                head = event.head
                self._landed(Landed(head.header, head.slot, event.payload, verified=event.verified))
                connection.sending.say(ACK, token_body(head.token))
        if events:
            self._send(connection, now)

    def _send(self, connection: Connection, now: float) -> None:
        try:
            connection.send(now)
        except BrokenError as error:
            self._fail(str(error), now)

    def _fail(self, why: str, now: float) -> None:
        """End the connection or the attempt, and pause before the next."""
        if self._connection is not None:
            host, port = self.address.host, self.address.port
            logger.warning("tcp connection to %s:%d lost: %s", host, port, why)
        self.close()
        self._deadline = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
