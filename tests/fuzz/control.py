# SPDX-License-Identifier: Apache-2.0
"""Both sides of an agent behind its control port, without sockets: frames go straight to the
handlers, and the clock is the script's."""

import contextlib
import itertools
import logging
import os
from collections import Counter
from collections.abc import Hashable
from typing import Any
from unittest import mock

import msgspec
from support.agents import GEOMETRY, MODEL, PAGE_TOKENS, TOKENS, WHOLE, make_layers, views

from fuzz.script import Kind, Step
from pd_connector.agent.commands import (
    Command,
    CommandQueue,
    Computed,
    Drop,
    Expect,
    Hold,
    Revoke,
    Withdraw,
)
from pd_connector.agent.consuming import dialler as dialler_module
from pd_connector.agent.engine_steps import EngineSteps
from pd_connector.agent.handshake import RankIdentity
from pd_connector.agent.loop import Loop
from pd_connector.agent.page_gate import PageGate
from pd_connector.agent.pending_outcomes import Outcome
from pd_connector.config import Config
from pd_connector.control.sockets import MAX_BATCH
from pd_connector.errors import Cause, MalformedMessageError, TransportError
from pd_connector.memory.pieces import Pieces
from pd_connector.pages.paged_cache import PagedCache
from pd_connector.protocol.consuming.incoming import Finished, Held, Load
from pd_connector.protocol.producing.outgoing import Free, Offer
from pd_connector.protocol.wire import messages
from pd_connector.protocol.wire.header import decode_header, encode_header
from pd_connector.protocol.wire.peers import Peer, Source
from pd_connector.telemetry import Telemetry
from pd_connector.transport.base import Landed, Link, Transport, Written
from pd_connector.transport.choice import Machine, choose
from pd_connector.transport.shm.address import ShmAddress
from pd_connector.transport.shm.address import read_address as read_shm
from pd_connector.transport.tcp.address import TcpAddress
from pd_connector.transport.tcp.address import read_address as read_tcp
from pd_kernels.checksum import checksum_of

EPOCH = 7
SOURCES = (Source("127.0.0.1", 9, ""), Source("127.0.0.1", 10, ""))
SENDERS = (b"reader", b"writer", b"stranger")
TRANSFERS = 4
PAUSES_S = (0.01, 0.3, 1.2, 2.5, 40.0)
PROMPT_PAGES = 4
MOST_LANDED = 1 << 20
_LONG_S = 4000.0
SETTINGS: dict[str, Any] = {
    "transports": ("shm", "tcp"),
    "slots": 4,
    "slot_mib": 1,
    "heartbeat_s": 0.5,
    "session_timeout_s": 2.0,
    "connect_timeout_s": 2.0,
    "stall_timeout_s": 1.0,
    "lease_s": 3.0,
    "wait_timeout_s": 3.0,
    "engine_timeout_s": 3600.0,
}
TCP_ADDRESS = TcpAddress("127.0.0.1", 9, b"i" * 16, b"s" * 32, 4, 1 << 20, True).encode()
SHM_ADDRESS = msgspec.msgpack.encode(ShmAddress("nobody", b"t" * 16, 4, 1 << 20, 4, 1 << 20, 1))
HELLO = messages.Hello(
    messages.SCHEMA,
    messages.OLDEST_SCHEMA,
    "peer",
    "",
    MODEL,
    GEOMETRY,
    ["raw"],
    {"tcp2": TCP_ADDRESS},
)
WELCOME = messages.Welcome(
    messages.SCHEMA, "peer", EPOCH, MODEL, GEOMETRY, ["raw"], "tcp2", TCP_ADDRESS, 1 << 20
)
READABLE_HELLO = msgspec.structs.replace(
    HELLO, transports={"shm": SHM_ADDRESS}, readable=["shm", "tcp2"]
)
READABLE_WELCOME = msgspec.structs.replace(
    WELCOME, transport="shm", transport_address=SHM_ADDRESS, read=True, direct=True
)


