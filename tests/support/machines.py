# SPDX-License-Identifier: Apache-2.0
"""Ranks of a producer and ranks of consumers joined by queues instead of sockets.

Nothing moves unless a test moves it: control messages keep their order within a session, chunks
overtake everything. Caches are dictionaries of `(page, layer, head)`, pages and slots are lent
again as soon as they are free, so that whatever comes late finds someone else in its place, and
what is not computed yet, or no longer the request's own, holds noise.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pd_connector.config import Config
from pd_connector.errors import Cause
from pd_connector.kv.geometry import Geometry, Group, Shard, pages_for
from pd_connector.memory.slab import SlotPool
from pd_connector.plan.route import Route, routes
from pd_connector.protocol.consuming.consumer import Consumer
from pd_connector.protocol.consuming.incoming import Action as ConsumerAction
from pd_connector.protocol.consuming.incoming import (
    Dial,
    Finished,
    Held,
    IncomingChunk,
    Load,
    ProducerSession,
    Tell,
)
from pd_connector.protocol.producing.outgoing import Action as ProducerAction
from pd_connector.protocol.producing.outgoing import Free, Offer, OutgoingChunk
from pd_connector.protocol.producing.producer import Producer
from pd_connector.protocol.wire import messages
from pd_connector.protocol.wire.header import ChunkHeader
from pd_connector.protocol.wire.peers import Peer, Source
from pd_kernels.checksum import checksum_of

LAYERS, HEADS, PAGE_TOKENS, TOKEN_BYTES = 2, 2, 2, 4
PRODUCER_PAGES, CONSUMER_PAGES = 60, 40
NOISE = b"\xff" * TOKEN_BYTES

WHOLE = Shard(0, LAYERS, 0, 1)
HALVES = (Shard(0, LAYERS, 0, 2), Shard(0, LAYERS, 1, 2))
STAGES = (Shard(0, 1, 0, 1), Shard(1, LAYERS, 0, 1))


def geometry_of(shard: Shard) -> Geometry:
    """Pages of two tokens, four bytes a token and head."""
    layers = tuple(range(shard.first_layer, shard.stop_layer))
    group = Group("attention", layers, HEADS, 1, 0, PAGE_TOKENS, 0, "float32", "test", True)
    return Geometry(shard, (group,))


def routes_of(source: Shard, destination: Shard) -> tuple[Route, ...]:
    return routes(geometry_of(source), geometry_of(destination), ("raw",), ("raw",))


GEOMETRY = geometry_of(WHOLE)
ROUTES = routes_of(WHOLE, WHOLE)


class SmallConfig(Config, frozen=True, kw_only=True):
    """Slots of four pages of one layer, so that a few pages make several chunks."""

    @property
    def slot_bytes(self) -> int:
        return 4 * HEADS * PAGE_TOKENS * TOKEN_BYTES


CONFIG = SmallConfig(slots=3)


def identity_of(transfer: str) -> bytes:
    return b"tokens of " + transfer.encode()


def content(tag: int, token: int, layer: int, head: int) -> bytes:
    """KV of one token in one head of one layer: no two of any two prompts are alike."""
    return bytes((tag, token, layer, head))


FALSE_FIELDS: dict[str, Any] = {
    "transfer": "transfer9",
    "epoch": 77,
    "sequence": 900,
    "identity": b"other tokens",
    "route": 1,
    "first_layer": 1,
    "stop_layer": 7,
    "first_token": 5,
    "stop_token": 2**40,
    "codec": "int8",
    "nbytes": 2**40,
    "checksum": b"",
}
"""For each field of a chunk's header a value that is not the wanted one."""


@dataclass
class Flight:
    """A chunk that has left the producer and not landed yet."""

    link: "Link"
    header: ChunkHeader
    payload: bytes
    slot: int


@dataclass
class Write:
    """A write whose end the producer has not been told of."""

    rank: "Rank"
    session: bytes
    transfer: str


@dataclass
class Prefill:
    """A request of one producer rank that computes KV, or has left it to be fetched."""

    transfer: str
    request: str
    tag: int
    tokens: int
    pages: list[int]
    computed: int = 0  # tokens, in all layers
    step: tuple[int, int] | None = None  # tokens that are being computed, layers done so far
    final: bool = False


