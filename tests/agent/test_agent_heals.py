# SPDX-License-Identifier: Apache-2.0
"""A connection that dies, however it dies, is found and made again: one transfer is lost at most where nobody
has to wait for a timeout."""

import itertools
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from support.agents import KEY, LONG, Rank, Ranks, assert_pages, ranks, until  # noqa: F401
from support.leftovers import resident_bytes
from support.relay import Relay
from support.vanishing import forget

from pd_connector.errors import Cause
from pd_connector.protocol.wire.peers import Source
from pd_connector.transport.base import Transport

SETTINGS: dict[str, Any] = LONG | {
    "transports": ("tcp",),
    "heartbeat_s": 0.1,
    "session_timeout_s": 4.0,
    "stall_timeout_s": 4.0,
    "connect_timeout_s": 10.0,
}
SHORTER = SETTINGS | {
    "lease_s": 3.0,
    "session_timeout_s": 2.0,
    "stall_timeout_s": 2.0,
    "connect_timeout_s": 3.0,
    "wait_timeout_s": 3.0,
}
"""On a busy machine more of them pass than a test wants: transfers are tried again then."""
TRANSFERS = 6

each_key = pytest.mark.parametrize("key", ["", KEY], ids=["plain", "key"])


class Detour:
    """Makes agents whose peers reach their data port through a relay."""

    def __init__(self) -> None:
        self.relays: list[Relay] = []

    def __call__(self, transport: Transport) -> Transport:
        """What `Agent` makes of a transport."""
        if transport.label != "tcp":
            return transport
        address = msgspec.msgpack.decode(transport.address())
        self.relays.append(Relay(address[1]))
        address[1] = self.relays[-1].port
        transport.address = lambda: msgspec.msgpack.encode(address)  # type: ignore[method-assign]
        return transport


@pytest.fixture
def detour() -> Iterator[Detour]:
    made = Detour()
    yield made
    for relay in made.relays:
        relay.close()


def transfer(
    producer: Rank,
    consumer: Rank,
    name: str,
    source: Source | None = None,
    pages: tuple[list[int], list[int]] = ([5, 3], [20, 1]),
) -> bool:
    """Whether a transfer has arrived; if so it is right. `pages`: the producer's, and the consumer's."""
    sent, received = pages
    producer.offer(name, sent)
    consumer.load(source or producer.source, name, received)
    ended = consumer.loaded(name)
    if ended.cause is None:
        assert_pages(producer, sent, consumer, received)
    return ended.cause is None


@each_key
@pytest.mark.parametrize("fault", [Relay.forget, Relay.reset], ids=["forgotten", "reset"])
def test_transfers_after_a_connection_was_lost_arrive(
    ranks: Ranks,  # noqa: F811
    detour: Detour,
    key: str,
    fault: Callable[[Relay], None],
) -> None:
    settings = SETTINGS | {"key": key}
    producer = ranks(settings, consumes=False, wrap=detour)
    consumer = ranks(settings, seed=1, produces=False)
    assert transfer(producer, consumer, "before")
    (relay,) = detour.relays
    for round_ in range(2):
        fault(relay)
        arrived = [transfer(producer, consumer, f"{round_}.{n}") for n in range(TRANSFERS)]
        assert arrived[1:] == [True] * (TRANSFERS - 1), "one transfer is lost at most"
    assert relay.accepted >= 3


@each_key
def test_an_idle_connection_that_was_forgotten_costs_no_transfer(
    ranks: Ranks,  # noqa: F811
    detour: Detour,
    key: str,
) -> None:
    settings = SETTINGS | {"key": key}
    producer = ranks(settings, consumes=False, wrap=detour)
    consumer = ranks(settings, seed=1, produces=False)
    assert transfer(producer, consumer, "before")
    (relay,) = detour.relays
    relay.forget()
    deadline = time.monotonic() + 30
    while relay.accepted < 2:
        assert time.monotonic() < deadline, "no agent has dialled again"
        time.sleep(0.05)
    assert transfer(producer, consumer, "after")


@each_key
def test_stalled_transfers_leave_no_memory_behind(
    ranks: Ranks,  # noqa: F811
    detour: Detour,
    key: str,
) -> None:
    settings = SHORTER | {"key": key, "slot_mib": 4}
    producer = ranks(settings, consumes=False, wrap=detour, pages=4096)
    consumer = ranks(settings, seed=1, produces=False, pages=4096)
    pages = list(range(4096))  # 2.5 MiB
    resident: list[int] = []
    for number in range(7):
        name = str(number)
        if number:
            detour.relays[0].forget()
        producer.offer(name, pages)
        consumer.load(producer.source, name, pages)
        consumer.loaded(name)
        resident.append(resident_bytes())
        serves_again(producer, consumer, f"after {name}")  # or nothing more would be asked
    # Slots are touched for the first time in some of them; what stays behind grows with each.
    growth = [after - before for before, after in itertools.pairwise(resident)]
    assert statistics.median(growth) < 1 << 20, growth


