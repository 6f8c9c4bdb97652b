# SPDX-License-Identifier: Apache-2.0
"""A producer and its consumers joined by queues instead of sockets.

Nothing moves unless a test moves it: control messages keep their order within a session, chunks
overtake everything. Caches are dictionaries of `(page, layer)`, pages and slots are lent again as
soon as they are free, so that whatever comes late finds someone else in its place.
"""

import struct
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pd_connector import wire
from pd_connector.config import Config
from pd_connector.consumer import Action as ConsumerAction
from pd_connector.consumer import Consumer, Dial, Finished, Load, Place, Source, Tell
from pd_connector.errors import Cause
from pd_connector.geometry import Geometry, Shard
from pd_connector.integrity import checksum
from pd_connector.producer import Action as ProducerAction
from pd_connector.producer import Free, Offer, Producer, Send
from pd_connector.slab import SlotPool

LAYERS = 2
PAGE_BYTES = 8
GEOMETRY = Geometry(Shard(0, LAYERS, 0, 1), 1, PAGE_BYTES, "uint8", "test")


class SmallConfig(Config, frozen=True, kw_only=True):
    """Slots of four pages, so that a few pages make several chunks."""

    @property
    def slot_bytes(self) -> int:
        return 4 * PAGE_BYTES


CONFIG = SmallConfig(slots=3)


def identity_of(transfer: str) -> bytes:
    return b"tokens of " + transfer.encode()


def content(tag: int, prompt_page: int, layer: int) -> bytes:
    """The bytes of one page of one layer: no two pages of any two prompts are alike."""
    return struct.pack("<IHH", tag, prompt_page, layer)


FALSE_FIELDS: dict[str, Any] = {
    "transfer": "transfer9",
    "epoch": 77,
    "sequence": 900,
    "identity": b"other tokens",
    "first_layer": 1,
    "stop_layer": 7,
    "first_page": 5,
    "stop_page": 2**40,
    "codec": "int8",
    "nbytes": 2**40,
    "checksum": b"",
}
"""For each field of a chunk's header a value that is not the wanted one."""


@dataclass
class Flight:
    """A chunk that has left the producer and not landed yet."""

    link: "Link"
    header: wire.ChunkHeader
    payload: bytes
    slot: int


@dataclass
class Write:
    """A write whose end the producer has not been told of."""

    session: bytes
    transfer: str


@dataclass
class Lent:
    """A load's pages, from its start until it failed or was retired."""

    load: Load
    tag: int
    arrived: bool = False


@dataclass
class Link:
    """One consumer, its cache, its slots and its session."""

    name: str
    source: Source
    consumer: Consumer
    pool: SlotPool
    slots: list[bytearray]
    cache: dict[tuple[int, int], bytes] = field(default_factory=dict)
    free_pages: deque[int] = field(default_factory=lambda: deque(range(40)))
    lent: dict[str, Lent] = field(default_factory=dict)
    finished: dict[str, Finished] = field(default_factory=dict)
    session: bytes | None = None
    dialling: bool = False
    to_producer: deque[wire.ConsumerMessage] = field(default_factory=deque)
    to_consumer: deque[wire.ProducerMessage] = field(default_factory=deque)

    @property
    def received(self) -> list[str]:
        """Requests whose pages all arrived."""
        return [r for r, finished in self.finished.items() if finished.cause is None]


