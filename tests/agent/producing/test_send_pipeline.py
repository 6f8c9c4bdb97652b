# SPDX-License-Identifier: Apache-2.0
"""How many chunks are under way to a consumer, and when one of them is late."""

import itertools
from typing import Any, cast

import pytest

from pd_connector.agent.page_gate import PageGate
from pd_connector.agent.producing.consumer_sessions import SendPath
from pd_connector.agent.producing.send_pipeline import SendPipeline
from pd_connector.config import Config
from pd_connector.kv.geometry import Geometry, Group, Shard
from pd_connector.memory.slab import Slab
from pd_connector.plan.chunks import plan
from pd_connector.plan.route import routes
from pd_connector.protocol.producing.outgoing import OutgoingChunk
from pd_connector.transport.base import Transport

SLOTS, SLOT_BYTES = 8, 64
CONFIG = Config(stall_timeout_s=10.0)
MOST_WRITES = 3
GROUP = Group(
    kind="attention",
    layers=(0,),
    heads=1,
    key_dim=1,
    value_dim=1,
    page_size=16,
    window=0,
    dtype="bfloat16",
    layout="NHD",
    heads_apart=False,
)
GEOMETRY = Geometry(Shard(first_layer=0, stop_layer=1, tp_rank=0, tp_size=1), (GROUP,))
[ROUTE] = routes(GEOMETRY, GEOMETRY, offered=["raw"], accepted=["raw"])
[CHUNK] = plan([ROUTE], 0, 16, chunk_bytes=SLOT_BYTES)


class Cache:
    """Gathers zeros."""

    last_checksum = b""
    passed = "raw"

    def gather(
        self, route: Any, chunk: Any, pages: Any, slot: memoryview, fence: Any
    ) -> memoryview:
        slot[:] = bytes(len(slot))
        return slot

    on_host = True


class Wire:
    """A transport that begins writes, and ends none by itself."""

    name = "wire"
    copies = False
    verifies = False
    prepares = False

    def __init__(self, sends_from: Slab | None) -> None:
        self.sends_from = sends_from
        self._tokens = itertools.count()

    def device_slots(self, link: object) -> None:
        return None

    def write(self, link: object, header: bytes, payload: memoryview, slot: int) -> int:
        return next(self._tokens)


class Bench:
    """An outbox, and a wire with send slots of its own or without."""

    def __init__(self, *, own_slots: bool) -> None:
        sending = Slab(SLOTS, SLOT_BYTES)
        self.wire = Wire(Slab(SLOTS, SLOT_BYTES) if own_slots else None)
        self.send_pipeline = SendPipeline(CONFIG, 1, cast(Any, Cache()), sending, PageGate())
        self._path = SendPath(cast(Transport, self.wire), 0, read=False)

    def post(self, session: bytes, now: float = 0.0) -> None:
        send = OutgoingChunk("t", "request", session, ROUTE, CHUNK, [0], b"tokens", 0, False, False)
        assert self.send_pipeline.post(send, self._path, now) is None
        self.send_pipeline.check_integrity()

    def arrive(self, token: int) -> None:
        assert self.send_pipeline.chunk_ended(("wire", token)) is not None
        self.send_pipeline.check_integrity()


def test_a_session_has_three_writes_under_way_at_most():
    bench = Bench(own_slots=True)
    for number in range(MOST_WRITES):
        assert b"one" not in bench.send_pipeline.backpressured, number
        bench.post(b"one")
    bench.post(b"two")
    assert set(bench.send_pipeline.backpressured) == {b"one"}
    bench.arrive(0)
    assert set(bench.send_pipeline.backpressured) == set()


def test_a_transport_that_sends_from_the_ranks_slots_takes_as_many_as_there_are():
    bench = Bench(own_slots=False)
    for _ in range(SLOTS):
        bench.post(b"one")
    assert bench.send_pipeline.full
    assert set(bench.send_pipeline.backpressured) == set()


def test_a_write_that_waits_behind_others_which_arrive_is_not_late():
    bench = Bench(own_slots=True)
    for _ in range(MOST_WRITES):
        bench.post(b"one", 0.0)
    bench.post(b"two", 0.0)
    bench.arrive(0)
    assert bench.send_pipeline.in_flight.timed_out(9.0) == set()
    assert bench.send_pipeline.in_flight.timed_out(10.0) == {b"two"}, (
        "another session's chunks do not count for it"
    )
    assert bench.send_pipeline.in_flight.timed_out(18.9) == {b"two"}
    assert bench.send_pipeline.in_flight.timed_out(19.0) == {b"one", b"two"}, (
        "nothing more of it has arrived"
    )


@pytest.mark.parametrize("own_slots", [True, False])
def test_where_chunks_arrive_in_any_order_each_has_its_deadline(own_slots: bool):
    """Those of other transports: one that is lost may be overtaken for ever."""
    bench = Bench(own_slots=own_slots)
    bench.post(b"one", 0.0)
    bench.post(b"one", 0.0)
    bench.arrive(1)
    assert bench.send_pipeline.in_flight.timed_out(5.0) == set()
    assert bench.send_pipeline.in_flight.timed_out(10.0) == (set() if own_slots else {b"one"})
