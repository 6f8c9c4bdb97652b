# SPDX-License-Identifier: Apache-2.0
"""The consumer's rules, one at a time. Orders and faults in combination: test_pair.py."""

from typing import Any

import msgspec
import pytest
from support.machines import CONFIG, GEOMETRY, PAGE_BYTES, identity_of

from pd_connector import wire
from pd_connector.consumer import Consumer, Dial, Finished, Load, Place, Source, Tell
from pd_connector.errors import Cause
from pd_connector.slab import SlotPool

SOURCE = Source("127.0.0.1", 1, "engine")
EPOCH = 5


class Bench:
    """A consumer, its pool, and a load of five pages (four chunks for three slots)."""

    def __init__(self, one_sided: bool = True, pages: int = 5) -> None:
        self.pool = SlotPool(CONFIG.slots)
        self.consumer = Consumer(CONFIG, GEOMETRY, self.pool, one_sided)
        self.load = Load("request", "t", SOURCE, identity_of("t"), 0, range(20, 20 + pages), False)

    def open(self) -> wire.Open:
        assert self.consumer.load(self.load, 0.0) == [Dial(SOURCE)]
        (tell,) = self.consumer.session_up(SOURCE, EPOCH, 0.0)
        assert isinstance(tell, Tell)
        assert isinstance(tell.message, wire.Open)
        return tell.message

    def header(self, sequence: int, **changes: Any) -> wire.ChunkHeader:
        chunk = self.consumer._transfers["t"].missing[sequence]
        _, *ranges = chunk
        nbytes = chunk.nbytes(GEOMETRY)
        header = wire.ChunkHeader(
            "t", EPOCH, sequence, identity_of("t"), *ranges, "raw", nbytes, b"sum"
        )
        return msgspec.structs.replace(header, **changes)

    def land(self, sequence: int, slot: int) -> list[Any]:
        """A right chunk lands and is placed; what comes of it."""
        header = self.header(sequence)
        payload = memoryview(bytes(header.nbytes))
        (place,) = self.consumer.landed(header, slot, payload, 1.0)
        assert isinstance(place, Place)
        return self.consumer.placed(place, None, "", 1.0)


def test_a_load_dials_then_opens_with_the_slots_there_are():
    bench = Bench()
    message = bench.open()
    assert (message.first_page, message.stop_page) == (0, 5)
    assert message.slots == [0, 1, 2]
    assert bench.pool.free == 0


def test_a_load_that_waits_for_its_prefill_holds_no_slots():
    bench = Bench()
    bench.load = bench.load._replace(wait=True)
    assert bench.open().slots == []
    (tell,) = bench.consumer.accept(SOURCE, wire.Accept("t", "raw", 4), 1.0)
    assert tell == Tell(SOURCE, wire.Credit("t", [0, 1, 2]))


def test_a_returned_slot_is_granted_again_and_the_last_chunk_ends_the_load():
    bench = Bench()
    bench.open()
    bench.consumer.accept(SOURCE, wire.Accept("t", "raw", 4), 0.5)
    assert bench.land(2, slot=1) == [Tell(SOURCE, wire.Credit("t", [1]))]
    assert bench.land(0, slot=0) == []
    assert bench.land(3, slot=1) == []
    done, finished = bench.land(1, slot=2)
    assert done == Tell(SOURCE, wire.Done("t"))
    assert finished == Finished("request", None, "", 2 * 5 * PAGE_BYTES, 4, 1.0)
    assert bench.pool.held == 0


def test_a_chunk_goes_into_the_pages_of_its_range():
    bench = Bench()
    bench.open()
    header = bench.header(3)
    payload = memoryview(bytes(header.nbytes))
    (place,) = bench.consumer.landed(header, 0, payload, 1.0)
    assert isinstance(place, Place)
    assert list(place.pages) == [24]


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": EPOCH + 1},
        {"identity": b"other"},
        {"first_layer": 1},
        {"stop_layer": 2},
        {"first_page": 1},
        {"stop_page": 5},
        {"codec": "int8"},
        {"nbytes": 1},
        {"nbytes": 2**62},
    ],
)
def test_a_chunk_that_does_not_fit_the_plan_fails_the_load(changes: dict[str, Any]):
    bench = Bench()
    bench.open()
    header = bench.header(0)
    payload = memoryview(bytes(header.nbytes))
    wrong = msgspec.structs.replace(header, **changes)
    cancel, finished = bench.consumer.landed(wrong, 0, payload, 1.0)
    assert cancel == Tell(SOURCE, wire.Cancel("t", Cause.CHUNK_MISMATCH))
    assert finished.cause == Cause.CHUNK_MISMATCH


def test_a_payload_of_another_length_fails_the_load():
    bench = Bench()
    bench.open()
    _, finished = bench.consumer.landed(bench.header(0), 0, memoryview(b"short"), 1.0)
    assert finished.cause == Cause.CHUNK_MISMATCH


def test_a_chunk_that_came_already_or_belongs_to_nobody_is_dropped():
    bench = Bench()
    bench.open()
    first = bench.header(0)
    payload = memoryview(bytes(first.nbytes))
    bench.land(0, slot=0)
    nobodys = msgspec.structs.replace(first, transfer="u")
    assert bench.consumer.landed(first, 1, payload, 1.0) == []
    assert bench.consumer.landed(nobodys, 1, payload, 1.0) == []
    assert bench.consumer.landed(bench.header(1), 0, payload, 1.0) == [], "slot 0 is not its"


