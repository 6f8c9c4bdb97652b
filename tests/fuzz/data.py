# SPDX-License-Identifier: Apache-2.0
"""The data path of `tcp`, and the lobby of shared memory: real sockets, whose other end is the script."""

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Callable
from unittest import mock

from fuzz.script import Kind, Step
from pd_connector.hosts import is_loopback
from pd_connector.memory.pins import Pins
from pd_connector.memory.slab import Slab
from pd_connector.transport.shm.address import ShmAddress
from pd_connector.transport.shm.consumer_half import ConsumerHalf
from pd_connector.transport.tcp import transport as transport_module
from pd_connector.transport.tcp.address import TcpAddress, read_address
from pd_connector.transport.tcp.cipher import Handshake, dial_code
from pd_connector.transport.tcp.frames import (
    ANSWER_BYTES,
    DIAL_BYTES,
    GREET,
    DialFrame,
    prefix,
    read_answer,
    read_dial,
)
from pd_connector.transport.tcp.sealing import Opener, Sealer
from pd_connector.transport.tcp.transport import TcpTransport

SLOTS, SLOT_BYTES = 2, 1 << 14
PAUSES_S = (0.02, 0.5, 2.0, 6.0)
_MOST_TURNS = 50
_NONCE = bytes(32)


class TcpTarget:
    """One transport, which is dialled by a consumer and dials a producer: both are the script.

    Args:
        shared: secret of all engines; empty without a key.
        greeted: whether both connections stand when the first step comes.
        sums: whether, without a key, the script's records have checksums.
    """

    kinds = frozenset(range(Kind.DIAL, Kind.LISTENER_RECORD + 1)) | {Kind.TIME_PASSES}

    def __init__(self, shared: bytes, *, greeted: bool, sums: bool) -> None:
        self._shared = shared
        self._greeted = greeted
        self._clock = _Clock()
        self._patch = mock.patch.object(transport_module, "time", self._clock)
        self._patch.start()
        self._landing = Slab(SLOTS, SLOT_BYTES)
        self._sending = Slab(SLOTS, SLOT_BYTES)
        self._transport = TcpTransport(
            self._landing, self._sending, "127.0.0.1", is_loopback, shared
        )
        self._ours = read_address(self._transport.address())
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(1.0)
        ends = SLOTS, SLOT_BYTES, self._ours.fast_aes
        port = self._server.getsockname()[1]
        self._consumer, self._producer = (
            TcpAddress("127.0.0.1", at, name * 16, b"s" * 32, *ends, sums=sums)
            for at, name in ((9, b"c"), (port, b"p"))
        )

    def begin(self) -> None:
        """Nothing is dialled before a step needs it."""
        self._descriptors = len(os.listdir("/proc/self/fd"))
        self._dialler: socket.socket | None = None
        self._listener: socket.socket | None = None
        self._to_producer: Sealer | None = None
        self._to_consumer: Sealer | None = None
        self._link = self._source = None
        self._strangers: list[socket.socket] = []

    def step(self, step: Step) -> None:
        """Raises whatever nobody should raise."""
        first, rest = (step.data or b"\0")[0], step.data[1:]
        match step.kind:
            case Kind.DIAL:
                self._dial(rest, right=bool(first & 1))
            case Kind.DIALLER_SENDS:
                self._send(self._dialled(), step.data)
            case Kind.DIALLER_RECORD:
                sock = self._dialled()
                self._send(sock, _record(self._to_producer, first % 8, rest))
                self._write(first)
            case Kind.LISTENER_SENDS:
                self._send(self._accepted(), step.data)
            case Kind.LISTENER_RECORD:
                sock = self._accepted()
                self._send(sock, _record(self._to_consumer, first % 8, rest))
            case Kind.TIME_PASSES:
                self._clock.now += PAUSES_S[first % len(PAUSES_S)]
        self._turn()

    def finish(self) -> None:
        """Both sessions end. Raises AssertionError if anything is left."""
        if self._link is not None:
            self._transport.disconnect(self._link)
        if self._source is not None:
            self._transport.dismiss(self._source)
        for sock in (self._dialler, self._listener, *self._strangers):
            if sock is not None:
                sock.close()
        for _ in range(2):
            self._clock.now += 10.0
            self._turn()
        with contextlib.suppress(BlockingIOError):
            self._server.setblocking(False)
            while True:
                self._server.accept()[0].close()
        self._server.settimeout(1.0)
        landing = self._transport._landing
        assert len(landing._free) == SLOTS, f"landing slots: {len(landing._free)} free"
        assert not self._transport._listening._pending, "pending connections are left"
        assert not self._transport._peers, "peers are left"
        found = len(os.listdir("/proc/self/fd"))
        assert found <= self._descriptors, f"{found} descriptors, before {self._descriptors}"

    def close(self) -> None:
        self._patch.stop()
        self._transport.close()
        self._server.close()

    def _turn(self) -> None:
        for _ in range(_MOST_TURNS):
            written, landed = self._transport.poll()
            if not (written or landed):
                return

    def _dial(self, data: bytes, *, right: bool) -> None:
        """A stranger, who sends these bytes behind, or instead of, a right dial of somebody whom no
        session has connected."""
        sock = socket.create_connection(("127.0.0.1", self._ours.port))
        self._strangers.append(sock)
        if right:
            dial = DialFrame(b"n" * 16, self._ours.identity, _NONCE)
            data = dial.encode() + dial_code(self._shared, self._ours, dial) + data
        self._send(sock, data)

    def _dialled(self) -> socket.socket:
        """A consumer's connection to the transport: proven, if the script begins with that."""
        if self._dialler is None:
            self._link = self._transport.connect(self._consumer.encode())
            self._dialler = socket.create_connection(("127.0.0.1", self._ours.port))
            if self._greeted:
                dial = DialFrame(self._consumer.identity, self._ours.identity, _NONCE)
                code = dial_code(self._shared, self._ours, dial)
                self._send(self._dialler, dial.encode() + code)
                self._turn()
                nonce, _ = read_answer(_receive(self._dialler, ANSWER_BYTES))
                ends = self._shared, self._consumer, self._ours, dial, nonce
                self._to_producer = self._sealer(Handshake(*ends), Handshake.dialler_seals)
                self._send(self._dialler, _record(self._to_producer, GREET, b""))
                self._turn()
        return self._dialler

    def _accepted(self) -> socket.socket:
        """The transport's connection to a producer: answered, if the script begins with that."""
        if self._listener is None:
            self._source = self._transport.expect(self._producer.encode())
            self._turn()
            self._listener = self._server.accept()[0]
            if self._greeted:
                dial, _ = read_dial(_receive(self._listener, DIAL_BYTES))
                ends = self._shared, self._ours, self._producer, dial, _NONCE
                handshake = Handshake(*ends)
                self._send(self._listener, handshake.answer())
                self._to_consumer = self._sealer(handshake, Handshake.listener_seals)
                self._turn()
        return self._listener

    def _sealer(
        self, handshake: Handshake, seals: Callable[[Handshake], tuple[Sealer, Opener]]
    ) -> Sealer | None:
        return seals(handshake)[0] if handshake.sealed else None

    def _write(self, number: int) -> None:
        """So that there is something to acknowledge."""
        with contextlib.suppress(transport_module.TransportError):
            payload = self._sending.slot(0, 1 + number)
            self._transport.write(self._link, b"header", payload, number % (SLOTS + 1))

    def _send(self, sock: socket.socket, data: bytes) -> None:
        with contextlib.suppress(OSError):  # the transport has hung up
            sock.sendall(data)