@dataclass
class Rank:
    """One rank of the producer, and its cache."""

    shard: Shard
    source: Source
    producer: Producer
    epoch: int
    memory: dict[tuple[int, int, int], bytes] = field(default_factory=dict)
    free_pages: deque[int] = field(default_factory=lambda: deque(range(PRODUCER_PAGES)))
    prefills: dict[str, Prefill] = field(default_factory=dict)
    freed: dict[str, Cause | None] = field(default_factory=dict)
    ghosts: list[bytes] = field(default_factory=list)  # sessions whose loss it has not noticed

    def fill(self, prefill: Prefill, tokens: int, stop_layer: int) -> None:
        """Compute KV of the first `tokens` tokens in the layers below `stop_layer`."""
        for i, page in enumerate(prefill.pages):
            span = range(i * PAGE_TOKENS, (i + 1) * PAGE_TOKENS)
            for layer in range(self.shard.first_layer, min(stop_layer, self.shard.stop_layer)):
                for head in self.shard.heads(HEADS):
                    self.memory[page, layer, head] = b"".join(
                        content(prefill.tag, t, layer, head) if t < tokens else NOISE for t in span
                    )

    def give_back(self, pages: Sequence[int]) -> None:
        """Pages go to someone else, who fills them at once."""
        self.free_pages.extend(pages)
        for page, layer, head in self.memory:
            if page in pages:
                self.memory[page, layer, head] = NOISE * PAGE_TOKENS


@dataclass
class Lent:
    """A load's pages, from its start until it failed or was retired."""

    load: Load
    tag: int
    arrived: bool = False


@dataclass
class Line:
    """The control connection of a consumer rank with a producer rank."""

    rank: Rank
    session: bytes | None = None
    dialling: bool = False
    to_producer: deque[messages.ConsumerMessage] = field(default_factory=deque)
    to_consumer: deque[messages.ProducerMessage] = field(default_factory=deque)


@dataclass
class Link:
    """One consumer rank, its cache, its slots and its lines."""

    name: str
    shard: Shard
    consumer: Consumer
    pool: SlotPool
    slots: list[bytearray]
    lines: list[Line]
    cache: dict[tuple[int, int, int], bytes] = field(default_factory=dict)
    free_pages: deque[int] = field(default_factory=lambda: deque(range(CONSUMER_PAGES)))
    lent: dict[str, Lent] = field(default_factory=dict)
    finished: dict[str, Finished] = field(default_factory=dict)
    watching: set[str] = field(default_factory=set)
    held: dict[str, Held] = field(default_factory=dict)

    @property
    def line(self) -> Line:
        return self.lines[0]

    @property
    def received(self) -> list[str]:
        """Requests whose pages all arrived."""
        return [r for r, finished in self.finished.items() if finished.cause is None]

    def line_to(self, source: Source) -> Line:
        return next(line for line in self.lines if line.rank.source == source)


