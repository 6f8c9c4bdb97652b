# SPDX-License-Identifier: Apache-2.0
"""One connection that stands: records both ways, heartbeats, and how its silence is noticed."""

import socket
from typing import NamedTuple

from pd_connector.control.liveness import UNANSWERED, is_unanswered
from pd_connector.transport.keepalive import keep_alive
from pd_connector.transport.tcp.events import Event
from pd_connector.transport.tcp.frames import PING, RECORD_BYTES, FrameError
from pd_connector.transport.tcp.landing import Landing
from pd_connector.transport.tcp.receiving import Receiving
from pd_connector.transport.tcp.sealing import Opener, Sealer
from pd_connector.transport.tcp.segments import Segments
from pd_connector.transport.tcp.sending import Sending
from pd_connector.transport.tcp.watch import Owner, Watch


class BrokenError(Exception):
    """The connection has ended; the message says why."""


class Pace(NamedTuple):
    """How often a side speaks, and what silence means, in seconds."""

    heartbeat_s: float  # send a `PING` after this time without anything to say
    silence_s: float  # the connection is dead after this time without a byte from the peer


class Common(NamedTuple):
    """What all connections of a transport share."""

    watch: Watch
    segments: Segments
    pace: Pace


class Connection:
    """Its socket is non-blocking and watched on behalf of `owner`.

    Args:
        seals: seals of this side's records, and of the peer's; None where they have no tags.
        landing: where chunks land; None on the side that sends them.
        record_bytes: the largest sealed body that the peer opens.
    """

    def __init__(
        self,
        sock: socket.socket,
        common: Common,
        owner: Owner,
        seals: tuple[Sealer, Opener] | None,
        landing: Landing | None,
        record_bytes: int,
        now: float,
    ) -> None:
        sealer, opener = seals or (None, None)
        self.sending = Sending(sock, sealer, common.segments, min(record_bytes, RECORD_BYTES))
        self._receiving = Receiving(sock, opener, landing, common.segments)
        self._sock = sock
        self._watch = common.watch
        self._owner = owner
        self._pace = common.pace
        self._said = self._heard = now
        self._wish()

    def exchange(self, now: float) -> list[Event]:
        """Send and take what the socket allows. Raises BrokenError."""
        try:
            taken, events = self._receiving.receive()
        except (OSError, FrameError) as error:
            raise BrokenError(str(error)) from None
        if taken or self._receiving.paused:  # nothing arrives while we do not read
            self._heard = now
        self.send(now)
        return events

    def send(self, now: float) -> None:
        """Send what the socket takes. Raises BrokenError."""
        try:
            if self.sending.pump():
                self._said = now
        except OSError as error:
            raise BrokenError(str(error)) from None
        self._wish()

    def tick(self, now: float) -> None:
        """Send a heartbeat if nothing was sent lately. Raises BrokenError if nothing has arrived for too long, or the
        peer's machine does not acknowledge what was sent."""
        if self._heard + self._pace.heartbeat_s < now and self._receiving.grows():
            self._heard = now  # part of a slow record, which no caller has seen yet
        if self._heard + self._pace.silence_s < now:
            raise BrokenError(f"no data has come for {now - self._heard:.1f} s")
        if self._heard < self._said and self._is_unanswered():
            raise BrokenError(UNANSWERED)
        if self._said + self._pace.heartbeat_s <= now and not self.sending.busy:
            self.sending.say(PING)
            self.send(now)

    def _is_unanswered(self) -> bool:
        try:
            return is_unanswered(self._sock)
        except OSError as error:
            raise BrokenError(str(error)) from None

    def close(self) -> None:
        self._receiving.close()
        self._watch.close_socket(self._sock)

    def _wish(self) -> None:
        read, write = not self._receiving.paused, self.sending.busy
        self._watch.wish(self._sock, self._owner, read=read, write=write)


def tune(sock: socket.socket, pace: Pace) -> None:
    """Options of every data socket: no delay, and the system's own checks whether the peer is there."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(sock)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(pace.silence_s * 1000))
