# SPDX-License-Identifier: Apache-2.0
"""No producer gets all landing slots while there are others, and none that asks for little gets nothing."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pd_connector.config import Config
from pd_connector.memory.slab import SlotPool
from pd_connector.protocol.consuming.grants import Grants, Key, Shares
from pd_connector.protocol.consuming.incoming import ProducerSession
from pd_connector.protocol.consuming.incoming_stream import IncomingStream
from pd_connector.protocol.wire.peers import Source

PRODUCERS = [f"producer{number}" for number in range(4)]
CHUNK: Any = object()
LEASE_S = 30.0


class Catalog:
    """What producers have, kept beside `Shares`."""

    def __init__(self, slots: int, *, alone: bool = False) -> None:
        self.slots = slots
        self.alone = alone
        self.has: Counter[tuple[str, bool]] = Counter()

    @property
    def free(self) -> int:
        return self.slots - self.has.total()

    def shares(self) -> Shares:
        has = ((*key, count) for key, count in self.has.items())
        return Shares(self.slots, self.free, alone=self.alone, has=has)

    def room(self, producer: str, *, early: bool = False) -> int:
        return self.shares().room(producer, early=early)

    def fill(self, producer: str, *, early: bool = False) -> int:
        """It takes all it may have; returns how many."""
        shares, taken = self.shares(), 0
        while shares.room(producer, early=early):
            shares.take(producer, early=early)
            self.has[producer, early] += 1
            taken += 1
        return taken


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.sampled_from(PRODUCERS), st.sampled_from(["ready", "early", "back"]))),
)
@example(2, [("producer0", "early"), ("producer0", "ready")])
@settings(max_examples=400, deadline=None)
def test_each_has_a_part_in_any_order_of_events(slots: int, events: list[tuple[str, str]]) -> None:
    books = Catalog(slots)
    for producer, what in events:
        if what == "back":
            books.has = Counter({key: n for key, n in books.has.items() if key[0] != producer})
            continue
        early = what == "early"
        room = books.room(producer, early=early)
        assert 0 <= room <= books.free
        if not early and not books.has[producer, False]:
            assert room or not books.free, "what is free is for those that have none"
        assert books.fill(producer, early=early) == room, "it is told how many before it takes them"
        mine = sum(n for (other, _), n in books.has.items() if other == producer)
        assert mine < slots or slots == 1, "it leaves some"
        assert sum(n for (_, was_early), n in books.has.items() if was_early) <= slots // 2


@pytest.mark.parametrize(
    ("slots", "each"), [(1, [1]), (2, [1, 1]), (4, [3, 1]), (16, [12, 3, 1]), (64, [48, 12, 3, 1])]
)
def test_producers_that_stop_one_after_the_other_leave_slots_for_the_next(
    slots: int, each: list[int]
) -> None:
    books = Catalog(slots)
    assert [books.fill(producer) for producer in PRODUCERS[: len(each)]] == each


def test_busy_producers_come_to_have_nearly_the_same() -> None:
    books = Catalog(16)
    books.fill("first")
    for _ in range(16):
        books.fill("second")
        books.has["first", False] -= 1
        books.fill("second")
        books.fill("first")
    assert sorted(books.has.values()) == [6, 8]


@pytest.mark.parametrize("slots", [1, 2, 16])
def test_one_that_is_alone_may_have_all(slots: int) -> None:
    books = Catalog(slots, alone=True)
    assert books.fill("only", early=True) == slots // 2
    assert books.fill("only") == slots - slots // 2
    assert books.free == 0


ONE, OTHER = Source("host", 1, ""), Source("host", 2, "")


def asking(grants: Grants, name: str, source: Source, *, waits: bool) -> IncomingStream:
    """A stream of eight chunks that waits for slots."""
    missing = dict.fromkeys(range(8), CHUNK)
    stream = IncomingStream(
        1, opened=True, accepted=True, waits=waits, complete=not waits, missing=missing
    )
    grants.wait(name, source, stream)
    return stream


def grants_of(slots: int) -> tuple[Grants, dict[Source, ProducerSession]]:
    """Two producers have sessions."""
    sessions = {
        source: ProducerSession(1, 1, (), engine_id=f"{source.port}", writes_late=True)
        for source in (ONE, OTHER)
    }
    return Grants(Config(slots=slots), SlotPool(slots), sessions), sessions


def test_a_cancelled_prefill_makes_room_for_the_next_one_at_once() -> None:
    grants, _ = grants_of(4)
    first, second = (asking(grants, name, ONE, waits=True) for name in ("first", "second"))
    grants.grant_free(0.0)
    assert (len(first.slots), len(second.slots)) == (1, 0)
    grants.end_stream("first", ONE, first, LEASE_S, cancelled=True)
    grants.grant_free(0.0)
    assert len(second.slots) == 1
    grants.check_integrity({("second", ONE): second})


def test_streams_that_end_with_their_session_take_no_slots_into_quarantine() -> None:
    grants, sessions = grants_of(4)
    first, second = (asking(grants, name, ONE, waits=False) for name in ("first", "second"))
    grants.grant_free(0.0)
    had = len(first.slots) + len(second.slots)
    del sessions[ONE]
    grants.end_stream("first", ONE, first, LEASE_S, cancelled=False)
    assert grants.grant_free(0.0) == []
    grants.end_stream("second", ONE, second, LEASE_S, cancelled=False)
    grants.session_lost(ONE, first.slots + second.slots, silenced=False)
    assert grants._pool.held == had == 3
    third = asking(grants, "third", OTHER, waits=False)
    grants.grant_free(0.0)
    assert len(third.slots) == 1


def test_slots_of_a_cancelled_stream_count_until_its_producer_has_confirmed() -> None:
    grants, _ = grants_of(4)
    first = asking(grants, "first", ONE, waits=False)
    grants.grant_free(0.0)
    grants.end_stream("first", ONE, first, LEASE_S, cancelled=True)
    second = asking(grants, "second", ONE, waits=False)
    grants.grant_free(0.0)
    assert (len(first.slots), len(second.slots)) == (3, 0), "the last one is for others"
    grants.confirmed("first", ONE)
    grants.grant_free(0.0)
    assert len(second.slots) == 3


def test_the_slot_of_a_stream_that_has_all_goes_to_one_that_waits() -> None:
    """Its transfer has not ended: another rank still sends."""
    grants, _ = grants_of(1)
    first, second = (asking(grants, name, ONE, waits=False) for name in ("first", "second"))
    grants.grant_free(0.0)
    assert (len(first.slots), len(second.slots)) == (1, 0)
    first.missing.clear()
    grants.give_back("first", ONE, first, first.slots[0])
    grants.grant_free(0.0)
    assert (len(first.slots), len(second.slots)) == (0, 1)


class Landing(RuleBasedStateMachine):
    """Grants, beside a model of who may still write into which slot, and until when."""

    @initialize(slots=st.integers(1, 9))
    def start(self, slots: int) -> None:
        self.now = 0.0
        self.pool = SlotPool(slots)
        self.slots = slots
        self.sessions: dict[Source, ProducerSession] = {}
        self.grants = Grants(Config(slots=slots), self.pool, self.sessions)
        self.streams: dict[Key, IncomingStream] = {}
        self.epochs = 0
        self.cancelled: dict[Key, list[int]] = {}
        self.writable: dict[int, tuple[Source, float]] = {}  # after the end of their streams
        self.numbers = iter(range(10**6))

    def granted(self, slots: list[int]) -> None:
        for slot in slots:
            assert self.writable.get(slot, (None, -1.0))[1] <= self.now, "one may still write there"

    def grant_free(self) -> None:
        for tell in self.grants.grant_free(self.now):
            message: Any = tell.message  # type: ignore[union-attr]
            assert (message.transfer, tell.source) in self.streams  # type: ignore[union-attr]
            assert tell.source in self.sessions, "it can be told"  # type: ignore[union-attr]
            self.granted(message.slots)

    @rule(number=st.integers(0, 4), late=st.booleans())
    def session_up(self, number: int, late: bool) -> None:
        source = Source("host", 1 + number, "")
        if source not in self.sessions:
            self.epochs += 1
            engine = f"engine{number // 2}"  # of two ranks each
            self.sessions[source] = ProducerSession(
                self.epochs, 1, (), engine_id=engine, writes_late=late
            )

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), chunks=st.integers(1, 12), waits=st.booleans())
    def load(self, data: st.DataObject, chunks: int, waits: bool) -> None:
        source = data.draw(st.sampled_from(sorted(self.sessions)))
        key = f"transfer{next(self.numbers)}", source
        missing = dict.fromkeys(range(chunks), CHUNK)
        stream = IncomingStream(1, opened=True, waits=waits, planned=chunks, missing=missing)
        self.streams[key] = stream
        self.granted(self.grants.grant(*key, stream, 0 if waits else chunks))

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), complete=st.booleans())
    def accept(self, data: st.DataObject, complete: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.streams)))
        stream = self.streams[key]
        stream.accepted, stream.complete = True, stream.complete or complete
        self.grants.wait(*key, stream)
        self.grant_free()

    @precondition(lambda self: any(stream.slots for stream in self.streams.values()))
    @rule(data=st.data())
    def place(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(k for k, s in self.streams.items() if s.slots)))
        stream = self.streams[key]
        stream.missing.popitem()
        self.grants.give_back(*key, stream, stream.slots[0])
        if stream.missing:
            self.grants.wait(*key, stream)
        else:
            self.end(key, cancelled=False)
        self.grant_free()

    def end(self, key: Key, *, cancelled: bool) -> list[int]:
        stream = self.streams.pop(key)
        until = self.now + LEASE_S
        self.grants.end_stream(*key, stream, until, cancelled=cancelled)
        self.writable |= dict.fromkeys(stream.slots, (key[1], until))
        if cancelled:
            self.cancelled[key] = stream.slots
        self.grant_free()
        return stream.slots

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.streams))), cancelled=True)

    @precondition(lambda self: self.cancelled)
    @rule(data=st.data())
    def confirm(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.cancelled)))
        for slot in self.cancelled.pop(key):
            self.writable.pop(slot, None)
        self.grants.confirmed(*key)
        self.grant_free()

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def session_down(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from(sorted(self.sessions)))
        silenced = not self.sessions.pop(source).writes_late
        lost: list[int] = []
        for key in [key for key in self.streams if key[1] == source]:
            lost += self.end(key, cancelled=False)
        for key in [key for key in self.cancelled if key[1] == source]:
            self.cancelled.pop(key)
        if silenced:
            self.writable = {s: w for s, w in self.writable.items() if w[0] != source}
        self.grants.session_lost(source, lost, silenced=silenced)
        self.grant_free()

    @rule(seconds=st.sampled_from([1.0, LEASE_S / 2, LEASE_S]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.grants.tick(self.now)
        self.cancelled = {
            key: slots for key, slots in self.cancelled.items() if self.grants.is_ending(*key)
        }
        self.grant_free()

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_integrity()
        self.grants.check_integrity(self.streams)

    def teardown(self) -> None:
        for key in list(self.streams):
            self.end(key, cancelled=key[1] in self.sessions)
        self.grants.tick(self.now + 2 * LEASE_S)
        assert self.pool.free == self.slots, "every slot comes home"
        assert not self.grants._holding
        assert not self.grants._waiting
        assert not self.grants._ending


Landing.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestLanding = Landing.TestCase