class World:
    """See the module. Every step asserts what must hold at any time.

    Args:
        consumers: engines that consume, each of ranks with these `shards`.
        sources: what the producer's ranks hold.
    """

    def __init__(
        self,
        consumers: int = 1,
        *,
        sources: Sequence[Shard] = (WHOLE,),
        shards: Sequence[Shard] = (WHOLE,),
        config: Config = CONFIG,
        one_sided: bool = True,
        writes_late: bool = False,
    ) -> None:
        self.config = config
        self.one_sided = one_sided
        self.writes_late = writes_late
        self.now = 1000.0
        self.verifies = True
        self.tags: dict[str, int] = {}
        self.flights: list[Flight] = []
        self.writes: list[Write] = []
        self._numbers = 0
        self.ranks = [self._rank(i, shard) for i, shard in enumerate(sources)]
        self.links = [
            self._link(f"consumer{i}.{shard.tp_rank}.{shard.first_layer}", shard, shards)
            for i in range(consumers)
            for shard in shards
        ]

    def _rank(self, number: int, shard: Shard) -> Rank:
        source = Source("127.0.0.1", 1 + number, "engine")
        return Rank(shard, source, Producer(self.config), self.number())

    def _link(self, name: str, shard: Shard, shards: Sequence[Shard]) -> Link:
        pool = SlotPool(self.config.slots)
        consumer = Consumer(self.config, geometry_of(shard), pool, self.one_sided, shards)
        slots = [bytearray(self.config.slot_bytes) for _ in range(self.config.slots)]
        return Link(name, shard, consumer, pool, slots, [Line(rank) for rank in self.ranks])

    @property
    def producer(self) -> Producer:
        return self.ranks[0].producer

    @property
    def peers(self) -> tuple[Peer, ...]:
        return tuple(Peer(rank.source, rank.shard) for rank in self.ranks)

    @property
    def freed(self) -> dict[str, Cause | None]:
        return self.ranks[0].freed

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def tag(self, transfer: str) -> int:
        return self.tags.setdefault(transfer, len(self.tags) + 1)

    # The engine of the producer

    def begin(self, transfer: str, tokens: int) -> str:
        """Start a prefill; returns the request's name. Nothing, where memory is full."""
        request = f"prefill{self.number()}"
        if any(len(rank.free_pages) < pages_for(tokens, PAGE_TOKENS) for rank in self.ranks):
            return ""
        for rank in self.ranks:
            prefill = Prefill(transfer, request, self.tag(transfer), tokens, [])
            rank.prefills[request] = prefill
            self._allot(rank, prefill)
        return request

    def compute(self, request: str, tokens: int, stop_layer: int | None = None) -> None:
        """A prefill goes on to `tokens` tokens, in the layers below `stop_layer` or in all. A step goes on until
        it has ended: its number of tokens stays."""
        for rank in self.ranks:
            prefill = rank.prefills.get(request)
            if prefill is None or prefill.final or not self._allot(rank, prefill):
                continue
            if prefill.step is None:
                prefill.step = max(prefill.computed, min(tokens, prefill.tokens)), 0
                self._offer(rank, prefill)
            aim, layers = prefill.step
            layers = LAYERS if stop_layer is None else max(layers, stop_layer)
            rank.fill(prefill, aim, layers)
            prefill.step = aim, layers
            if stop_layer is None:
                prefill.step, prefill.computed = None, aim
            actions = rank.producer.computed(prefill.transfer, request, aim, stop_layer)
            self.produce(rank, actions)

    def finish(self, request: str) -> None:
        """A prefill ends, and its pages are kept for the consumer."""
        for rank in self.ranks:
            prefill = rank.prefills.get(request)
            if prefill is None or prefill.final or not self._allot(rank, prefill):
                continue
            prefill.computed, prefill.final = prefill.tokens, True
            rank.fill(prefill, prefill.tokens, LAYERS)
            self._offer(rank, prefill)

    def prefill(self, transfer: str, tokens: int) -> str:
        """Compute and offer everything at once."""
        request = self.begin(transfer, tokens)
        self.finish(request)
        return request

    def preempt(self, request: str) -> None:
        """The request loses its pages and has to compute everything again."""
        for rank in self.ranks:
            prefill = rank.prefills.get(request)
            if prefill is not None and not prefill.final:
                rank.producer.revoke(prefill.transfer, request)
                rank.give_back(prefill.pages)
                prefill.pages, prefill.computed, prefill.step = [], 0, None

    def withdraw(self, request: str) -> None:
        """The request ends and leaves nothing to fetch."""
        for rank in self.ranks:
            prefill = rank.prefills.get(request)
            if prefill is not None and not prefill.final:
                self.produce(rank, rank.producer.withdraw(prefill.transfer, request))
                rank.give_back(rank.prefills.pop(request).pages)

    def _allot(self, rank: Rank, prefill: Prefill) -> bool:
        """Whether the request has pages (again); what was in them is noise to it."""
        wanted = pages_for(prefill.tokens, PAGE_TOKENS)
        if not prefill.pages and wanted <= len(rank.free_pages):
            prefill.pages = [rank.free_pages.popleft() for _ in range(wanted)]
            rank.fill(prefill, 0, LAYERS)
        return bool(prefill.pages)

    def _offer(self, rank: Rank, prefill: Prefill) -> None:
        offer = Offer(
            prefill.transfer,
            prefill.request,
            (tuple(prefill.pages),),
            identity_of(prefill.transfer),
            prefill.tokens,
            prefill.computed,
            prefill.final,
        )
        self.produce(rank, rank.producer.offer(offer, self.now))

    def produce(self, rank: Rank, actions: Iterable[ProducerAction]) -> None:
        for action in actions:
            if isinstance(action, Free):
                assert action.request not in rank.freed, "an offer is freed once"
                assert rank.prefills[action.request].final, "only what was left is freed"
                rank.freed[action.request] = action.cause
                rank.give_back(rank.prefills.pop(action.request).pages)
                continue
            for link in self.links:
                for line in link.lines:
                    if line.session == action.session:
                        line.to_consumer.append(action.message)
        rank.producer.check_integrity()

    def restart_producer(self, number: int = 0) -> None:
        rank = self.ranks[number]
        for link in self.links:
            self.break_session(link, noticed=True, line=link.lines[number])
        for prefill in rank.prefills.values():
            rank.give_back(prefill.pages)
        rank.prefills.clear()
        rank.ghosts.clear()
        self.writes = [write for write in self.writes if write.rank is not rank]
        rank.epoch = self.number()
        rank.producer = Producer(self.config)

    # The engine of a consumer

    def load(
        self,
        link: Link,
        transfer: str,
        stop: int,
        *,
        request: str = "",
        first: int = 0,
        wait: bool = False,
        identity: bytes | None = None,
        peers: tuple[Peer, ...] | None = None,
    ) -> str:
        """Ask for tokens [first, stop); returns the request's name. Nothing, where memory is
        full."""
        request = request or f"decode{self.number()}"
        known = first // PAGE_TOKENS
        wanted = pages_for(stop, PAGE_TOKENS) - known
        if wanted > len(link.free_pages):
            return ""
        pages = [-1] * known + [link.free_pages.popleft() for _ in range(wanted)]
        tokens = identity_of(transfer) if identity is None else identity
        peers = self.peers if peers is None else peers
        load = Load(request, transfer, peers, tokens, first, stop, (pages,), wait)
        link.lent[request] = Lent(load, self.tag(transfer))
        self.consume(link, link.consumer.load(load, self.now))
        return request

    def hold(self, link: Link, transfer: str, *, watch: bool = False) -> str:
        """A request waits for room; with `watch`, until there is something to load."""
        request = f"held{self.number()}"
        if watch:
            link.watching.add(request)
        self.consume(link, link.consumer.hold(request, transfer, self.peers, watch, self.now))
        return request

    def drop(self, link: Link, request: str) -> None:
        link.watching.discard(request)
        self.consume(link, link.consumer.drop(request, Cause.ABORTED, self.now))

    def retire(self, link: Link, request: str) -> None:
        """A request that used its pages ends; they were right until the last moment."""
        self.assert_exact(link, link.lent[request])
        self._unlend(link, request)

    def _unlend(self, link: Link, request: str) -> None:
        (pages,) = link.lent.pop(request).load.pages
        link.free_pages.extend(page for page in pages if page >= 0)

    def assert_exact(self, link: Link, lent: Lent) -> None:
        load = lent.load
        for i, page in enumerate(load.pages[0]):
            span = range(i * PAGE_TOKENS, min((i + 1) * PAGE_TOKENS, load.stop_token))
            if page < 0:
                continue
            for layer in range(link.shard.first_layer, link.shard.stop_layer):
                for head in link.shard.heads(HEADS):
                    wanted = b"".join(content(lent.tag, token, layer, head) for token in span)
                    found = link.cache.get((page, layer, head), b"")[: len(wanted)]
                    assert found == wanted, "a page holds wrong KV"

    def consume(self, link: Link, actions: Iterable[ConsumerAction]) -> None:
        pending = deque(actions)
        while pending:
            match pending.popleft():
                case Dial(source):
                    line = link.line_to(source)
                    line.dialling = line.session is None
                case Tell(source, message):
                    line = link.line_to(source)
                    if line.session is not None:
                        line.to_producer.append(message)  # type: ignore[arg-type]
                case IncomingChunk() as chunk:
                    pending.extend(self._place(link, chunk))
                case Held() as held:
                    assert held.request in link.watching, "a watched hold is told of once"
                    link.watching.discard(held.request)
                    link.held[held.request] = held
                case Finished() as finished:
                    self._finish(link, finished)
        link.consumer.check_integrity()

    def check_integrity(self) -> None:
        """Every machine's books agree."""
        for rank in self.ranks:
            rank.producer.check_integrity()
        for link in self.links:
            link.consumer.check_integrity()

    def _place(self, link: Link, chunk: IncomingChunk) -> list[ConsumerAction]:
        if self.verifies and checksum_of(chunk.payload) != chunk.header.checksum:
            return link.consumer.landings.placed(chunk, Cause.CHECKSUM, "corrupt", self.now)
        loading = (x for x in link.lent.values() if x.load.transfer == chunk.header.transfer)
        lent = next(x for x in loading if not x.arrived)
        assert set(chunk.pages) <= set(lent.load.pages[0]) - {-1}, "it fills its own load's pages"
        data = bytes(chunk.payload)
        row = PAGE_TOKENS * TOKEN_BYTES
        for layer in chunk.planned.layers(chunk.route):
            for page in chunk.pages:
                for head in chunk.route.heads:
                    link.cache[page, layer, head], data = data[:row], data[row:]
        assert data == b""
        return link.consumer.landings.placed(chunk, None, "", self.now)

    def _finish(self, link: Link, finished: Finished) -> None:
        assert finished.request not in link.finished, "a load finishes once"
        link.finished[finished.request] = finished
        if finished.cause is None:
            self.assert_exact(link, link.lent[finished.request])
            link.lent[finished.request].arrived = True
        else:
            self._unlend(link, finished.request)

    # The network

    def connect(self, link: Link, cause: Cause | None = None, line: Line | None = None) -> None:
        """A dial ends: in a session, or with a cause."""
        line = line or link.line
        source = line.rank.source
        line.dialling = False
        if cause is not None:
            return self.consume(link, link.consumer.session_down(source, cause, "", self.now))
        line.session = f"{link.name}/{self.number()}".encode()
        routes = routes_of(line.rank.shard, link.shard)
        engine_id = f"engine{source.port}"  # so they share slots as engines do
        session = ProducerSession(
            line.rank.epoch,
            self.config.slot_bytes,
            routes,
            engine_id=engine_id,
            writes_late=self.writes_late,
        )
        return self.consume(link, link.consumer.session_up(source, session, self.now))

    def break_session(self, link: Link, noticed: bool, line: Line | None = None) -> None:
        """The connection breaks; the producer notices now, or only by silence."""
        line = line or link.line
        if line.session is None:
            return
        session, line.session = line.session, None
        line.to_producer.clear()
        line.to_consumer.clear()
        source, cause = line.rank.source, Cause.SESSION_LOST
        self.consume(link, link.consumer.session_down(source, cause, "", self.now))
        if noticed:
            self.lose_session(line.rank, session)
        else:
            line.rank.ghosts.append(session)

    def lose_session(self, rank: Rank, session: bytes) -> None:
        """The producer gives a session up; its transport ends what was under way."""
        self.produce(rank, rank.producer.session_lost(session))
        for write in [write for write in self.writes if write.session == session]:
            self.end_write(write, ok=False)

    def hear(self, link: Link, line: Line | None = None) -> None:
        """The producer takes the next control message of this session."""
        line = line or link.line
        if line.session is None or not line.to_producer:
            return
        session, message = line.session, line.to_producer.popleft()
        producer, now = line.rank.producer, self.now
        actions: Sequence[ProducerAction] = ()
        match message:
            case messages.Watch(transfer):
                actions = producer.watch(session, transfer, now)
            case messages.Open():
                paths = routes_of(line.rank.shard, link.shard)
                actions = producer.open(session, message, paths, now)
            case messages.Credit(transfer, slots):
                producer.credit(session, transfer, slots)
            case messages.Done(transfer):
                actions = producer.done(session, transfer)
            case messages.Cancel(transfer, cause, readers):
                actions = producer.cancel(session, transfer, Cause(cause), now, readers)
            case messages.Heartbeat(transfers):
                producer.heartbeat(transfers, now)
        self.produce(line.rank, actions)

    def listen(self, link: Link, line: Line | None = None) -> None:
        """The consumer takes the next control message of this session."""
        line = line or link.line
        if not line.to_consumer:
            return
        message, consumer, source = line.to_consumer.popleft(), link.consumer, line.rank.source
        actions: Sequence[ConsumerAction] = ()
        match message:
            case messages.Ready(transfer):
                actions = consumer.ready(source, transfer)
            case messages.Accept():
                actions = consumer.accept(source, message, self.now)
            case messages.Refuse():
                actions = consumer.refuse(source, message, self.now)
            case messages.Cancelled(transfer):
                actions = consumer.cancelled(source, transfer, self.now)
        self.consume(link, actions)

    def send(self, rank: Rank | None = None, *, gate_shut: bool = False) -> OutgoingChunk | None:
        """A producer rank (the first that has one) gathers its next chunk and starts to write it;
        or finds that the engine has just taken the pages back."""
        if rank is None:
            return next((sent for rank in self.ranks if (sent := self.send(rank))), None)
        chunk = rank.producer.next_send()
        if chunk is None:
            return None
        if gate_shut and not rank.prefills[chunk.request].final:
            rank.producer.unsend(chunk)
            self.preempt(chunk.request)
            return chunk
        assert chunk.kept
        payload = b"".join(
            rank.memory[page, layer, head]
            for layer in chunk.planned.layers(chunk.route)
            for page in chunk.pages
            for head in chunk.route.heads
        )
        planned = chunk.planned
        header = ChunkHeader(
            transfer=chunk.transfer,
            epoch=rank.epoch,
            sequence=planned.sequence,
            identity=chunk.identity,
            route=planned.route,
            first_layer=planned.first_layer,
            stop_layer=planned.stop_layer,
            first_token=planned.first_token,
            stop_token=planned.stop_token,
            codec=chunk.route.codec,
            nbytes=len(payload),
            checksum=checksum_of(memoryview(payload)),
        )
        self.writes.append(Write(rank, chunk.session, chunk.transfer))
        for link in self.links:
            if chunk.session in [line.session for line in link.lines]:
                self.flights.append(Flight(link, header, payload, chunk.slot))
        return chunk

    def end_write(self, write: Write, ok: bool = True) -> None:
        self.writes.remove(write)
        producer, detail = write.rank.producer, "" if ok else "no"
        self.produce(write.rank, producer.written(write.session, write.transfer, ok, detail))

    def land(self, flight: Flight) -> None:
        """A chunk lands; it may land again as long as the test keeps it."""
        link = flight.link
        payload = memoryview(flight.payload)
        if self.one_sided and flight.slot < len(link.slots):
            link.slots[flight.slot][: len(payload)] = payload
            payload = memoryview(link.slots[flight.slot])[: len(payload)]
        landed = link.consumer.landings.landed(flight.header, flight.slot, payload, self.now)
        self.consume(link, landed)

    def beat(self, link: Link) -> None:
        for line in link.lines:
            if line.session is not None:
                wanted = link.consumer.transfers_of(line.rank.source)
                line.to_producer.append(messages.Heartbeat(wanted))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for rank in self.ranks:
            if seconds >= self.config.session_timeout_s:
                while rank.ghosts:
                    self.lose_session(rank, rank.ghosts.pop())
            self.produce(rank, rank.producer.tick(self.now))
        for link in self.links:
            self.consume(link, link.consumer.tick(self.now))

    def run(self) -> None:
        """A fair network: everything moves, in order, until nothing does."""
        moved = True
        while moved:
            moved = self.talk()
            while self.send():
                moved = True
            while self.flights:
                self.land(self.flights.pop(0))
                moved = True
            while self.writes:
                self.end_write(self.writes[0])

    def talk(self) -> bool:
        """Every control message arrives; whether there were any."""
        moved = False
        for link in self.links:
            for line in link.lines:
                if line.dialling:
                    self.connect(link, line=line)
                    moved = True
                while line.to_producer or line.to_consumer:
                    self.hear(link, line)
                    self.listen(link, line)
                    moved = True
        return moved

    def settle(self) -> None:
        """Nothing new is asked for, and much time passes: everything must be at rest."""
        self.flights.clear()
        while self.writes:
            self.end_write(self.writes[0])
        for request in [request for rank in self.ranks for request in rank.prefills]:
            self.withdraw(request)
        for link in self.links:
            for line in link.lines:
                if line.dialling:
                    self.connect(link, Cause.UNREACHABLE, line)
            for request in [r for r, lent in link.lent.items() if lent.arrived]:
                self.retire(link, request)
            for request in {i.request for i in link.consumer._transfers if not i.load}:
                self.drop(link, request)
        for _ in range(4):
            self.pass_time(2 * self.config.wait_timeout_s)
            for link in self.links:
                for line in link.lines:
                    while line.to_producer or line.to_consumer:
                        self.hear(link, line)
                        self.listen(link, line)
        self.assert_at_rest()

    def assert_at_rest(self) -> None:
        for rank in self.ranks:
            assert rank.prefills == {}, "every offer ends in one Free"
            assert rank.producer.transfers == 0
            assert rank.producer.leased_pages == 0
            assert rank.producer._openings._draining._writing == {}
            assert rank.producer._openings._draining._waiting == set()
            assert rank.producer._past._unwanted == {}
            assert sorted(rank.free_pages) == list(range(PRODUCER_PAGES))
        for link in self.links:
            assert link.lent == {}, "every load ends in one Finished"
            assert link.watching == set(), "every watched hold ends in one Held"
            assert link.consumer.transfers == 0
            assert link.pool.held == 0, "every slot comes home"
            assert link.pool.free == self.config.slots
            assert link.consumer._grants._ending == {}
            assert link.consumer._fetches._unsent == {}
            assert link.consumer._grants._waiting == {}
            assert sorted(link.free_pages) == list(range(CONSUMER_PAGES))