class ControlTarget:
    """Used for many scripts. After each one everything must be free again.

    Args:
        key: of the config; empty for none.
        greeted: whether sessions stand on both sides when a script begins.
    """

    kinds = frozenset(range(Kind.CONSUMER_SAYS, Kind.CONNECTION_BREAKS + 1))

    def __init__(self, key: str, *, greeted: bool) -> None:
        os.environ["PD_CONNECTOR_CHECK"] = "1"  # books are checked after every step
        self._greeted = greeted
        self._wires: dict[int, _Wire] = {}
        self._ended: list[Outcome] = []
        layers = make_layers(GEOMETRY, 24, 0)
        (group,) = GEOMETRY.groups
        cache = PagedCache({n: views(layer, group) for n, layer in layers.items()}, GEOMETRY)
        self._gate = PageGate()
        self._commands = CommandQueue()
        self._telemetry = Telemetry()
        self._transports: list[StillTransport] = []
        config = Config(key=key, **SETTINGS)
        self._loop = Loop(
            config,
            RankIdentity("engine", EPOCH, MODEL),
            cache,
            self._commands,
            self._gate,
            self._telemetry,
            self._ended.append,
            EngineSteps(),
            lambda: [Peer(Source("127.0.0.1", 1, "engine"), WHOLE)],
            produces=True,
            consumes=True,
            shards=(WHOLE,),
            wrap=self._wrap,
            audits=None,
            choice=choose(config, Machine(devices=(), has_nixl=False)),
        )
        self._errors = _Errors()
        self._patch = mock.patch.object(dialler_module, "Connection", self._connect)
        self._patch.start()
        assert self._loop.producer_side is not None
        listener = self._loop.producer_side._listener
        listener.send = _hear  # type: ignore[method-assign]
        self._now = 1000.0
        self._generation = itertools.count()
        self._begin()

    def begin(self) -> None:
        """Prepare for a script."""
        self._begin()
        if not self._greeted:
            return
        for which, hello in enumerate((HELLO, READABLE_HELLO)):
            self.step(Step(Kind.CONSUMER_SAYS, bytes([which]) + messages.encode(hello)))
        for which, welcome in enumerate((WELCOME, READABLE_WELCOME)):
            self._engine(bytes([6, which, which]))
            self._turn()
            self.step(Step(Kind.PRODUCER_SAYS, bytes([which]) + messages.encode(welcome)))
        self._engine(bytes([2, 2, 0]))
        self._engine(bytes([1, 3, 8]))
        self._turn()

    def step(self, step: Step) -> None:
        """Do what a step says. Raises whatever nobody should raise."""
        data = step.data or b"\0"
        first, rest = data[0], data[1:]
        match step.kind:
            case Kind.CONSUMER_SAYS:
                assert self._loop.producer_side is not None
                sender = SENDERS[first % len(SENDERS)]
                self._loop.producer_side.handle([(sender, rest)], self._now)
            case Kind.PRODUCER_SAYS:
                wire = self._wires.get(SOURCES[first % len(SOURCES)].port)
                if wire is not None:
                    self._believe(rest)
                    wire.bring(rest)
            case Kind.CHUNK_LANDS:
                self._land(first, rest)
            case Kind.WRITE_ENDS:
                for transport in self._transports:
                    transport.end_write(ok=bool(first & 1))
            case Kind.TIME_PASSES:
                self._now += PAUSES_S[first % len(PAUSES_S)]
            case Kind.ENGINE:
                self._engine(data)
            case Kind.CONNECTION_BREAKS:
                wire = self._wires.get(SOURCES[first % len(SOURCES)].port)
                if wire is not None:
                    wire.end()
        self._turn()

    def finish(self) -> None:
        """The engine wants nothing more, and time passes. Raises AssertionError if anything is
        held, or lost."""
        for transfer in range(TRANSFERS):
            self._engine(bytes([5, transfer, 0]))
            self._engine(bytes([8, transfer, 0]))
        self._turn()
        for pause_s in (0.1, _LONG_S, _LONG_S, _LONG_S):
            self._now += pause_s
            self._turn()
            for transport in self._transports:
                transport.end_write(ok=False)
        self._turn()
        gauges = {k: v for k, v in self._telemetry.gauges().items() if v and not k.startswith("fa")}
        assert not gauges, f"held: {gauges}"
        ends = Counter((type(one), one.request) for one in self._ended)
        for request in self._loads:
            assert ends[Finished, request] == 1, f"{request}: {ends[Finished, request]} ends"
        for request in self._offered:
            assert ends[Free, request] == 1, f"{request}: freed {ends[Free, request]} times"
        twice = [key for key, count in ends.items() if count > 1]
        assert not twice, f"told twice: {twice}"
        self._telemetry.take()

    def close(self) -> None:
        self._patch.stop()
        self._errors.close()
        self._loop.close()
        self._commands.close()

    def _begin(self) -> None:
        self._wires.clear()
        self._ended.clear()
        # By number of a transfer.
        self._offers: dict[int, Offer] = {}
        self._asked: dict[int, tuple[str, bool]] = {}  # the request, and whether it loads
        self._loads: set[str] = set()  # each must end once
        self._offered: set[str] = set()  # each must be freed once

    def _turn(self) -> None:
        self._loop.step(self._now)
        self._errors.check()
        for outcome in self._ended:
            match outcome:
                case Free(request):
                    self._offers = {n: o for n, o in self._offers.items() if o.request != request}
                case Finished(request) | Held(request, Cause(), _):
                    self._asked = {n: a for n, a in self._asked.items() if a[0] != request}

    def _engine(self, data: bytes) -> None:
        """A command that an engine may give now; nothing, if it would not give this one."""
        kind, which, argument = (data + bytes(3))[:3]
        number = which % TRANSFERS
        transfer, offer, asked = f"t{number}", self._offers.get(number), self._asked.get(number)
        fresh = f"{transfer} {next(self._generation)}"
        leased = offer is not None and offer.final
        match kind % 9:
            case 0:
                self._submit(Expect(transfer))
            case (1 | 2) as final if not leased:
                request = offer.request if offer else fresh
                tokens = PROMPT_PAGES * PAGE_TOKENS
                done = tokens if final == 2 else argument % (tokens + 1)
                pages = [*range(number * PROMPT_PAGES, (number + 1) * PROMPT_PAGES)]
                offer = Offer(transfer, request, (pages,), TOKENS, tokens, done, final == 2)
                self._offers[number] = offer
                self._submit(offer)
                if offer.final:
                    self._offered.add(request)
            case 3 if offer is not None and not leased:
                self._submit(Computed(transfer, offer.request, argument % 17, argument % 3 or None))
            case 4 if offer is not None and not leased:
                self._submit(Revoke(transfer, offer.request))
            case 5 if offer is not None:
                del self._offers[number]
                self._offered.discard(offer.request)
                self._submit(Withdraw(transfer, offer.request))
            case 6 if asked is None or not asked[1]:
                request = asked[0] if asked else fresh
                self._asked[number] = request, True
                self._loads.add(request)
                peers = (Peer(SOURCES[argument % 2], WHOLE),)
                stop = PROMPT_PAGES * PAGE_TOKENS
                wait = not argument & 4
                ours = ([*range(8, 8 + PROMPT_PAGES)],)
                self._submit(Load(request, transfer, peers, TOKENS, 0, stop, ours, wait))
            case 7 if asked is None:
                self._asked[number] = fresh, False
                peers = (Peer(SOURCES[argument % 2], WHOLE),)
                self._submit(Hold(fresh, transfer, peers, bool(argument & 2)))
            case 8 if asked is not None:
                del self._asked[number]
                self._submit(Drop(asked[0], Cause.ABORTED))

    def _submit(self, command: Command) -> None:
        """As `Agent.submit`."""
        if isinstance(command, Revoke | Withdraw | Drop):
            assert self._gate.shut(command.request, 0.0)
        self._commands.put(command, None)

    def _land(self, first: int, data: bytes) -> None:
        """A chunk of as many zeros as its header says, over the first transport or the second."""
        slot, honest, transport = first & 7, first & 8, self._transports[bool(first & 16)]
        payload = memoryview(b"")
        try:
            header = decode_header(data)
            payload = memoryview(bytes(min(header.nbytes, MOST_LANDED)))
            if honest:
                right = msgspec.structs.replace(header, checksum=checksum_of(payload))
                data = encode_header(right)
        except MalformedMessageError:
            pass
        verified = transport.verifies
        transport.landed.append(Landed(data, slot, payload, verified=verified))

    def _believe(self, data: bytes) -> None:
        """Pages that are offered with this message have the checksum that its header says."""
        try:
            message = messages.decode_producer_message(data)
            if isinstance(message, messages.LeftInPages):
                found = decode_header(message.header).checksum
                for transport in self._transports:
                    transport.found = found
        except MalformedMessageError:
            pass

    def _wrap(self, inner: Transport) -> Transport:
        self._transports.append(StillTransport(inner))
        return self._transports[-1]

    def _connect(self, context: Any, host: str, port: int, keys: Any) -> "_Wire":
        self._wires[port] = _Wire()
        return self._wires[port]