MANY = list(range(1, 21))


def move_many(producer: Rank, consumer: Rank, name: str, source: Source | None = None) -> bool:
    """As `transfer`, with too much KV to come at once."""
    return transfer(producer, consumer, name, source, (MANY, MANY))


def serves_again(producer: Rank, consumer: Rank, name: str, source: Source | None = None) -> None:
    """A transfer arrives, after some that may be lost. If several have waited without an answer, nothing is
    asked of the producer for a while."""
    numbers = itertools.count()
    until(lambda: move_many(producer, consumer, f"{name} {next(numbers)}", source))


@each_key
@pytest.mark.parametrize("silently", [False, True], ids=["reset", "forgotten"])
@pytest.mark.parametrize("nbytes", [1, 40, 3000])
def test_a_connection_that_ends_within_a_chunk_leaves_right_pages_and_serves_again(
    ranks: Ranks,  # noqa: F811
    detour: Detour,
    key: str,
    silently: bool,
    nbytes: int,
) -> None:
    settings = SHORTER | {"key": key}
    producer = ranks(settings, consumes=False, wrap=detour)
    consumer = ranks(settings, seed=1, produces=False)
    serves_again(producer, consumer, "before")
    (relay,) = detour.relays
    relay.cut_after(nbytes, silently=silently)
    until(lambda: move_many(producer, consumer, "cut") or relay.has_cut)
    assert relay.has_cut
    serves_again(producer, consumer, "after")
    until(lambda: producer.gauge("send_slots") == consumer.gauge("landing_slots") == 0)


@each_key
def test_a_data_port_that_never_speaks_keeps_only_the_first_transfers_waiting(
    ranks: Ranks,  # noqa: F811
    detour: Detour,
    key: str,
) -> None:
    settings = SETTINGS | {"key": key, "stall_timeout_s": 1.5, "session_timeout_s": 10.0}
    producer = ranks(settings, consumes=False, wrap=detour)
    consumer = ranks(settings, seed=1, produces=False)
    (relay,) = detour.relays
    relay.deafen()
    ended = [in_vain(producer, consumer, f"not heard {n}", producer.source) for n in range(6)]
    assert [cause for cause, _ in ended] == [Cause.STALLED] * 6
    assert ["in a row" in detail for _, detail in ended] == [False] * 2 + [True] * 4
    until(
        lambda: producer.gauge("leased_pages") == 0, "the producer is told that nobody wants them"
    )
    relay.deafen(False)
    serves_again(producer, consumer, "heard")


def in_vain(producer: Rank, consumer: Rank, name: str, source: Source) -> tuple[Cause | None, str]:
    """How a load has ended that does not arrive."""
    producer.offer(name, MANY)
    consumer.load(source, name, MANY)
    ended = consumer.loaded(name)
    return ended.cause, ended.detail


@each_key
def test_a_control_port_that_never_speaks_keeps_only_the_first_transfers_waiting(
    ranks: Ranks,  # noqa: F811
    key: str,
) -> None:
    settings = SHORTER | {"key": key, "connect_timeout_s": 1.0}
    producer = ranks(settings, consumes=False)
    consumer = ranks(settings, seed=1, produces=False)
    relay = Relay(producer.agent.port)
    relay.deafen()
    try:
        source = producer.source._replace(port=relay.port)
        ended = [in_vain(producer, consumer, f"not heard {n}", source) for n in range(6)]
        assert [cause for cause, _ in ended] == [Cause.UNREACHABLE] * 6
        assert ["in a row" in detail for _, detail in ended] == [False] * 2 + [True] * 4
        relay.deafen(False)
        serves_again(producer, consumer, "heard", source)
    finally:
        relay.close()


@each_key
@pytest.mark.parametrize("fault", [Relay.forget, Relay.reset], ids=["half-open", "reset"])
def test_a_control_connection_that_is_lost_after_the_handshake_is_made_anew(
    ranks: Ranks,  # noqa: F811
    key: str,
    fault: Callable[[Relay], None],
) -> None:
    settings = SHORTER | {"key": key}
    producer = ranks(settings, consumes=False)
    consumer = ranks(settings, seed=1, produces=False)
    relay = Relay(producer.agent.port)
    try:
        source = producer.source._replace(port=relay.port)
        serves_again(producer, consumer, "before", source)
        for round_ in range(2):
            fault(relay)
            serves_again(producer, consumer, f"after {round_}", source)
        until(lambda: producer.gauge("consumer_sessions") == 1, "the lost ones are forgotten")
        until(lambda: not (producer.gauge("leased_pages") or producer.gauge("send_slots")))
    finally:
        relay.close()


