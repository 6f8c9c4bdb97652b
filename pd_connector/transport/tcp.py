# SPDX-License-Identifier: Apache-2.0
"""The embedded transport: ZeroMQ over TCP, encrypted when a key is set. Needs nothing installed.

The producer listens (ROUTER), each consumer dials it (DEALER), so that only producers need
reachable ports. A payload arrives in memory of its own; the slot it names is only a credit.
"""

import secrets
from collections import deque
from collections.abc import Callable, Hashable

import msgspec
import zmq

from pd_connector.errors import TransportError
from pd_connector.network import bound_port, endpoint, numeric, readable
from pd_connector.security import CurveKeys
from pd_connector.transport.base import Landed, Route, Transport, Written

_GREETING = b"\x00pd-tcp"
_MAX_GREETING_BYTES = 4096  # ZeroMQ's own handshake counts against it
_MAX_HEADER_BYTES = 1 << 16
# Greetings of consumers whose session has not reached us yet; a flood drops the oldest.
_MAX_EARLY_GREETINGS = 1024


class TcpTransport(Transport):
    """See the module.

    Args:
        context: of the agent, whose gatekeeper checks keys.
        host: name or address to listen on and to tell peers.
        slot_bytes: the most a consumer accepts in one message.
        permits: whether a host may be dialled (`Config.permits`).
        keys: encrypt and authenticate with these; None for plaintext.
    """

    name = "tcp"
    one_sided = False

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        slot_bytes: int,
        permits: Callable[[str], bool],
        keys: CurveKeys | None = None,
    ) -> None:
        self._context = context
        self._keys = keys
        self._slot_bytes = slot_bytes
        self._permits = permits
        self._host = host
        self._identity = secrets.token_bytes(16)
        self._tokens = 0
        self._written: list[Written] = []
        self._routes: dict[bytes, deque[list[bytes | memoryview]]] = {}
        self._greeted: dict[bytes, None] = {}
        self._sources: dict[tuple[str, int], zmq.Socket[bytes]] = {}
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

    def connect(self, consumer: bytes) -> Route:
        _, _, identity = _read_address(consumer)
        self._routes[identity] = deque()
        return identity

    def disconnect(self, route: Route) -> None:
        assert isinstance(route, bytes)
        self._routes.pop(route, None)
        self._greeted.pop(route, None)

    def expect(self, producer: bytes) -> Hashable:
        host, port, _ = _read_address(producer)
        if not self._permits(host):
            raise TransportError(f"tcp transport: {host!r} is not loopback and no key is set")
        if (host, port) in self._sources:
            return host, port
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.rcvhwm = 0
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
        socket.send(_GREETING)
        self._sources[host, port] = socket
        return host, port

    def dismiss(self, source: Hashable) -> None:
        assert isinstance(source, tuple)
        socket = self._sources.pop(source, None)
        if socket is not None:
            socket.close()

    def write(self, route: Route, header: bytes, payload: memoryview, slot: int) -> int:
        assert isinstance(route, bytes)
        if route not in self._routes:
            raise TransportError("tcp transport: no such consumer (any more)")
        frames: list[bytes | memoryview] = [header, slot.to_bytes(4, "little"), payload]
        self._tokens += 1
        if route in self._greeted:
            self._send(route, self._tokens, frames)
        else:  # the consumer's dial has not arrived; a ROUTER would drop the message
            self._routes[route].append([*frames[:2], bytes(payload)])
            self._written.append(Written(self._tokens, True, ""))
        return self._tokens

    def poll(self) -> tuple[list[Written], list[Landed]]:
        self._take_greetings()
        landed: list[Landed] = []
        for socket in self._sources.values():
            while readable(socket):
                frames = socket.recv_multipart(copy=False)
                if len(frames) == 3 and len(frames[1].buffer) == 4:
                    slot = int.from_bytes(frames[1].bytes, "little")
                    landed.append(Landed(frames[0].bytes, slot, frames[2].buffer))
        written, self._written = self._written, []
        return written, landed

    @property
    def pollables(self) -> list[object]:
        return [self._listener, *self._sources.values()]

    @property
    def restless(self) -> bool:
        return False

    def close(self) -> None:
        for socket in (self._listener, *self._sources.values()):
            socket.close()
        self._sources.clear()
        self._routes.clear()

    def _take_greetings(self) -> None:
        while readable(self._listener):
            identity, *frames = self._listener.recv_multipart()
            if frames != [_GREETING]:
                continue
            self._greeted[identity] = None
            if len(self._greeted) > len(self._routes) + _MAX_EARLY_GREETINGS:
                self._greeted.pop(next(i for i in self._greeted if i not in self._routes))
            for waiting in self._routes.get(identity, ()):
                self._send(identity, None, waiting)
            if identity in self._routes:
                self._routes[identity].clear()

    def _send(self, route: bytes, token: int | None, frames: list[bytes | memoryview]) -> None:
        ok, detail = True, ""
        try:
            # Copied by ZeroMQ: one memcpy buys a send slot that is free at once.
            self._listener.send_multipart([route, *frames], flags=zmq.DONTWAIT)
        except zmq.ZMQError as error:
            ok, detail = False, f"tcp write: {error}"
        if token is not None:
            self._written.append(Written(token, ok, detail))


def _read_address(address: bytes) -> tuple[str, int, bytes]:
    try:
        return msgspec.msgpack.decode(address, type=tuple[str, int, bytes])
    except msgspec.DecodeError as error:
        raise TransportError(f"tcp address of a peer cannot be read: {error}") from None