class StillTransport(Transport):
    """Moves nothing by itself: writes end, and chunks land, when the script says so."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner  # bound to its port, and otherwise unused
        self.name = inner.name  # type: ignore[misc]
        self.one_sided = inner.one_sided  # type: ignore[misc]
        self.copies = inner.copies  # type: ignore[misc]
        self.readable = inner.readable  # type: ignore[misc]
        self.reads_first = inner.reads_first  # type: ignore[misc]
        self.verifies = inner.verifies
        self.sends_from = inner.sends_from
        self.found = b""
        self.landed: list[Landed] = []
        self._read_address = {"shm": read_shm, "tcp2": read_tcp}.get(inner.name)
        self._numbers = itertools.count(1)
        self._writes: dict[int, Link] = {}
        self._written: list[Written] = []

    def end_write(self, *, ok: bool) -> None:
        """The oldest write ends."""
        if self._writes:
            token = next(iter(self._writes))
            del self._writes[token]
            self._written.append(Written(token, ok, "" if ok else "the script says so"))

    def address(self) -> bytes:
        return self._inner.address()

    def connect(self, consumer: bytes) -> Link:
        return self.expect(consumer)

    def disconnect(self, link: Link) -> None:
        for token in [token for token, to in self._writes.items() if to == link]:
            del self._writes[token]
            self._written.append(Written(token, False, "disconnected"))

    def expect(self, producer: bytes) -> Hashable:
        if self._read_address is not None:
            self._read_address(producer)
        return next(self._numbers)

    def dismiss(self, source: Hashable) -> None:
        return

    def write(self, link: Link, header: bytes, payload: memoryview, slot: int) -> int:
        token = next(self._numbers)
        self._writes[token] = link
        return token

    def read(self, source: Hashable, send_slot: int, nbytes: int, slot: int, header: bytes) -> None:
        if nbytes > MOST_LANDED:
            raise TransportError("more than a slot")
        self.landed.append(Landed(header, slot, memoryview(bytes(nbytes))))

    def direct(self, source: Hashable) -> bool:
        return self.readable

    def pull(self, source: Hashable, theirs: Pieces, ours: Pieces) -> bytes:
        return self.found

    def poll(self) -> tuple[list[Written], list[Landed]]:
        written, self._written = self._written, []
        landed, self.landed = self.landed, []
        return written, landed

    @property
    def pollables(self) -> list[object]:
        return []

    @property
    def restless(self) -> bool:
        return False

    def close(self) -> None:
        self._inner.close()


class _Wire:
    """Stands for a control connection to a producer (`control.sockets.Connection`)."""

    is_unanswered = False

    def __init__(self) -> None:
        self.socket, self.monitor = _Bell(), _Bell()
        self._waiting: list[bytes] = []
        self._ended = False

    def bring(self, data: bytes) -> None:
        """A message arrives."""
        self._waiting.append(data)
        self.socket.ring()

    def end(self) -> None:
        """The connection breaks."""
        self._ended = True
        self.monitor.ring()

    def receive(self, most: int = MAX_BATCH) -> list[bytes]:
        taken, self._waiting = self._waiting[:most], self._waiting[most:]
        if not self._waiting:
            self.socket.silence()
        return taken

    def lost(self) -> tuple[Cause, str] | None:
        return (Cause.SESSION_LOST, "the script says so") if self._ended else None

    def send(self, data: bytes) -> bool:
        messages.decode_consumer_message(data)  # what we say fits the schema, too
        return True

    def close(self) -> None:
        self.socket.close()
        self.monitor.close()


def _hear(_: bytes, data: bytes) -> bool:
    """Stands for `Listener.send`: senders are made up, and hear everything."""
    messages.decode_producer_message(data)  # what we say fits the schema, too
    return True


class _Bell:
    """A descriptor, where a ZeroMQ socket would be."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK)
        self._open = True

    def getsockopt(self, option: int) -> int:
        return self._descriptor

    def ring(self) -> None:
        if self._open:
            os.eventfd_write(self._descriptor, 1)

    def silence(self) -> None:
        """Nothing waits any more."""
        if self._open:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        if self._open:
            self._open = False
            os.close(self._descriptor)


class _Errors(logging.Handler):
    """Raises again what an agent has caught and logged as unexpected."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._caught: BaseException | None = None
        self._logger = logging.getLogger("pd_connector")
        self._level = self._logger.level
        self._logger.setLevel(logging.ERROR)
        self._logger.addHandler(self)
        self._logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1]:
            self._caught = record.exc_info[1]

    def check(self) -> None:
        caught, self._caught = self._caught, None
        if caught is not None:
            raise caught

    def close(self) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)
        self._logger.propagate = True
        super().close()
