# SPDX-License-Identifier: Apache-2.0
"""Nothing that peers, clients or name servers do in great number, or not at all, stops an agent."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from support.agents import (
    KEY,
    LONG,
    TRANSPORTS,
    WHOLE,
    Rank,
    Ranks,
    assert_pages,
    ranks,
    until,
)
from support.children import Children, children, nursery

from pd_connector.agent import loop
from pd_connector.agent.commands import Computed, Drop, Expect, Hold, Revoke, Withdraw
from pd_connector.agent.consuming import session_keeper
from pd_connector.agent.producing.consumer_sessions import ConsumerSessions
from pd_connector.config import Config
from pd_connector.control import addresses
from pd_connector.control.sockets import Connection, Listener
from pd_connector.errors import Cause
from pd_connector.protocol.consuming.consumer import Consumer, Landings
from pd_connector.protocol.producing.producer import Producer
from pd_connector.protocol.wire.peers import Peer, Source

__all__ = ["children", "nursery", "ranks"]


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port, under each of this machine's loopback addresses, that accepts and says nothing."""
    with socket.create_server(("0.0.0.0", 0), backlog=1024) as server:
        yield server.getsockname()[1]


def assert_serves(producer: Rank, consumer: Rank, transfer: str = "good") -> None:
    producer.offer(transfer, [1, 2])
    consumer.load(producer.source, transfer, [3, 4])
    assert consumer.loaded(transfer).cause is None
    assert_pages(producer, [1, 2], consumer, [3, 4])
    producer.freed(transfer)


@pytest.mark.parametrize("addressed", [345, 1000])
def test_a_request_with_hundreds_of_addresses_costs_itself_only(
    ranks: Ranks, silent_port: int, addressed: int
):
    producer, consumer = ranks.pair(LONG | {"connect_timeout_s": 3.0})
    hosts = [f"127.1.{i // 250}.{1 + i % 250}" for i in range(addressed)]
    peers = [Peer(Source(host, silent_port, ""), WHOLE) for host in hosts]
    consumer.load(peers, "many", [5])
    assert_serves(producer, consumer)
    assert consumer.gauge("producer_sessions") <= 65
    assert consumer.loaded("many").cause == Cause.UNREACHABLE
    until(lambda: consumer.gauge("producer_sessions") == 1)
    assert_serves(producer, consumer, "afterwards")


def test_requests_that_name_hundreds_of_engines_at_one_address_share_its_session(ranks: Ranks):
    producer, consumer = ranks.pair(LONG)
    sources = [producer.source._replace(engine_id=f"engine {i}") for i in range(600)]
    for i, source in enumerate(sources):
        consumer.load(source, f"t{i}", [i % 20])
    for i in range(600):
        finished = consumer.loaded(f"t{i}")
        assert finished.cause == Cause.UNREACHABLE
        assert f"engine {i} was wanted" in finished.detail
    until(lambda: consumer.gauge("producer_sessions") == 1)  # told after the requests of its turn
    assert_serves(producer, consumer)


@pytest.mark.parametrize("key", ["", KEY])
def test_silent_connections_do_not_take_the_last_descriptor(
    ranks: Ranks, children: Children, key: str
):
    settings = LONG | {"transports": ("shm",), "connect_timeout_s": 20.0, "key": key}
    producer = children(settings, consumes=False)
    producer.call("limit_descriptors", 200)
    source = producer.call("source")
    with contextlib.ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(socket.create_connection((source.host, source.port)))
        consumer = ranks(settings, produces=False, seed=1)
        producer.call("offer", "t", [1])
        consumer.load(source, "t", [2])
        assert consumer.loaded("t").cause is None
        assert consumer.page(2) == producer.call("page", 1)
    until(lambda: producer.call("count", "closed_connections") >= 300)
    assert producer.call("count", "agent_failures") == 0


