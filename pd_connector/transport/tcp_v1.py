# SPDX-License-Identifier: Apache-2.0
"""What the previous release calls `tcp`: ZeroMQ over TCP, encrypted when a key is set.

It is offered behind `TcpTransport` for peers of that release, which know no other, so that engines
can be upgraded one by one. The next version of the wire schema removes it: this file, its lines in
`registry.py`, and its tests.

The producer listens (ROUTER), each consumer dials it (DEALER), so that only producers need
reachable ports. A payload arrives in memory of its own; the slot it names is only a credit.
"""

import contextlib
import itertools
import secrets
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import zmq

from pd_connector.control.addresses import bound_port, endpoint, numeric, readable
from pd_connector.control.keys import CurveKeys
from pd_connector.errors import TransportError
from pd_connector.transport.base import Landed, Link, Transport, Written

_GREETING = b"\x00pd-tcp"
_MAX_GREETING_BYTES = 4096  # ZeroMQ's own handshake counts against it
_MAX_HEADER_BYTES = 1 << 16
# Chunks taken from one producer at a time, and chunks that may wait to be taken: a producer that
# floods us takes neither all our time nor all our memory.
_MAX_BATCH = 64
# Greetings of consumers whose session has not reached us yet; a flood drops the oldest.
_MAX_EARLY_GREETINGS = 1024

_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
_Frames = list[bytes | memoryview]


@dataclass(slots=True)
class _Consumer:
    """One `connect`. A consumer whose session broke may be connected twice for a while."""

    identity: bytes
    greeted: bool  # its dial has arrived, so that a ROUTER knows where to send
    waiting: list[_Frames] = field(default_factory=list)


