# SPDX-License-Identifier: Apache-2.0
"""The consumer's state machine: what is asked of whom, which slots are granted, what is believed.

No sockets, no engine, no clock: events come in as calls with the time, and what must happen goes
out as actions. Each load ends in exactly one `Finished`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pd_connector import codec, wire
from pd_connector.config import Config
from pd_connector.errors import Cause
from pd_connector.geometry import Geometry
from pd_connector.plan import Chunk, plan
from pd_connector.slab import SlotPool


class Source(NamedTuple):
    """Where a producer is reached. The engine id, if known, must be the one found there."""

    host: str
    port: int
    engine_id: str


class Load(NamedTuple):
    """A request for pages: prompt pages [first_page, stop_page) into local pages."""

    request: str
    transfer: str
    source: Source
    identity: bytes
    first_page: int
    pages: Sequence[int]  # local page ids; pages[0] is prompt page first_page
    wait: bool  # the prefill may not have started yet

    @property
    def stop_page(self) -> int:
        return self.first_page + len(self.pages)


class Dial(NamedTuple):
    """Open a session with this producer (nothing, where one stands or is being opened)."""

    source: Source


class Tell(NamedTuple):
    """Send this message to this producer."""

    source: Source
    message: wire.Message


class Place(NamedTuple):
    """A landed chunk fits the plan: verify its checksum, scatter it, then call `placed`."""

    request: str
    header: wire.ChunkHeader
    chunk: Chunk
    pages: Sequence[int]  # local page ids of the chunk, in prompt order
    slot: int
    payload: memoryview


class Finished(NamedTuple):
    """A load has ended; without a cause every page is in place and verified."""

    request: str
    cause: Cause | None
    detail: str
    nbytes: int  # received and verified
    chunks: int
    seconds: float  # since the load began, or since the prefill ended where that was later


Action = Dial | Tell | Place | Finished


@dataclass(slots=True)
class _Incoming:
    request: str
    source: Source
    load: Load | None = None  # None: only held, no pages allocated yet
    began: float = 0.0
    deadline: float = float("inf")
    opened: bool = False
    accepted: bool = False
    slots: list[int] = field(default_factory=list)
    planned: int = 0
    missing: dict[int, Chunk] = field(default_factory=dict)
    nbytes: int = 0
    chunks: int = 0

    @property
    def wants_slots(self) -> bool:
        return self.accepted and len(self.slots) < len(self.missing)


class Consumer:
    """All transfers of one rank that consumes. Used by one thread.

    Args:
        pool: landing slots; granted to producers, and home again when a transfer has ended.
        one_sided: whether a peer may still write into a slot after its session has ended.
    """

    def __init__(self, config: Config, geometry: Geometry, pool: SlotPool, one_sided: bool) -> None:
        self._config = config
        self._geometry = geometry
        self._pool = pool
        self._one_sided = one_sided
        self._transfers: dict[str, _Incoming] = {}
        self._sessions: dict[Source, int] = {}  # sessions that stand, and their producer's epoch
        self._chunk_bytes: dict[Source, int] = {}  # what fits in a slot on either side
        # Cancelled transfers, and their slots: quarantined until `Cancelled` comes, or until that
        # time has passed. Until then the same transfer is not loaded again, for a `Cancelled`
        # does not say which of two ends it confirms.
        self._ending: dict[tuple[Source, str], tuple[list[int], float]] = {}
        # For producers whose session does not stand yet.
        self._farewells: dict[Source, list[wire.Message]] = {}
        self._hungry: dict[str, None] = {}  # in the order in which they are served

    @property
    def transfers(self) -> int:
        """Transfers that are held or loading."""
        return len(self._transfers)

    def wanted(self, source: Source) -> list[str]:
        """Transfers to speak for in heartbeats to this producer."""
        return [t for t, incoming in self._transfers.items() if incoming.source == source]

    def hold(self, request: str, transfer: str, source: Source) -> list[Action]:
        """A request that will load this transfer waits for room: keep its pages leased."""
        if transfer in self._transfers:
            return []
        self._transfers[transfer] = _Incoming(request, source)
        return [Dial(source)]

    def load(self, load: Load, now: float) -> list[Action]:
        """Fetch pages. A transfer is loaded at most once at a time."""
        incoming = self._transfers.get(load.transfer)
        if incoming is not None and (incoming.load or incoming.request != load.request):
            return [Finished(load.request, Cause.DUPLICATE, load.transfer, 0, 0, 0.0)]
        if (load.source, load.transfer) in self._ending:
            self._transfers.pop(load.transfer, None)
            detail = f"{load.transfer}: its last load still ends"
            return [Finished(load.request, Cause.DUPLICATE, detail, 0, 0, 0.0)]
        incoming = self._transfers.setdefault(load.transfer, _Incoming(load.request, load.source))
        incoming.load = load
        incoming.source = load.source
        incoming.began = now
        incoming.deadline = now + self._config.connect_timeout_s
        if load.source in self._sessions:
            return self._open(load.transfer, incoming, now)
        return [Dial(load.source)]

    def drop(self, request: str, cause: Cause, now: float) -> list[Action]:
        """The request no longer wants its transfer; the producer is told so."""
        for transfer, incoming in list(self._transfers.items()):
            if incoming.request == request:
                return self._finish(transfer, cause, "", now)
        return []

    def session_up(
        self, source: Source, epoch: int, now: float, slot_bytes: int = 0
    ) -> list[Action]:
        """A session stands: open what waited for it. `slot_bytes` is the size of the producer's
        slots, 0 if it is not known."""
        self._sessions[source] = epoch
        self._chunk_bytes[source] = min(
            slot_bytes or self._config.slot_bytes, self._config.slot_bytes
        )
        farewells = self._farewells.pop(source, [])
        actions: list[Action] = [Tell(source, message) for message in farewells]
        for transfer, incoming in self._transfers.items():
            if incoming.source == source and incoming.load and not incoming.opened:
                actions += self._open(transfer, incoming, now)
        return actions

    def session_down(
        self, source: Source, cause: Cause, detail: str, now: float, *, silenced: bool = False
    ) -> list[Action]:
        """A session has ended or could not be opened: its transfers fail.

        With `silenced` the producer certainly writes no more, and its slots are home at once.
        """
        self._sessions.pop(source, None)
        self._chunk_bytes.pop(source, None)
        slots: list[int] = []
        actions: list[Action] = []
        for transfer in self.wanted(source):
            slots += self._transfers[transfer].slots
            actions += self._finish(transfer, cause, detail, now)
        for key in [key for key in self._ending if key[0] == source]:
            slots += self._ending.pop(key)[0]
        if silenced or not self._one_sided:
            self._pool.absolve(slots)
        self._farewells.pop(source, None)
        return actions + self._grant(now)

    def accept(self, source: Source, message: wire.Accept, now: float) -> list[Action]:
        """The producer has the pages and will stream them."""
        incoming = self._opened_at(source, message.transfer)
        if incoming is None or incoming.accepted:
            return []
        # Chunks into slots granted with `Open` may have overtaken this message.
        if message.chunks != incoming.planned or message.codec not in codec.CODECS:
            detail = (
                f"producer plans {message.chunks} chunks in codec {message.codec!r}, "
                f"{incoming.planned} chunks in {list(codec.CODECS)} wanted"
            )
            return self._finish(message.transfer, Cause.CHUNK_MISMATCH, detail, now)
        incoming.accepted = True
        if incoming.load is not None and incoming.load.wait:
            incoming.began = now  # the prefill took until now, not the transfer
        incoming.deadline = now + self._config.stall_timeout_s
        self._hungry[message.transfer] = None
        return self._grant(now)

    def refuse(self, source: Source, message: wire.Refuse, now: float) -> list[Action]:
        """The producer will send no (more) pages."""
        if self._opened_at(source, message.transfer) is None:
            return []
        cause = Cause(message.cause) if message.cause in list(Cause) else Cause.TRANSPORT
        return self._finish(message.transfer, cause, f"refused by producer: {message.detail}", now)

    def cancelled(self, source: Source, transfer: str, now: float) -> list[Action]:
        """The producer confirms that it writes nothing for this transfer any more."""
        slots, _ = self._ending.pop((source, transfer), ([], now))
        self._pool.absolve(slots)
        return self._grant(now)

    def landed(
        self, header: wire.ChunkHeader, slot: int, payload: memoryview, now: float
    ) -> list[Action]:
        """A chunk has landed. Nothing of it is believed before it fits the plan.

        A chunk of a transfer that is over, or that came twice, is dropped: its slot belongs to
        someone else by now.
        """
        incoming = self._transfers.get(header.transfer)
        if incoming is None or incoming.load is None or not self._pool.holds(header.transfer, slot):
            return []
        chunk = incoming.missing.get(header.sequence)
        if chunk is None:
            return []
        load = incoming.load
        wanted = wire.ChunkHeader(
            transfer=load.transfer,
            epoch=self._sessions.get(load.source, -1),
            sequence=chunk.sequence,
            identity=load.identity,
            first_layer=chunk.first_layer,
            stop_layer=chunk.stop_layer,
            first_page=chunk.first_page,
            stop_page=chunk.stop_page,
            codec=header.codec,
            nbytes=codec.CODECS[header.codec].coded_bytes(chunk.nbytes(self._geometry))
            if header.codec in codec.CODECS
            else -1,
            checksum=header.checksum,
        )
        if header != wanted or len(payload) != wanted.nbytes:
            detail = f"landed {header}, wanted {wanted}, {len(payload)} bytes"
            return self._finish(header.transfer, Cause.CHUNK_MISMATCH, detail, now)
        first = chunk.first_page - load.first_page
        pages = load.pages[first : first + chunk.pages]
        return [Place(load.request, header, chunk, pages, slot, payload)]

    def placed(self, place: Place, problem: Cause | None, detail: str, now: float) -> list[Action]:
        """A chunk has been scattered, or found wrong (`problem`)."""
        transfer = place.header.transfer
        incoming = self._transfers.get(transfer)
        if incoming is None or not self._pool.holds(transfer, place.slot):
            return []
        if problem is not None:
            return self._finish(transfer, problem, detail, now)
        del incoming.missing[place.chunk.sequence]
        incoming.slots.remove(place.slot)
        self._pool.give_back(place.slot)
        incoming.nbytes += place.header.nbytes
        incoming.chunks += 1
        incoming.deadline = now + self._config.stall_timeout_s
        if not incoming.missing:
            return self._finish(transfer, None, "", now)
        self._hungry[transfer] = None
        return self._grant(now)

    def tick(self, now: float) -> list[Action]:
        """Fail what has been silent for too long, and free slots whose quarantine is over."""
        actions: list[Action] = []
        for transfer, incoming in list(self._transfers.items()):
            if incoming.accepted and not incoming.slots:
                incoming.deadline = now + self._config.stall_timeout_s  # it waits for us
            if incoming.deadline > now or transfer not in self._transfers:
                continue
            if not incoming.opened:
                cause, detail = Cause.UNREACHABLE, "no session within connect_timeout_s"
            elif not incoming.accepted:
                cause, detail = Cause.WAIT_TIMEOUT, "the producer did not accept in time"
            else:
                cause, detail = Cause.STALLED, "no chunk within stall_timeout_s"
            actions += self._finish(transfer, cause, detail, now)
        self._pool.tick(now)
        for key in [key for key, (_, until) in self._ending.items() if until <= now]:
            del self._ending[key]
        return actions + self._grant(now)

    def _open(self, transfer: str, incoming: _Incoming, now: float) -> list[Action]:
        load = incoming.load
        assert load is not None
        slot_bytes = self._chunk_bytes[load.source]
        chunks = plan(self._geometry, load.first_page, load.stop_page, slot_bytes)
        incoming.missing = {chunk.sequence: chunk for chunk in chunks}
        incoming.planned = len(chunks)
        incoming.opened = True
        patience = self._config.wait_timeout_s if load.wait else self._config.stall_timeout_s
        incoming.deadline = now + patience
        message = wire.Open(
            transfer=transfer,
            identity=load.identity,
            first_page=load.first_page,
            stop_page=load.stop_page,
            wait=load.wait,
            codecs=list(codec.CODECS),
            # A prefill that has not finished would only sit on its slots.
            slots=[] if load.wait else self._take_slots(transfer, incoming, len(chunks)),
            slot_bytes=slot_bytes,
        )
        return [Tell(load.source, message)]

    def _take_slots(self, transfer: str, incoming: _Incoming, wanted: int) -> list[int]:
        taken: list[int] = []
        while len(taken) < wanted and (slot := self._pool.take(transfer)) is not None:
            taken.append(slot)
        incoming.slots += taken
        return taken

    def _grant(self, now: float) -> list[Action]:
        """Grant free slots, one at a time in turn, to the transfers that want some."""
        granted: dict[str, list[int]] = {}
        while self._pool.free and self._hungry:
            transfer = next(iter(self._hungry))
            del self._hungry[transfer]
            incoming = self._transfers.get(transfer)
            if incoming is None or not incoming.wants_slots:
                continue
            if not incoming.slots:
                incoming.deadline = now + self._config.stall_timeout_s
            granted.setdefault(transfer, []).extend(self._take_slots(transfer, incoming, 1))
            if incoming.wants_slots:
                self._hungry[transfer] = None
        return [
            Tell(self._transfers[transfer].source, wire.Credit(transfer, slots))
            for transfer, slots in granted.items()
        ]

    def _finish(self, transfer: str, cause: Cause | None, detail: str, now: float) -> list[Action]:
        incoming = self._transfers.pop(transfer)
        source = incoming.source
        actions: list[Action] = []
        over = wire.Done(transfer) if cause is None else wire.Cancel(transfer, cause)
        until = now + self._config.lease_s
        for slot in incoming.slots:
            self._pool.quarantine(slot, until)
        if source in self._sessions:
            actions.append(Tell(source, over))
            if cause is not None:
                self._ending[source, transfer] = incoming.slots, until
        else:
            self._farewells.setdefault(source, []).append(over)
        if incoming.load is not None:
            seconds = now - incoming.began
            numbers = incoming.nbytes, incoming.chunks, seconds
            actions.append(Finished(incoming.request, cause, detail, *numbers))
        return actions + self._grant(now)

    def _opened_at(self, source: Source, transfer: str) -> _Incoming | None:
        incoming = self._transfers.get(transfer)
        if incoming is None or incoming.source != source or not incoming.opened:
            return None
        return incoming