def test_a_connection_over_which_no_session_comes_is_closed(ranks: Ranks):
    producer = ranks(LONG | {"connect_timeout_s": 3.0}, consumes=False)
    consumer = ranks(LONG, produces=False, seed=1)
    assert_serves(producer, consumer)
    with socket.create_connection(("127.0.0.1", producer.agent.port)) as silent:
        silent.settimeout(30.0)
        while silent.recv(1000):  # libzmq greets every peer that connects
            pass
    assert producer.gauge("consumer_sessions") == 1
    assert_serves(producer, consumer, "over the session that was there")
    assert consumer.count("lost_sessions", cause=Cause.SESSION_LOST) == 0


@pytest.mark.parametrize("who", ["producer", "consumer"])
def test_a_message_that_is_lost_ends_the_session_and_nobody_waits_for_it(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, who: str
):
    """The other side has not read for long, so that there is no room for more."""
    settings = LONG | {"transports": ("tcp",), "wait_timeout_s": 60.0}
    producer, consumer = ranks.pair(settings)
    assert_serves(producer, consumer)
    owner, kind = (Listener, b"Accept") if who == "producer" else (Connection, b"Open")
    send, lost = owner.send, list[bytes]()

    def without_room(self: Any, *message: bytes) -> bool:
        if kind not in message[-1] or lost:
            return bool(send(self, *message))
        lost.append(message[-1])
        self._is_full = True
        return False

    with monkeypatch.context() as full:
        full.setattr(owner, "send", without_room)
        producer.offer("t", [1])
        consumer.load(producer.source, "t", [2])
        assert consumer.loaded("t").cause == Cause.SESSION_LOST
    assert lost
    assert_serves(producer, consumer, "afterwards")
    producer.freed("t")


def test_an_idle_session_is_closed_and_opened_again_when_it_is_wanted(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Config, "idle_timeout_s", 0.5)
    producer, consumer = ranks.pair(LONG)
    for i in range(2):
        assert_serves(producer, consumer, f"{i}")
        until(lambda: consumer.gauge("producer_sessions") == 0)
    assert consumer.count("lost_sessions", cause=Cause.NOT_NEEDED) == 2


def test_answers_to_heartbeats_are_taken_together_and_keep_nothing_else_waiting(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loop, "_UNHURRIED_POLL_MS", 10**6)  # nothing but what matters ends it
    producer, consumer = ranks.pair(LONG | {"heartbeat_s": 0.1})
    peer = Peer(producer.source, WHOLE)
    side = consumer.loop.consumer_side
    assert side is not None
    for number in range(3):
        consumer.agent.submit(Hold(f"request {number}", f"{number}", (peer,), watch=True))
        until(lambda: side.unhurried, "only answers to heartbeats come")
        assert_serves(producer, consumer, f"good {number}")  # by a command, and chunks after it
        consumer.agent.submit(Drop(f"request {number}", Cause.ABORTED))


MANY: dict[str, Any] = LONG | {"lease_s": 4.5, "session_timeout_s": 2.5}


