# SPDX-License-Identifier: Apache-2.0
"""Agents over real sockets while something goes wrong: the cause is named, nothing wrong counts
as received, everything comes home, and the next transfer works."""

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from support.agents import (
    LONG,
    SHORT,
    TRANSPORTS,
    Rank,
    Ranks,
    assert_pages,
    geometry_of,
    ranks,
    until,
)
from support.transports import Meddle, MeddlingTransport
from transport_kinds import NIXL

from pd_connector.agent.commands import Drop, Expect, Revoke
from pd_connector.agent.consuming import receive_pipeline as receive_pipeline
from pd_connector.agent.page_gate import PageGate
from pd_connector.agent.producing import send_pipeline as send_pipeline
from pd_connector.errors import Cause, TransportError
from pd_connector.protocol.wire.header import decode_header, encode_header

__all__ = ["ranks"]

each_transport = pytest.mark.parametrize("transport", ["shm", "shm written", "tcp"])
each_readable = pytest.mark.parametrize("transport", ["shm", NIXL])
each_written = pytest.mark.parametrize("transport", ["shm written", "tcp"])
Written = tuple[bytes, bytes, int] | None
PATIENT = {"connect_timeout_s": 20.0, "session_timeout_s": 10.0}
LATE = (Cause.STALLED, Cause.SESSION_LOST, Cause.UNREACHABLE, Cause.WAIT_TIMEOUT)
"""How a good transfer may end where timeouts are short and the machine is busy."""


def meddling(meddle: Meddle, ends: bool = True) -> dict[str, Any]:
    return {"wrap": lambda inner: MeddlingTransport(inner, meddle, ends)}


def only_first(meddle: Meddle, chunks: int = 1) -> Meddle:
    """Meddle with the first `chunks` chunks only."""
    seen = itertools.count()
    return lambda *chunk: meddle(*chunk) if next(seen) < chunks else chunk


def flipped(header: bytes, payload: bytes, slot: int) -> Written:
    return header, bytes([payload[0] ^ 1]) + payload[1:], slot


def swallowed(header: bytes, payload: bytes, slot: int) -> Written:
    return None


def with_header(**fields: Any) -> Meddle:
    def meddle(header: bytes, payload: bytes, slot: int) -> Written:
        changed = msgspec.structs.replace(decode_header(header), **fields)
        return encode_header(changed), payload, slot

    return meddle


def pair(ranks: Ranks, settings: dict[str, Any], **options: Any) -> tuple[Rank, Rank]:
    producer = ranks(settings, consumes=False, **options)
    return producer, ranks(settings, seed=1, produces=False)


def assert_serves_on(producer: Rank, consumer: Rank, transfer: str = "afterwards") -> None:
    """A good transfer arrives. Short timeouts on a busy machine may cost it another attempt."""
    for attempt in range(5):
        producer.offer(f"{transfer} {attempt}", [11, 12, 13])
        consumer.load(producer.source, f"{transfer} {attempt}", [21, 22, 23])
        finished = consumer.loaded(f"{transfer} {attempt}")
        if finished.cause is None:
            return assert_pages(producer, [11, 12, 13], consumer, [21, 22, 23])
        assert finished.cause in LATE, finished
    pytest.fail(f"no good transfer: {finished}")


@each_written
def test_a_corrupt_chunk_fails_its_load_and_the_next_one_arrives(ranks: Ranks, transport: str):
    settings = LONG | TRANSPORTS[transport]
    producer, consumer = pair(ranks, settings, **meddling(only_first(flipped)))
    others = [consumer.page(page) for page in (4, 6)]
    producer.offer("t", [1])
    consumer.load(producer.source, "t", [5])
    assert consumer.loaded("t").cause == Cause.CHECKSUM
    assert [consumer.page(page) for page in (4, 6)] == others
    assert consumer.count("failed_transfers", cause=Cause.CHECKSUM) == 1
    assert producer.freed("t").cause == Cause.CHECKSUM
    assert_serves_on(producer, consumer)