@pytest.mark.parametrize(("chunks", "codec"), [(5, "raw"), (3, "raw"), (4, "int8"), (2**62, "raw")])
def test_another_plan_than_ours_fails_the_load(chunks: int, codec: str):
    bench = Bench()
    bench.open()
    _, finished = bench.consumer.accept(SOURCE, wire.Accept("t", codec, chunks), 1.0)
    assert finished.cause == Cause.CHUNK_MISMATCH


def test_another_producer_cannot_speak_for_this_one():
    bench = Bench()
    bench.open()
    other = SOURCE._replace(port=2)
    assert bench.consumer.refuse(other, wire.Refuse("t", "model", ""), 1.0) == []
    assert bench.consumer.accept(other, wire.Accept("t", "raw", 99), 1.0) == []
    bench.consumer.cancelled(other, "t", 1.0)
    assert bench.consumer.transfers == 1
    assert bench.pool.held == 3


@pytest.mark.parametrize(
    ("accepted", "patience", "cause"),
    [
        (False, CONFIG.stall_timeout_s, Cause.WAIT_TIMEOUT),
        (True, CONFIG.stall_timeout_s, Cause.STALLED),
    ],
)
def test_silence_fails_a_load(accepted: bool, patience: float, cause: Cause):
    bench = Bench()
    bench.open()
    if accepted:
        bench.consumer.accept(SOURCE, wire.Accept("t", "raw", 4), 0.0)
    assert bench.consumer.tick(patience - 0.1) == []
    _, finished = bench.consumer.tick(patience)
    assert finished.cause == cause


def test_a_load_without_a_session_fails_after_connect_timeout():
    bench = Bench()
    bench.consumer.load(bench.load, 0.0)
    (finished,) = bench.consumer.tick(CONFIG.connect_timeout_s)
    assert finished.cause == Cause.UNREACHABLE


def test_a_transfer_that_waits_for_slots_of_ours_is_not_failed_for_it():
    bench = Bench()
    bench.open()
    second = bench.load._replace(request="second", transfer="u")
    bench.consumer.load(second, 0.0)
    bench.consumer.accept(SOURCE, wire.Accept("u", "raw", 4), 0.0)
    for i in range(1, 5):
        now = 0.9 * i * CONFIG.stall_timeout_s
        bench.consumer._transfers["t"].deadline = now + 1
        assert bench.consumer.tick(now) == []


def test_slots_of_an_ended_load_wait_for_the_producers_confirmation():
    bench = Bench()
    bench.open()
    bench.consumer.drop("request", Cause.ABORTED, 1.0)
    assert (bench.pool.free, bench.pool.held) == (0, 3)
    bench.consumer.cancelled(SOURCE, "t", 1.0)
    assert (bench.pool.free, bench.pool.held) == (3, 0)


def test_without_a_confirmation_slots_come_home_when_the_lease_would_have_ended():
    bench = Bench()
    bench.open()
    bench.consumer.drop("request", Cause.ABORTED, 1.0)
    bench.consumer.tick(1.0 + CONFIG.lease_s - 0.1)
    assert bench.pool.free == 0
    bench.consumer.tick(1.0 + CONFIG.lease_s)
    assert bench.pool.free == 3


def test_free_slots_are_granted_in_turn():
    bench = Bench()
    bench.open()
    second = bench.load._replace(request="second", transfer="u")
    bench.consumer.load(second, 0.0)
    bench.consumer.accept(SOURCE, wire.Accept("t", "raw", 4), 0.5)
    bench.consumer.accept(SOURCE, wire.Accept("u", "raw", 4), 0.5)
    assert bench.land(0, slot=0) == [Tell(SOURCE, wire.Credit("t", [0]))]
    assert bench.land(1, slot=1) == [Tell(SOURCE, wire.Credit("u", [1]))]


def test_a_transfer_is_loaded_by_one_request_at_a_time():
    bench = Bench()
    bench.open()
    (finished,) = bench.consumer.load(bench.load._replace(request="another"), 1.0)
    assert (finished.request, finished.cause) == ("another", Cause.DUPLICATE)
    assert bench.consumer.transfers == 1


def test_what_is_held_or_loading_is_spoken_for_and_what_is_dropped_is_not():
    bench = Bench()
    bench.open()
    assert bench.consumer.hold("waiting", "u", SOURCE) == [Dial(SOURCE)]
    assert bench.consumer.wanted(SOURCE) == ["t", "u"]
    assert bench.consumer.drop("waiting", Cause.ABORTED, 1.0) == [
        Tell(SOURCE, wire.Cancel("u", Cause.ABORTED))
    ]
    assert bench.consumer.wanted(SOURCE) == ["t"]


def test_a_drop_before_the_session_stands_is_told_once_it_does():
    bench = Bench()
    bench.consumer.hold("request", "t", SOURCE)
    bench.consumer.drop("request", Cause.ABORTED, 0.0)
    told = bench.consumer.session_up(SOURCE, EPOCH, 1.0)
    assert told == [Tell(SOURCE, wire.Cancel("t", Cause.ABORTED))]