@each_key
def test_a_producer_that_accepts_and_never_speaks_costs_its_own_transfers_only(
    ranks: Ranks,  # noqa: F811
    key: str,
) -> None:
    settings = SHORTER | {"key": key, "connect_timeout_s": 1.0}
    producer = ranks(settings, consumes=False)
    consumer = ranks(settings, seed=1, produces=False)
    relay = Relay(producer.agent.port)
    relay.deafen()
    try:
        silent = producer.source._replace(port=relay.port)
        for number in range(3):
            consumer.load(silent, f"silent {number}", [1])
        serves_again(producer, consumer, "meanwhile")
        for number in range(3):
            assert consumer.loaded(f"silent {number}").cause is Cause.UNREACHABLE
        relay.deafen(False)
        serves_again(producer, consumer, "once it speaks", silent)
    finally:
        relay.close()


PATIENT: dict[str, Any] = LONG | {
    "transports": ("tcp",),
    "lease_s": 300.0,
    "session_timeout_s": 300.0,
    "stall_timeout_s": 300.0,
    "connect_timeout_s": 300.0,
}
"""No clock of the connector runs out within a test: only packets that are not acknowledged tell that a connection
is gone."""


def ports(rank: Rank, which: str) -> list[int]:
    """Ports of a producer to which consumers hold connections."""
    data = [msgspec.msgpack.decode(t.address())[1] for t in rank.transports]
    return {"data": data, "control": [rank.agent.port], "both": [*data, rank.agent.port]}[which]


@each_key
@pytest.mark.parametrize("which", ["data", "control", "both"])
def test_a_connection_whose_packets_vanish_is_made_anew_long_before_any_timeout(
    ranks: Ranks,  # noqa: F811
    key: str,
    which: str,
) -> None:
    producer, consumer = ranks.pair(PATIENT | {"key": key})
    assert transfer(producer, consumer, "before")
    for round_ in range(2):
        assert forget(*ports(producer, which)) >= 2
        arrived = [transfer(producer, consumer, f"{round_}.{n}") for n in range(TRANSFERS)]
        assert arrived[1:] == [True] * (TRANSFERS - 1), "one transfer is lost at most"
    ranks.stop(producer)  # its sessions with consumers that were forgotten end by their silence


@each_key
@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_an_agent_that_is_busy_is_not_dialled_again(
    ranks: Ranks,  # noqa: F811
    key: str,
    side: str,
) -> None:
    """For longer than it takes to find out that a connection is gone; messages and chunks wait for it."""
    producer, consumer = ranks.pair(PATIENT | {"key": key})
    assert transfer(producer, consumer, "before")
    busy = {"producer": producer, "consumer": consumer}[side]
    begun, release = threading.Event(), threading.Event()
    step = busy.loop.step

    def held_up(now: float) -> None:
        begun.set()
        release.wait(60)
        step(now)

    busy.loop.step = held_up  # type: ignore[method-assign]
    assert begun.wait(60)
    producer.offer("meanwhile", MANY)
    consumer.load(producer.source, "meanwhile", MANY)
    time.sleep(2.0)
    busy.loop.step = step  # type: ignore[method-assign]
    release.set()
    assert consumer.loaded("meanwhile").cause is None
    assert_pages(producer, MANY, consumer, MANY)
    assert consumer.count("lost_sessions", cause=Cause.SESSION_LOST) == 0
    assert producer.gauge("consumer_sessions") == 1


def test_a_link_that_cannot_be_written_to_any_more_is_made_anew(ranks: Ranks):  # noqa: F811
    """Only `tcp` dials again by itself. The control connection knows nothing of it."""
    producer, consumer = ranks.pair(LONG | {"transports": ("shm",), "direction": "write"})

    def arrives(transfer: str) -> bool:
        producer.offer(transfer, [1, 2])
        consumer.load(producer.source, transfer, [3, 4])
        cause = consumer.loaded(transfer).cause
        producer.freed(transfer)
        assert cause in (None, Cause.TRANSPORT)
        return cause is None

    assert arrives("before")
    side = producer.loop.producer_side
    assert side is not None
    ((_, session),) = side._sessions
    transport: Any = session.path.transport
    transport._producing._consumers[session.path.link].link.shutdown(socket.SHUT_WR)
    names = map("after {}".format, itertools.count())
    until(lambda: arrives(next(names)), "a transfer over a new link")
    assert_pages(producer, [1, 2], consumer, [3, 4])