def test_with_many_sessions_heartbeats_are_seldom_and_nothing_is_lost(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(session_keeper, "_SESSIONS_PER_HEARTBEAT", 1e-3)  # one session is many
    producer, consumer = ranks.pair(MANY)
    assert_serves(producer, consumer)
    producer.offer("waits", [5, 6])
    peer = Peer(producer.source, WHOLE)
    consumer.agent.submit(Hold("request", "waits", (peer,), watch=False))
    beats, began = heartbeats_of(monkeypatch), time.monotonic()
    until(lambda: len(beats) >= 3, "heartbeats")
    assert time.monotonic() - began > 5.0, "they come every 3 s, though sessions end after 2.5 s"
    assert consumer.gauge("producer_sessions") == producer.gauge("consumer_sessions") == 1
    assert consumer.count("lost_sessions") == 0
    assert producer.gauge("leased_pages") == 2
    consumer.agent.submit(Drop("request", Cause.ABORTED))
    producer.freed("waits")


def test_a_producer_whose_leases_are_short_hears_of_them_in_time(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
):
    """Each engine has a configuration of its own."""
    long = {"heartbeat_s": 600.0, "session_timeout_s": 2000.0, "lease_s": 2000.0}
    producer = ranks(LONG | {"lease_s": 1.5}, consumes=False)
    consumer = ranks(LONG | long, seed=1, produces=False)
    assert_serves(producer, consumer)
    beats = heartbeats_of(monkeypatch)
    until(lambda: len(beats) >= 3, "heartbeats, not once in ten minutes")


def test_a_producer_of_the_release_before_hears_heartbeats_as_often_as_it_did(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(session_keeper, "_SESSIONS_PER_HEARTBEAT", 1e-3)
    producer, consumer = ranks.pair(MANY)
    open_ = ConsumerSessions.open
    monkeypatch.setattr(
        ConsumerSessions, "open", lambda *said: msgspec.structs.replace(open_(*said), lease_ms=0)
    )
    assert_serves(producer, consumer)
    beats, began = heartbeats_of(monkeypatch), time.monotonic()
    until(lambda: len(beats) >= 5, "heartbeats")
    assert time.monotonic() - began < 12.0, "every 1.7 s, not every 3 s"
    assert consumer.count("lost_sessions") == 0


def heartbeats_of(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When the producer hears a heartbeat, from now on."""
    heard: list[float] = []
    heartbeat = Producer.heartbeat

    def noted(*arguments: Any) -> None:
        heard.append(time.monotonic())
        heartbeat(*arguments)

    monkeypatch.setattr(Producer, "heartbeat", noted)
    return heard


def test_a_session_that_is_wanted_is_not_idle(ranks: Ranks, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Config, "idle_timeout_s", 0.3)
    producer, consumer = ranks.pair(LONG)
    consumer.load(producer.source, "t", [1], wait=True)
    until(lambda: consumer.gauge("producer_sessions"))
    time.sleep(1.0)
    assert consumer.gauge("producer_sessions") == 1
    producer.offer("t", [2])
    assert consumer.loaded("t").cause is None


def test_with_as_many_sessions_as_may_be_an_idle_one_makes_room_and_a_used_one_does_not(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(session_keeper, "MOST_SESSIONS", 2)
    producers = [ranks(LONG, consumes=False) for _ in range(3)]
    consumer = ranks(LONG, produces=False, seed=1)
    for i, producer in enumerate(producers):
        assert_serves(producer, consumer, f"{i}")
        assert consumer.gauge("producer_sessions") <= 2
    for i, producer in enumerate(producers[:2]):
        consumer.load(producer.source, f"waits {i}", [5 + i], wait=True)
        until(lambda producer=producer: producer.gauge("outgoing_transfers"))
    consumer.load(producers[2].source, "no room", [9])
    assert consumer.loaded("no room").cause == Cause.SESSION_LIMIT
    for i, producer in enumerate(producers[:2]):
        producer.offer(f"waits {i}", [8])
        assert consumer.loaded(f"waits {i}").cause is None


@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_an_unexpected_error_ends_its_session_and_not_the_agent(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, side: str
):
    producer, consumer = ranks.pair(LONG | {"lease_s": 2.0})  # slots are quarantined that long
    assert_serves(producer, consumer, "before")
    rank = producer if side == "producer" else consumer

    def fail(*_: Any) -> None:
        monkeypatch.undo()
        raise KeyError("a defect")

    owner, method = (Producer, "open") if side == "producer" else (Consumer, "accept")
    monkeypatch.setattr(owner, method, fail)
    producer.offer("t", [1])
    consumer.load(producer.source, "t", [1])
    assert consumer.loaded("t").cause == Cause.INTERNAL
    producer.freed("t")
    assert_serves(producer, consumer, "afterwards")
    assert rank.count("session_errors") == 1
    assert rank.count("agent_failures") == 0
    rank.counts.clear()


def fails_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    def fail(*_: Any, **__: Any) -> None:
        monkeypatch.undo()
        raise KeyError("a defect")

    monkeypatch.setattr(owner, name, fail)


@contextlib.contextmanager
def one_error(rank: Rank) -> Iterator[None]:
    """One unexpected error of this rank, which ends neither its agent nor another transfer."""
    yield
    until(lambda: rank.count("session_errors") == 1)
    assert rank.count("agent_failures") == 0
    rank.counts.clear()


@contextlib.contextmanager
def another_transfer(producer: Rank, consumer: Rank) -> Iterator[None]:
    """A transfer that is open all the while, and comes to a good end after it."""
    consumer.load(producer.source, "other", [5], wait=True)
    until(lambda: producer.gauge("outgoing_transfers"), "the other transfer to be opened")
    yield
    producer.offer("other", [8])
    assert consumer.loaded("other").cause is None


@pytest.mark.parametrize("method", ["expect", "offer", "computed", "revoke", "withdraw"])
def test_an_error_with_one_prefill_ends_its_transfer_and_no_other(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, method: str
):
    producer, consumer = ranks.pair(LONG)
    request = "offer of t"
    submit = producer.agent.submit
    with another_transfer(producer, consumer), one_error(producer):
        if method not in ("expect", "offer"):
            producer.offer("t", [1, 2], computed=4)
            consumer.load(producer.source, "t", [1, 2], wait=True)
            until(lambda: consumer.gauge("incoming_transfers") == 2)
            until(lambda: producer.gauge("outgoing_transfers") == 2)
        fails_once(monkeypatch, Producer, method)
        match method:
            case "expect":
                submit(Expect("t"))
            case "computed":
                submit(Computed("t", request, 8))
            case "revoke":
                submit(Revoke("t", request))
            case "withdraw":
                submit(Withdraw("t", request))
        if method in ("expect", "offer"):
            until(lambda: method == "offer" or producer.count("session_errors"))
            producer.offer("t", [1, 2])
            consumer.load(producer.source, "t", [1, 2])
        ended = consumer.loaded("t").cause
        if method == "expect":
            assert ended is None
        elif method == "offer":
            assert producer.freed("t").cause == Cause.INTERNAL
            assert ended in (Cause.INTERNAL, Cause.UNKNOWN_TRANSFER)
        else:
            assert ended == Cause.INTERNAL
    producer.offer("again", [1, 2])  # also where the gate of this request was shut
    consumer.load(producer.source, "again", [1, 2])
    assert consumer.loaded("again").cause is None


@pytest.mark.parametrize("method", ["load", "hold", "drop"])
def test_an_error_with_one_request_ends_its_transfer_and_no_other(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, method: str
):
    producer, consumer = ranks.pair(LONG)
    with another_transfer(producer, consumer), one_error(consumer):
        if method == "drop":
            consumer.load(producer.source, "t", [1], wait=True)
            until(lambda: consumer.gauge("incoming_transfers") == 2)
        fails_once(monkeypatch, Consumer, method)
        match method:
            case "load":
                consumer.load(producer.source, "t", [1])
            case "hold":
                consumer.agent.submit(Hold("load of t", "t", (producer.peer,), True))
                assert consumer.held("t").cause == Cause.INTERNAL
            case "drop":
                consumer.agent.submit(Drop("load of t", Cause.ABORTED))
        if method != "hold":
            assert consumer.loaded("t").cause == Cause.INTERNAL
    assert_serves(producer, consumer, "afterwards")


def test_an_error_with_one_chunk_ends_its_transfer_and_no_other(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
):
    producer, consumer = ranks.pair(LONG | TRANSPORTS["tcp"])
    with another_transfer(producer, consumer), one_error(consumer):
        fails_once(monkeypatch, Landings, "landed")
        producer.offer("t", [1])
        consumer.load(producer.source, "t", [1])
        assert consumer.loaded("t").cause == Cause.INTERNAL
        producer.freed("t")


def test_a_codec_that_raises_fails_its_transfer_and_no_other(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
):
    """Codecs may be other packages' (docs/extending.md)."""
    settings = LONG | {"lease_s": 2.0, "transports": ["tcp"], "key": KEY}
    producer, consumer = ranks.pair(settings)
    assert_serves(producer, consumer, "before")
    consumer.load(producer.source, "waits", [5], wait=True)

    def fail(*_: Any) -> None:
        monkeypatch.undo()
        raise ValueError("these bytes are not mine")

    monkeypatch.setattr(consumer.cache, "scatter", fail)
    producer.offer("t", [1])
    consumer.load(producer.source, "t", [1])
    finished = consumer.loaded("t")
    assert finished.cause == Cause.INTERNAL
    assert "these bytes are not mine" in finished.detail
    producer.freed("t")
    producer.offer("waits", [2])
    assert consumer.loaded("waits").cause is None
    assert_serves(producer, consumer, "afterwards")
    assert consumer.count("session_errors") == 1
    assert consumer.count("agent_failures") == 0
    consumer.counts.clear()


def slow_names(monkeypatch: pytest.MonkeyPatch, wait: Callable[[], object]) -> None:
    """A name server that takes its time, except for localhost."""
    lookup = socket.getaddrinfo

    def slow(host: str, *rest: Any, **options: Any) -> Any:
        if host != "localhost":
            wait()
            host = "127.0.0.1"
        return lookup(host, *rest, **options)

    monkeypatch.setattr(addresses.socket, "getaddrinfo", slow)


def test_a_name_server_that_does_not_answer_costs_its_request_only(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
):
    answers = threading.Event()
    slow_names(monkeypatch, lambda: answers.wait(60.0))
    producer, consumer = ranks.pair(LONG | {"insecure": True, "connect_timeout_s": 5.0})
    for i in range(6):
        source = producer.source._replace(host=f"p{i}.example")
        consumer.agent.submit(Hold(f"load of slow {i}", f"slow {i}", (Peer(source, WHOLE),), True))
        consumer.load(source, f"slow {i}", [1])
    for i in range(5):
        assert_serves(producer, consumer, f"good {i}")
    assert not any(f"load of slow {i}" in consumer.look() for i in range(6))
    for i in range(6):
        finished = consumer.loaded(f"slow {i}")
        assert finished.cause == Cause.UNREACHABLE
        assert "name server" in finished.detail
    answers.set()


def test_a_name_that_nobody_knows_fails_its_load_once(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
):
    def unknown(*_what: Any, **_options: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    producer, consumer = ranks.pair(LONG | {"insecure": True})
    monkeypatch.setattr(addresses.socket, "getaddrinfo", unknown)
    source = producer.source._replace(host="nobody.example")
    consumer.agent.submit(Hold("load of t", "t", (Peer(source, WHOLE),), False))
    consumer.load(source, "t", [1])
    assert consumer.loaded("t").cause == Cause.UNREACHABLE
    assert consumer.count("failed_transfers", cause="unreachable") == 1


def test_a_name_that_is_found_leads_to_the_session_that_is_there(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
):
    slow_names(monkeypatch, lambda: time.sleep(0.2))
    producer, consumer = ranks.pair(LONG | {"insecure": True})
    assert_serves(producer, consumer)
    hosts = ["p.example", "P.example", "localhost", "::ffff:127.0.0.1", "127.0.0.1"]
    for host in hosts:
        producer.offer(host, [1, 2])
        consumer.load(producer.source._replace(host=host), host, [3, 4])
        assert consumer.loaded(host).cause is None
    assert consumer.gauge("producer_sessions") == 1


@pytest.mark.parametrize("steps", [False, True])
def test_a_hung_engine_behind_a_live_agent_is_not_waited_for(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, steps: bool
):
    settings = LONG | {"engine_timeout_s": 1.0, "wait_timeout_s": 4.0}
    producer, consumer = ranks.pair(settings)
    # Without pause, which a busy machine would not let us do.
    monkeypatch.setattr(producer.agent._steps, "age_s", lambda: 0.0)
    consumer.load(producer.source, "loaded", [1], wait=True)
    watched = Hold("load of watched", "watched", (producer.peer,), True)
    consumer.agent.submit(watched)
    until(lambda: producer.gauge("outgoing_transfers") == 2)
    if not steps:
        monkeypatch.undo()
    deadline = time.monotonic() + 30.0
    while len(consumer.look()) + len(consumer.told) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    wanted = {Cause.WAIT_TIMEOUT, Cause.UNKNOWN_TRANSFER} if steps else {Cause.ENGINE_HUNG}
    assert consumer.loaded("loaded").cause in wanted
    assert consumer.told["load of watched"].cause in wanted