class TcpV1Transport(Transport):
    """See the module.

    Args:
        context: of the agent, whose gatekeeper checks keys.
        slot_bytes: the most a consumer accepts in one message.
        host: name or address to listen on and to tell peers.
        permits: whether a host may be dialled (`Config.permits`).
        keys: encrypt and authenticate with these; None for plaintext.
    """

    name = "tcp"  # on the wire
    one_sided = False
    copies = True

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        slot_bytes: int,
        host: str,
        permits: Callable[[str], bool],
        keys: CurveKeys | None = None,
    ) -> None:
        self._context = context
        self._keys = keys
        self._slot_bytes = slot_bytes
        self._permits = permits
        self._host = host
        self._identity = secrets.token_bytes(16)
        self._numbers = itertools.count(1)  # of writes, routes and sources
        self._written: list[Written] = []
        self._routes: dict[int, _Consumer] = {}
        self._early: dict[bytes, None] = {}
        self._expected: dict[int, tuple[str, int]] = {}
        self._sockets: dict[tuple[str, int], zmq.Socket[bytes]] = {}
        self._listener = context.socket(zmq.ROUTER)
        self._listener.linger = 0
        self._listener.sndhwm = 0  # bounded by the slots that consumers grant
        self._listener.router_mandatory = True
        self._listener.router_handover = True  # a consumer that redials keeps its identity
        self._listener.ipv6 = True
        self._listener.maxmsgsize = _MAX_GREETING_BYTES
        if keys:
            keys.guard(self._listener)
        try:
            self._listener.bind(endpoint(numeric(host), "*"))
        except (zmq.ZMQError, OSError) as error:
            self._listener.close()
            raise TransportError(f"tcp transport cannot listen on {host!r}: {error}") from error
        self._port = bound_port(self._listener)

    def address(self) -> bytes:
        return msgspec.msgpack.encode((self._host, self._port, self._identity))

    def connect(self, consumer: bytes) -> Link:
        _, _, identity = _read_address(consumer)
        # A greeting opens the routes that wait for it, or the next one. A greeting that has
        # opened a route opens no later one: its dial may have ended since.
        greeted = identity in self._early
        self._early.pop(identity, None)
        route = next(self._numbers)
        self._routes[route] = _Consumer(identity, greeted)
        return route

    def disconnect(self, route: Link) -> None:
        assert isinstance(route, int)
        self._routes.pop(route, None)

    def expect(self, producer: bytes) -> Hashable:
        host, port, _ = _read_address(producer)
        if not self._permits(host):
            raise TransportError(f"tcp transport: {host!r} is not loopback and no key is set")
        socket = self._sockets.get((host, port)) or self._dial(host, port)
        with contextlib.suppress(zmq.Again):
            socket.send(_GREETING, flags=zmq.DONTWAIT)
        source = next(self._numbers)
        self._expected[source] = host, port
        return source

    def dismiss(self, source: Hashable) -> None:
        assert isinstance(source, int)
        dialled = self._expected.pop(source, None)
        if dialled is not None and dialled not in self._expected.values():
            self._sockets.pop(dialled).close()

    def write(self, route: Link, header: bytes, payload: memoryview, slot: int) -> int:
        assert isinstance(route, int)
        consumer = self._routes.get(route)
        if consumer is None:
            raise TransportError("tcp transport: no such consumer (any more)")
        if slot >= 1 << 32:
            raise TransportError(f"tcp transport: slot {slot} is none of the consumer's")
        frames: _Frames = [header, slot.to_bytes(4, "little"), payload]
        token = next(self._numbers)
        problem = self._send(consumer, frames)
        self._written.append(Written(token, not problem, problem))
        return token

    def poll(self) -> tuple[list[Written], list[Landed]]:
        self._take_greetings()
        landed: list[Landed] = []
        for socket in self._sockets.values():
            for _ in range(_MAX_BATCH):
                if not readable(socket):
                    break
                frames = socket.recv_multipart(copy=False)
                if len(frames) == 3 and len(frames[1].buffer) == 4:
                    slot = int.from_bytes(frames[1].bytes, "little")
                    landed.append(Landed(frames[0].bytes, slot, frames[2].buffer))
        written, self._written = self._written, []
        return written, landed

    @property
    def pollables(self) -> list[object]:
        return [self._listener, *self._sockets.values()]

    @property
    def restless(self) -> bool:
        return False

    def close(self) -> None:
        for socket in (self._listener, *self._sockets.values()):
            socket.close()
        self._sockets.clear()
        self._expected.clear()
        self._routes.clear()

    def _dial(self, host: str, port: int) -> zmq.Socket[bytes]:
        try:
            socket = self._context.socket(zmq.DEALER)
        except zmq.ZMQError as error:  # no descriptor is left
            raise TransportError(f"tcp transport cannot dial {host}:{port}: {error}") from error
        socket.linger = 0
        socket.rcvhwm = _MAX_BATCH
        socket.ipv6 = True
        socket.routing_id = self._identity
        socket.maxmsgsize = self._slot_bytes + _MAX_HEADER_BYTES
        if self._keys:
            self._keys.present(socket)
        try:
            socket.connect(endpoint(host, port))
        except zmq.ZMQError as error:
            socket.close()
            raise TransportError(f"tcp transport cannot dial {host}:{port}: {error}") from error
        self._sockets[host, port] = socket
        return socket

    def _take_greetings(self) -> None:
        for _ in range(_MAX_EARLY_GREETINGS):
            if not readable(self._listener):
                break
            identity, *frames = self._listener.recv_multipart()
            if frames != [_GREETING]:
                continue
            new = [c for c in self._routes.values() if c.identity == identity and not c.greeted]
            for consumer in new:
                consumer.greeted = True
                waiting, consumer.waiting = consumer.waiting, []
                for message in waiting:
                    self._send(consumer, message)
            if not new:
                self._early[identity] = None
                if len(self._early) > _MAX_EARLY_GREETINGS:
                    del self._early[next(iter(self._early))]

    def _send(self, consumer: _Consumer, frames: _Frames) -> str:
        """Send, now or when the consumer's dial has arrived, or say why that is not possible."""
        if consumer.greeted:
            try:
                # Copied by ZeroMQ: one memcpy buys a send slot that is free at once.
                self._listener.send_multipart([consumer.identity, *frames], flags=zmq.DONTWAIT)
                return ""
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    return f"tcp write: {error}"
                # The greeting was that of a dial that has ended; the next one brings its own. A
                # consumer that is gone for good is noticed by its session.
                consumer.greeted = False
        consumer.waiting.append([*frames[:2], bytes(frames[2])])
        return ""


def _read_address(address: bytes) -> tuple[str, int, bytes]:
    """Host, port and identity in a peer's `address()`."""
    try:
        host, port, identity = msgspec.msgpack.decode(address, type=tuple[str, _Port, bytes])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TransportError(f"tcp address of a peer cannot be read: {error}") from None
    return host, port, identity