@each_written
def test_without_checksums_a_corrupt_page_would_count_as_received(
    ranks: Ranks, transport: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(send_pipeline, "checksum_of", lambda *_: b"")
    monkeypatch.setattr(receive_pipeline, "checksum_of", lambda *_: b"")
    settings = LONG | TRANSPORTS[transport]
    producer, consumer = pair(ranks, settings, **meddling(only_first(flipped)))
    producer.offer("t", [1])
    consumer.load(producer.source, "t", [5])
    assert consumer.loaded("t").cause is None
    assert consumer.page(5) != producer.page(1)


def test_a_slot_that_changes_while_it_is_read_is_noticed(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
):
    """A peer that was given up may write late: the bytes are right when checked, and then not."""
    producer, consumer = pair(ranks, LONG | TRANSPORTS["shm written"])
    scatter = consumer.cache.scatter

    def slow_scatter(route: Any, chunk: Any, pages: Any, payload: memoryview, fence: None) -> None:
        monkeypatch.undo()
        payload[0] ^= 1
        scatter(route, chunk, pages, payload, fence)

    monkeypatch.setattr(consumer.cache, "scatter", slow_scatter)
    producer.offer("t", [1])
    consumer.load(producer.source, "t", [5])
    assert consumer.loaded("t").cause == Cause.CHECKSUM
    assert_serves_on(producer, consumer)


def test_a_late_write_between_gather_and_checksum_is_not_certified(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
):
    """A producer given up long ago goes on while another one fills the same landing slot."""
    producer, consumer = pair(ranks, LONG | TRANSPORTS["shm written"])
    producer.offer("first", [1])  # so that the memory is mapped
    consumer.load(producer.source, "first", [4])
    assert consumer.loaded("first").cause is None
    checksum = send_pipeline.checksum_of

    def after_a_late_write(*what: Any) -> bytes:
        landing = consumer.loop.buffers.landing
        for slot in range(landing.slots):
            landing.slot(slot)[0] ^= 1
        return checksum(*what)

    monkeypatch.setattr(send_pipeline, "checksum_of", after_a_late_write)
    producer.offer("t", [1])
    consumer.load(producer.source, "t", [5])
    if consumer.loaded("t").cause is None:
        assert_pages(producer, [1], consumer, [5])


@each_written
@pytest.mark.parametrize(
    ("meddle", "cause"),
    [
        (lambda h, p, s: (h, p[:-1], s), Cause.CHUNK_MISMATCH),
        (lambda h, p, s: (h, p + b"x", s), Cause.CHUNK_MISMATCH),
        (with_header(epoch=1), Cause.STALLED),
        (with_header(identity=b"other"), Cause.CHUNK_MISMATCH),
        (with_header(first_token=1), Cause.CHUNK_MISMATCH),
        (with_header(codec="int8"), Cause.CHUNK_MISMATCH),
        (with_header(checksum=b""), Cause.CHECKSUM),
        (with_header(transfer="another"), Cause.STALLED),
        (with_header(sequence=2**60), Cause.STALLED),
        (lambda h, p, s: (b"\xc1 no header", p, s), Cause.STALLED),
        (lambda h, p, s: (h, p, (s + 1) % 4), Cause.STALLED),
        (swallowed, Cause.STALLED),
    ],
    ids=[
        *("shorter", "longer", "epoch", "identity", "range", "codec", "checksum_of", "transfer"),
        *("sequence", "no header", "slot", "lost"),
    ],
)
def test_a_chunk_that_is_not_the_wanted_one_never_counts(
    ranks: Ranks, transport: str, meddle: Meddle, cause: Cause
):
    settings = SHORT | TRANSPORTS[transport] | PATIENT
    settings |= {"stall_timeout_s": 1.0 if cause is Cause.STALLED else 20.0}
    producer, consumer = pair(ranks, settings, **meddling(only_first(meddle)))
    producer.offer("t", [1])
    consumer.load(producer.source, "t", [5])
    assert consumer.loaded("t").cause == cause
    assert_serves_on(producer, consumer)


@each_written
def test_writes_that_never_end_cost_the_session_and_no_send_slot(ranks: Ranks, transport: str):
    settings = LONG | TRANSPORTS[transport] | {"stall_timeout_s": 0.5, "lease_s": 1.0}
    settings |= {"slots": 6}  # of which a producer that writes late may have four
    meddle = only_first(swallowed, chunks=4)
    producer, consumer = pair(ranks, settings, **meddling(meddle, ends=False))
    for transfer in "abcd":
        producer.offer(transfer, [1])
        consumer.load(producer.source, transfer, [ord(transfer) - ord("a")])
    for transfer in "abcd":
        assert consumer.loaded(transfer).cause in (Cause.STALLED, Cause.SESSION_LOST)
    until(lambda: producer.gauge("send_slots") == 0)
    until(lambda: consumer.gauge("producer_sessions") == 0)
    assert_serves_on(producer, consumer)


@each_written
def test_a_producer_that_froze_is_given_up_and_serves_again_for_good(ranks: Ranks, transport: str):
    def freeze(header: bytes, payload: bytes, slot: int) -> Written:
        time.sleep(2.0)
        return header, payload, slot

    settings = SHORT | PATIENT | TRANSPORTS[transport]
    settings |= {"stall_timeout_s": 3.0, "session_timeout_s": 1.0}
    producer, consumer = pair(ranks, settings, **meddling(only_first(freeze)))
    producer.offer("t", [1])
    consumer.load(producer.source, "t", [5])
    assert consumer.loaded("t").cause == Cause.SESSION_LOST
    # The older session of this consumer ends while the newer one is in use.
    for i in range(4):
        assert_serves_on(producer, consumer, f"{i}")
        time.sleep(0.3)


@each_transport
def test_a_consumer_that_froze_loses_its_transfers_and_fetches_again(ranks: Ranks, transport: str):
    settings = LONG | TRANSPORTS[transport] | {"session_timeout_s": 2.0}
    producer, consumer = pair(ranks, settings)
    assert_serves_on(producer, consumer, "before")
    consumer.load(producer.source, "t", [5], wait=True)
    until(lambda: producer.gauge("outgoing_transfers"))
    loop = consumer.loop
    step = loop.step
    loop.step = lambda now: time.sleep(0.01)  # type: ignore[method-assign]
    until(lambda: producer.gauge("consumer_sessions") == producer.gauge("outgoing_transfers") == 0)
    loop.step = step  # type: ignore[method-assign]
    assert consumer.loaded("t").cause == Cause.SESSION_LOST
    for i in range(3):
        assert_serves_on(producer, consumer, f"{i}")


@each_written
@pytest.mark.parametrize("streamed", [0, 1, 2])
def test_a_load_dropped_after_some_chunks_frees_both_sides(
    ranks: Ranks, transport: str, streamed: int
):
    seen: list[int] = []

    def first_chunks(header: bytes, payload: bytes, slot: int) -> Written:
        seen.append(slot)
        return (header, payload, slot) if len(seen) <= streamed else None

    settings = LONG | TRANSPORTS[transport]
    geometry = geometry_of(page_size=1 << 13)
    producer = ranks(settings, geometry=geometry, consumes=False, **meddling(first_chunks))
    consumer = ranks(settings, geometry=geometry, produces=False, seed=1)
    producer.offer("t", [1, 2, 3, 4])
    consumer.load(producer.source, "t", [5, 6, 7, 8])
    until(lambda: consumer.count("received_chunks") == streamed and len(seen) > streamed)
    consumer.agent.submit(Drop("load of t", Cause.ABORTED))
    assert consumer.loaded("t").cause == Cause.ABORTED
    assert producer.freed("t").cause == Cause.ABORTED


@each_written
def test_a_producer_that_ends_mid_transfer_fails_its_loads_at_once(ranks: Ranks, transport: str):
    settings = LONG | TRANSPORTS[transport] | {"lease_s": 1.0}
    producer, consumer = pair(ranks, settings, **meddling(swallowed))
    producer.offer("t", [1])
    consumer.load(producer.source, "t", [5])
    until(lambda: producer.count("sent_chunks"))
    ranks.stop(producer)
    assert consumer.loaded("t").cause == Cause.SESSION_LOST
    assert_serves_on(ranks(settings, consumes=False), consumer)


@each_written
def test_a_consumer_that_ends_mid_transfer_costs_no_pages(ranks: Ranks, transport: str):
    settings = LONG | TRANSPORTS[transport] | {"lease_s": 60.0}
    producer, consumer = pair(ranks, settings, **meddling(only_first(swallowed)))
    producer.offer("t", [1])
    consumer.load(producer.source, "t", [5])
    until(lambda: producer.count("sent_chunks"))
    ranks.stop(consumer)
    assert producer.freed("t").cause == Cause.SESSION_LOST
    assert_serves_on(producer, ranks(settings, produces=False, seed=2))


# Chunks that the consumer reads.


class MeddlingReader(MeddlingTransport):
    """Hands on what `meddle` makes of a read's send slot, length, landing slot and header; a read
    of which it makes None never ends."""

    def __init__(self, inner: Any, meddle: Callable[..., Any]) -> None:
        super().__init__(inner, lambda *chunk: chunk)
        self._meddle_read = meddle

    def read(self, source: Any, *what: Any) -> None:
        if (changed := self._meddle_read(*what)) is not None:
            self.inner.read(source, *changed)


def reading_pair(
    ranks: Ranks, transport: str, meddle: Callable[..., Any], settings: dict[str, Any]
) -> tuple[Rank, Rank]:
    seen = itertools.count()

    def first(*what: Any) -> Any:
        return meddle(*what) if next(seen) == 0 else what

    # NIXL keeps a busy machine busy for a second when it is set up.
    settings = settings | {"connect_timeout_s": 20.0, "session_timeout_s": 4.0}
    settings = settings | {"transports": (transport,), "direction": "read"}
    producer = ranks(settings, consumes=False)
    wrap = lambda inner: MeddlingReader(inner, first)  # noqa: E731
    return producer, ranks(settings, produces=False, seed=1, wrap=wrap)


def refuse(*what: Any) -> None:
    raise TransportError("no such memory")


@each_readable
@pytest.mark.parametrize(
    ("meddle", "causes"),
    [
        (lambda send, n, slot, header: None, {Cause.STALLED, Cause.SESSION_LOST}),
        (lambda send, n, slot, header: (send, n - 1, slot, header), {Cause.CHUNK_MISMATCH}),
        (
            lambda send, n, slot, header: (send, n, (slot + 1) % 4, header),
            {Cause.STALLED, Cause.SESSION_LOST},
        ),
        (lambda send, n, slot, header: ((send + 1) % 4, n, slot, header), {Cause.CHECKSUM}),
        (lambda send, n, slot, header: (send, n, slot, b"none"), {Cause.STALLED}),
        (refuse, {Cause.TRANSPORT}),
    ],
    ids=["never ends", "shorter", "landing slot", "send slot", "no header", "refused"],
)
def test_a_read_that_goes_wrong_fails_its_load_and_all_slots_come_home(
    ranks: Ranks, transport: str, meddle: Any, causes: set[Cause]
):
    settings = SHORT | {"stall_timeout_s": 1.0 if Cause.STALLED in causes else 20.0}
    settings |= {"lease_s": 5.0}  # longer than NIXL takes to set up
    producer, consumer = reading_pair(ranks, transport, meddle, settings)
    others = [consumer.page(page) for page in (4, 6)]
    producer.offer("t", [1])
    consumer.load(producer.source, "t", [5])
    finished = consumer.loaded("t")
    assert finished.cause in causes
    assert [consumer.page(page) for page in (4, 6)] == others
    until(lambda: producer.gauge("send_slots") == 0)
    until(lambda: consumer.gauge("landing_slots") == 0)
    assert_serves_on(producer, consumer)


@each_readable
@pytest.mark.parametrize("how", ["dropped", "producer ends", "consumer ends"])
def test_an_end_in_the_middle_of_a_read_costs_no_slot(ranks: Ranks, transport: str, how: str):
    asked = threading.Event()

    def never(*what: Any) -> None:
        asked.set()

    # A session that is lost must end before a lease that nobody extends, on a busy machine, too.
    # The read must not stall before the test ends it.
    settings = SHORT | {"lease_s": 30.0 if how == "consumer ends" else 2.0, "stall_timeout_s": 4.0}
    producer, consumer = reading_pair(ranks, transport, never, settings)
    producer.offer("t", [1])
    consumer.load(producer.source, "t", [5])
    assert asked.wait(60)
    if how == "dropped":
        consumer.agent.submit(Drop("load of t", Cause.ABORTED))
        assert consumer.loaded("t").cause == Cause.ABORTED
        assert producer.freed("t").cause == Cause.ABORTED
    elif how == "producer ends":
        ranks.stop(producer)
        assert consumer.loaded("t").cause == Cause.SESSION_LOST
    else:
        ranks.stop(consumer)
        assert producer.freed("t").cause == Cause.SESSION_LOST
    if how != "producer ends":
        until(lambda: producer.gauge("send_slots") == 0)
    if how != "consumer ends":
        until(lambda: consumer.gauge("landing_slots") == 0, "at the end of a lease at the latest")


@each_readable
def test_without_checksums_a_read_of_other_bytes_would_count(
    ranks: Ranks, transport: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(send_pipeline, "checksum_of", lambda *_: b"")
    monkeypatch.setattr(receive_pipeline, "checksum_of", lambda *_: b"")

    def other_slot(send: int, nbytes: int, slot: int, header: bytes) -> Any:
        return (send + 1) % 4, nbytes, slot, header

    producer, consumer = reading_pair(ranks, transport, other_slot, LONG)
    producer.offer("t", [1])
    consumer.load(producer.source, "t", [5])
    assert consumer.loaded("t").cause is None
    assert consumer.page(5) != producer.page(1)


# A request that is preempted while its pages are read.


def preempted_while_read(ranks: Ranks, transport: str, guarded: bool = True) -> tuple[Rank, Rank]:
    """A producer whose engine takes pages back, and overwrites them, while they
    are read; then it computes the same KV in other pages. The guard makes the engine wait until they are read."""
    producer, consumer = ranks.pair(LONG | TRANSPORTS[transport])
    cache, reading, overwritten = producer.cache, threading.Event(), threading.Event()
    gather, in_place = cache.gather, cache.in_place
    for layer in producer.layers.values():
        layer[8], layer[9] = layer[1], layer[2]

    def pause() -> None:
        if not reading.is_set():
            reading.set()
            overwritten.wait(0.2 if guarded else 20.0)

    def slow_gather(*what: Any) -> memoryview:
        pause()
        return gather(*what)

    def slowly_sent(*what: Any) -> memoryview | None:
        lies = in_place(*what)
        if lies is not None:
            pause()
        return lies

    cache.gather = slow_gather  # type: ignore[method-assign]
    cache.in_place = slowly_sent  # type: ignore[method-assign]
    producer.agent.submit(Expect("t"))
    producer.offer("t", [1, 2], computed=8)
    consumer.load(producer.source, "t", [5, 6], wait=True)
    assert reading.wait(60)
    producer.agent.submit(Revoke("t", "offer of t"))
    for layer in producer.layers.values():
        layer[1], layer[2] = 0.0, 0.0
    overwritten.set()
    producer.offer("t", [8, 9])
    assert consumer.loaded("t").cause is None
    return producer, consumer


@pytest.mark.parametrize("transport", ["shm", "shm written", "tcp"])
def test_pages_are_not_read_once_the_engine_has_them_back(ranks: Ranks, transport: str):
    producer, consumer = preempted_while_read(ranks, transport)
    assert_pages(producer, [8, 9], consumer, [5, 6])
    assert producer.freed("t").cause is None


@pytest.mark.parametrize("transport", ["shm", "shm written", "tcp"])
def test_without_the_gate_someone_elses_kv_would_count(
    ranks: Ranks, transport: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(PageGate, "shut", lambda self, request, timeout_s: True)
    monkeypatch.setattr(PageGate, "open", lambda self, request: None)
    producer, consumer = preempted_while_read(ranks, transport, guarded=False)
    assert consumer.page(5) != producer.page(8)
    assert producer.freed("t").cause is None


def test_a_chunk_whose_gate_was_shut_before_it_was_gathered_comes_from_the_new_pages(
    ranks: Ranks,
):
    """The agent hears of the shut gate before it hears of the preemption."""
    producer, consumer = ranks.pair(LONG)
    producer.agent.submit(Expect("t"))
    consumer.load(producer.source, "t", [5, 6], wait=True)
    until(lambda: producer.gauge("consumer_sessions"))
    assert producer.loop.producer_side is not None
    transfers = producer.loop.producer_side._producer._transfers
    until(lambda: "t" in transfers and transfers["t"].streams)
    producer.agent._gate.shut("offer of t")
    producer.offer("t", [1, 2], computed=8)
    time.sleep(0.2)
    assert producer.count("sent_chunks") == 0
    producer.agent._gate.open("offer of t")
    producer.agent.submit(Revoke("t", "offer of t"))
    producer.offer("t", [8, 9])
    assert consumer.loaded("t").cause is None
    assert_pages(producer, [8, 9], consumer, [5, 6])