class ShmTarget:
    """A consumer's half of shared memory, whose lobby anybody of this user can enter.

    Args:
        greeted: whether the token is one that is expected.
    """

    kinds = frozenset((Kind.LOBBY, Kind.NOTE))

    def __init__(self, *, greeted: bool) -> None:
        self._greeted = greeted
        self._landing = Slab(SLOTS, SLOT_BYTES, shared=True)
        self._theirs = Slab(SLOTS, SLOT_BYTES, shared=True)
        self._half = ConsumerHalf(self._landing, Pins(None))  # type: ignore[arg-type]
        self._tokens = itertools.count()

    def begin(self) -> None:
        self._descriptors = len(os.listdir("/proc/self/fd"))
        self._links: list[socket.socket] = []
        self._token = next(self._tokens).to_bytes(16, "little")
        slots = SLOTS, SLOT_BYTES
        address = ShmAddress("nobody", self._token, *slots, *slots)
        self._source = self._half.expect(address) if self._greeted else None

    def step(self, step: Step) -> None:
        """Raises whatever nobody should raise."""
        first, rest = (step.data or b"\0")[0], step.data[1:]
        if step.kind is Kind.LOBBY or not self._links:
            link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._links.append(link)
            link.connect(f"\0{self._half.listener_name}")
            descriptor = self._theirs.handle if first & 4 else self._landing.handle
            said = self._token if first & 8 else rest or b"\0"
            with contextlib.suppress(OSError):
                socket.send_fds(link, [said], [descriptor] * (first & 3))
        else:
            with contextlib.suppress(OSError):
                self._links[-1].send(step.data)
        if self._source is not None and first & 16:
            with contextlib.suppress(transport_module.TransportError):
                self._half.read(self._source, first & 1, len(rest), first & 1, b"header")
        for _ in range(2):
            for landed in self._half.poll():
                bytes(landed.payload)

    def finish(self) -> None:
        """Raises AssertionError if anything is left."""
        for link in self._links:
            link.close()
        self._half.poll()
        if self._source is not None:
            self._half.dismiss(self._source)
        self._half.poll()
        assert not self._half._producers, "producers are left"
        assert not self._half._listener._pending, "pending connections are left"
        found = len(os.listdir("/proc/self/fd"))
        assert found <= self._descriptors, f"{found} descriptors, before {self._descriptors}"

    def close(self) -> None:
        self._half.close()
        self._landing.close()
        self._theirs.close()


class _Clock:
    """Stands for the module `time` in the transport."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def monotonic(self) -> float:
        return self.now


def _record(sealer: Sealer | None, kind: int, body: bytes) -> bytes:
    return sealer.record(kind, body) if sealer else prefix(kind, len(body)) + body


def _receive(sock: socket.socket, nbytes: int) -> bytes:
    sock.settimeout(5.0)
    data = b""
    while len(data) < nbytes:
        got = sock.recv(nbytes - len(data))
        assert got, "the transport has hung up"
        data += got
    return data