class World:
    """See the module. Every step asserts what must hold at any time."""

    def __init__(self, consumers: int = 1, config: Config = CONFIG, one_sided: bool = True) -> None:
        self.config = config
        self.one_sided = one_sided
        self.now = 1000.0
        self.epoch = 1
        self.verifies = True
        self.producer = Producer(config, GEOMETRY)
        self.memory: dict[tuple[int, int], bytes] = {}
        self.free_pages = deque(range(60))
        self.offers: dict[str, Offer] = {}
        self.freed: dict[str, Cause | None] = {}
        self.tags: dict[str, int] = {}
        self.flights: list[Flight] = []
        self.writes: list[Write] = []
        self.ghosts: list[bytes] = []  # sessions whose loss the producer has not noticed
        self._numbers = 0
        self.links = [self._link(f"consumer{i}") for i in range(consumers)]

    def _link(self, name: str) -> Link:
        pool = SlotPool(self.config.slots)
        source = Source("127.0.0.1", 1, "engine")
        consumer = Consumer(self.config, GEOMETRY, pool, self.one_sided)
        slots = [bytearray(self.config.slot_bytes) for _ in range(self.config.slots)]
        return Link(name, source, consumer, pool, slots)

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def tag(self, transfer: str) -> int:
        return self.tags.setdefault(transfer, len(self.tags) + 1)

    # The engine of the producer

    def prefill(self, transfer: str, pages: int) -> str:
        """Compute and offer pages; returns the request's name. Nothing, where memory is full."""
        request = f"prefill{self.number()}"
        if pages > len(self.free_pages):
            return ""
        taken = [self.free_pages.popleft() for _ in range(pages)]
        for i, page in enumerate(taken):
            for layer in range(LAYERS):
                self.memory[page, layer] = content(self.tag(transfer), i, layer)
        offer = Offer(transfer, request, taken, identity_of(transfer))
        self.offers[request] = offer
        self.produce(self.producer.offer(offer, self.now))
        return request

    def produce(self, actions: Iterable[ProducerAction]) -> None:
        for action in actions:
            if isinstance(action, Free):
                assert action.request not in self.freed, "an offer is freed once"
                self.freed[action.request] = action.cause
                self.free_pages.extend(self.offers.pop(action.request).pages)
                continue
            for link in self.links:
                if link.session == action.session:
                    link.to_consumer.append(action.message)

    def restart_producer(self) -> None:
        for link in self.links:
            self.break_session(link, noticed=True)
        for offer in self.offers.values():
            self.free_pages.extend(offer.pages)
        self.offers.clear()
        self.writes.clear()
        self.ghosts.clear()
        self.epoch += 1
        self.producer = Producer(self.config, GEOMETRY)

    # The engine of a consumer

    def load(
        self,
        link: Link,
        transfer: str,
        pages: int,
        *,
        request: str = "",
        first_page: int = 0,
        wait: bool = False,
        identity: bytes | None = None,
    ) -> str:
        """Ask for prompt pages; returns the request's name. Nothing, where memory is full."""
        request = request or f"decode{self.number()}"
        if pages > len(link.free_pages):
            return ""
        taken = [link.free_pages.popleft() for _ in range(pages)]
        wanted = identity_of(transfer) if identity is None else identity
        load = Load(request, transfer, link.source, wanted, first_page, taken, wait)
        link.lent[request] = Lent(load, self.tag(transfer))
        self.consume(link, link.consumer.load(load, self.now))
        return request

    def drop(self, link: Link, request: str) -> None:
        self.consume(link, link.consumer.drop(request, Cause.ABORTED, self.now))

    def retire(self, link: Link, request: str) -> None:
        """A request that used its pages ends; they were right until the last moment."""
        self.assert_exact(link, link.lent[request])
        link.free_pages.extend(link.lent.pop(request).load.pages)

    def assert_exact(self, link: Link, lent: Lent) -> None:
        for i, page in enumerate(lent.load.pages):
            for layer in range(LAYERS):
                wanted = content(lent.tag, lent.load.first_page + i, layer)
                assert link.cache.get((page, layer)) == wanted, "a page holds wrong KV"

    def consume(self, link: Link, actions: Iterable[ConsumerAction]) -> None:
        pending = deque(actions)
        while pending:
            match pending.popleft():
                case Dial():
                    link.dialling = link.session is None
                case Tell(_, message):
                    if link.session is not None:
                        link.to_producer.append(message)
                case Place() as place:
                    pending.extend(self._place(link, place))
                case Finished() as finished:
                    self._finish(link, finished)

    def _place(self, link: Link, place: Place) -> list[ConsumerAction]:
        if self.verifies and checksum(place.payload) != place.header.checksum:
            return link.consumer.placed(place, Cause.CHECKSUM, "corrupt", self.now)
        lent = link.lent[place.request]
        assert not lent.arrived, "a page is not touched after it was reported"
        assert set(place.pages) <= set(lent.load.pages), "a chunk fills its own load's pages"
        data = bytes(place.payload)
        for layer in range(place.chunk.first_layer, place.chunk.stop_layer):
            for page in place.pages:
                link.cache[page, layer], data = data[:PAGE_BYTES], data[PAGE_BYTES:]
        return link.consumer.placed(place, None, "", self.now)

    def _finish(self, link: Link, finished: Finished) -> None:
        assert finished.request not in link.finished, "a load finishes once"
        link.finished[finished.request] = finished
        lent = link.lent[finished.request]
        if finished.cause is None:
            self.assert_exact(link, lent)
            lent.arrived = True
        else:
            link.free_pages.extend(link.lent.pop(finished.request).load.pages)

    # The network

    def connect(self, link: Link, cause: Cause | None = None) -> None:
        """A dial ends: in a session, or with a cause."""
        link.dialling = False
        if cause is not None:
            down = link.consumer.session_down(link.source, cause, "", self.now)
            return self.consume(link, down)
        link.session = f"{link.name}/{self.number()}".encode()
        return self.consume(link, link.consumer.session_up(link.source, self.epoch, self.now))

    def break_session(self, link: Link, noticed: bool) -> None:
        """The connection breaks; the producer notices now, or only by silence."""
        if link.session is None:
            return
        session, link.session = link.session, None
        link.to_producer.clear()
        link.to_consumer.clear()
        down = link.consumer.session_down(link.source, Cause.SESSION_LOST, "", self.now)
        self.consume(link, down)
        if noticed:
            self.lose_session(session)
        else:
            self.ghosts.append(session)

    def lose_session(self, session: bytes) -> None:
        """The producer gives a session up; its transport ends what was under way."""
        self.produce(self.producer.session_lost(session))
        for write in [write for write in self.writes if write.session == session]:
            self.end_write(write, ok=False)

    def hear(self, link: Link) -> None:
        """The producer takes the next control message of this session."""
        if link.session is None or not link.to_producer:
            return
        session, message = link.session, link.to_producer.popleft()
        match message:
            case wire.Open():
                self.produce(self.producer.open(session, message, self.now))
            case wire.Credit(transfer, slots):
                self.producer.credit(session, transfer, slots)
            case wire.Done(transfer):
                self.produce(self.producer.done(session, transfer))
            case wire.Cancel(transfer, cause):
                self.produce(self.producer.cancel(session, transfer, Cause(cause), self.now))
            case wire.Heartbeat(transfers):
                self.producer.heartbeat(session, transfers, self.now)

    def listen(self, link: Link) -> None:
        """The consumer takes the next control message of this session."""
        if not link.to_consumer:
            return
        message, consumer = link.to_consumer.popleft(), link.consumer
        match message:
            case wire.Accept():
                self.consume(link, consumer.accept(link.source, message, self.now))
            case wire.Refuse():
                self.consume(link, consumer.refuse(link.source, message, self.now))
            case wire.Cancelled(transfer):
                self.consume(link, consumer.cancelled(link.source, transfer, self.now))

    def send(self) -> Send | None:
        """The producer gathers its next chunk and starts to write it."""
        send = self.producer.next_send()
        if send is None:
            return None
        layers = range(send.chunk.first_layer, send.chunk.stop_layer)
        payload = b"".join(self.memory[p, layer] for layer in layers for p in send.pages)
        header = wire.ChunkHeader(
            transfer=send.transfer,
            epoch=self.epoch,
            sequence=send.chunk.sequence,
            identity=send.identity,
            first_layer=send.chunk.first_layer,
            stop_layer=send.chunk.stop_layer,
            first_page=send.chunk.first_page,
            stop_page=send.chunk.stop_page,
            codec=send.codec,
            nbytes=len(payload),
            checksum=checksum(memoryview(payload)),
        )
        self.writes.append(Write(send.session, send.transfer))
        for link in self.links:
            if link.session == send.session:
                self.flights.append(Flight(link, header, payload, send.slot))
        return send

    def end_write(self, write: Write, ok: bool = True) -> None:
        self.writes.remove(write)
        self.produce(self.producer.written(write.session, write.transfer, ok, "" if ok else "no"))

    def land(self, flight: Flight) -> None:
        """A chunk lands; it may land again as long as the test keeps it."""
        link = flight.link
        payload = memoryview(flight.payload)
        if self.one_sided and flight.slot < len(link.slots):
            link.slots[flight.slot][: len(payload)] = payload
            payload = memoryview(link.slots[flight.slot])[: len(payload)]
        landed = link.consumer.landed(flight.header, flight.slot, payload, self.now)
        self.consume(link, landed)

    def beat(self, link: Link) -> None:
        if link.session is not None:
            link.to_producer.append(wire.Heartbeat(link.consumer.wanted(link.source)))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        if seconds >= self.config.session_timeout_s:
            while self.ghosts:
                self.lose_session(self.ghosts.pop())
        self.produce(self.producer.tick(self.now))
        for link in self.links:
            self.consume(link, link.consumer.tick(self.now))

    def run(self) -> None:
        """A fair network: everything moves, in order, until nothing does."""
        moved = True
        while moved:
            moved = False
            for link in self.links:
                if link.dialling:
                    self.connect(link)
                    moved = True
                while link.to_producer:
                    self.hear(link)
                    moved = True
                while link.to_consumer:
                    self.listen(link)
                    moved = True
            while self.send():
                moved = True
            while self.flights:
                self.land(self.flights.pop(0))
                moved = True
            while self.writes:
                self.end_write(self.writes[0])

    def settle(self) -> None:
        """Nothing new is asked for, and much time passes: everything must be at rest."""
        self.flights.clear()
        while self.writes:
            self.end_write(self.writes[0])
        for link in self.links:
            if link.dialling:
                self.connect(link, Cause.UNREACHABLE)
            for request in [r for r, lent in link.lent.items() if lent.arrived]:
                self.retire(link, request)
            for request in {i.request for i in link.consumer._transfers.values() if not i.load}:
                self.drop(link, request)
        for _ in range(4):
            self.pass_time(2 * self.config.wait_timeout_s)
            for link in self.links:
                while link.to_producer:
                    self.hear(link)
                while link.to_consumer:
                    self.listen(link)
        self.assert_at_rest()

    def assert_at_rest(self) -> None:
        assert self.offers == {}, "every offer ends in one Free"
        assert self.producer.transfers == 0
        assert self.producer.leased_pages == 0
        assert self.producer._draining == {}
        assert self.producer._awaiting_end == set()
        assert self.producer._unwanted == {}
        assert sorted(self.free_pages) == list(range(60))
        for link in self.links:
            assert link.lent == {}, "every load ends in one Finished"
            assert link.consumer.transfers == 0
            assert link.pool.held == 0, "every slot comes home"
            assert link.pool.free == self.config.slots
            assert link.consumer._ending == {}
            assert link.consumer._farewells == {}
            assert link.consumer._hungry == {}
            assert sorted(link.free_pages) == list(range(40))
