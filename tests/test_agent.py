# SPDX-License-Identifier: Apache-2.0
"""Two agents over real sockets: what must arrive arrives exactly, and everything comes home."""

import random
import secrets
from typing import Any

import pytest
from support.agents import (
    GEOMETRY,
    KEY,
    LONG,
    SHORT,
    TOKENS,
    TRANSPORTS,
    Rank,
    Ranks,
    assert_pages,
    ranks,
    until,
)

from pd_connector import wire
from pd_connector.agent import Drop, Expect, Hold, Withdraw
from pd_connector.config import Config
from pd_connector.consumer import Source
from pd_connector.errors import Cause, ConfigError, PDConnectorError
from pd_connector.geometry import Geometry, Shard

__all__ = ["ranks"]

each_transport = pytest.mark.parametrize("transport", TRANSPORTS)


@each_transport
def test_pages_arrive_exactly_and_no_other_page_changes(ranks: Ranks, transport: str):
    producer, consumer = ranks.pair(LONG | TRANSPORTS[transport])
    untouched = [consumer.page(page) for page in range(24)]
    pages, into = [5, 3, 17, 0, 9], [20, 1, 7, 2, 13]
    producer.offer("t", pages)
    consumer.load(producer.source, "t", into)
    finished = consumer.loaded("t")
    assert finished.cause is None
    assert finished.nbytes == 5 * 2 * GEOMETRY.page_bytes
    assert_pages(producer, pages, consumer, into)
    for page in set(range(24)) - set(into):
        assert consumer.page(page) == untouched[page]
    assert producer.freed("t").cause is None


@each_transport
def test_a_consumer_may_have_the_first_pages_already(ranks: Ranks, transport: str):
    producer, consumer = ranks.pair(LONG | TRANSPORTS[transport])
    producer.offer("t", [4, 5, 6, 7, 8])
    consumer.load(producer.source, "t", [11, 10], first_page=3)
    assert consumer.loaded("t").cause is None
    assert_pages(producer, [7, 8], consumer, [11, 10])


GEOMETRIES = [
    Geometry(Shard(0, 1, 0, 1), 1, 2, "uint8", "one token pages, one layer"),
    Geometry(Shard(0, 5, 0, 7), 3, 10, "uint8", "nothing is a power of two"),
    Geometry(Shard(8, 12, 3, 6), 16, 128, "uint8", "a shard"),
    Geometry(Shard(0, 3, 0, 4), 32, 4096, "uint8", "two pages a slot"),
    Geometry(Shard(0, 2, 0, 8), 32, 4096, "uint8", "one page a slot"),
]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: geometry.layout)
def test_pages_of_any_geometry_arrive(ranks: Ranks, geometry: Geometry):
    chance = random.Random(geometry.layout)
    settings = LONG | TRANSPORTS[chance.choice(list(TRANSPORTS))]
    producer, consumer = ranks.pair(settings, geometry=geometry, pages=20)
    for transfer in ("a", "b"):
        length = chance.randint(1, 12)
        pages, into = chance.sample(range(20), length), chance.sample(range(20), length)
        producer.offer(transfer, pages)
        consumer.load(producer.source, transfer, into)
        assert consumer.loaded(transfer).cause is None
        assert_pages(producer, pages, consumer, into)


@each_transport
def test_many_transfers_share_few_slots(ranks: Ranks, transport: str):
    geometry = Geometry(Shard(0, 2, 0, 1), 1, 1 << 18, "uint8", "large pages")
    settings = LONG | TRANSPORTS[transport] | {"slots": 2}
    producer, consumer = ranks.pair(settings, geometry=geometry, pages=24)
    for i in range(8):
        producer.offer(f"t{i}", range(3 * i, 3 * i + 3), bytes([i]))
        consumer.load(producer.source, f"t{i}", range(3 * i, 3 * i + 3), identity=bytes([i]))
    for i in range(8):
        assert consumer.loaded(f"t{i}").cause is None
    assert_pages(producer, range(24), consumer, range(24))


@each_transport
@pytest.mark.parametrize(("here", "there"), [(1, 2), (2, 1)])
def test_chunks_fit_in_the_smaller_slots_of_the_two(
    ranks: Ranks, transport: str, here: int, there: int
):
    geometry = Geometry(Shard(0, 2, 0, 1), 1, 1 << 18, "uint8", "large pages")
    settings = LONG | TRANSPORTS[transport]
    producer = ranks(settings | {"slot_mib": here}, geometry=geometry)
    consumer = ranks(settings | {"slot_mib": there}, geometry=geometry, seed=1)
    producer.offer("t", range(20))
    consumer.load(producer.source, "t", range(20))
    assert consumer.loaded("t").cause is None
    assert_pages(producer, range(20), consumer, range(20))


@each_transport
def test_both_directions_at_once(ranks: Ranks, transport: str):
    settings = LONG | TRANSPORTS[transport]
    one, two = ranks(settings), ranks(settings, seed=1, engine_id="other engine")
    for source, destination in ((one, two), (two, one)):
        source.offer("t", [1, 2, 3])
        destination.load(source.source, "t", [21, 22, 23])
    for source, destination in ((one, two), (two, one)):
        assert destination.loaded("t").cause is None
        assert_pages(source, [1, 2, 3], destination, [21, 22, 23])


def test_a_load_may_wait_for_a_prefill_that_is_not_even_queued(ranks: Ranks):
    producer, consumer = ranks.pair(LONG)
    consumer.load(producer.source, "t", [1, 2], wait=True)
    until(lambda: producer.gauge("outgoing_transfers"))
    producer.agent.submit(Expect("t"))
    assert consumer.look() == {}
    producer.offer("t", [8, 9])
    assert consumer.loaded("t").cause is None
    assert_pages(producer, [8, 9], consumer, [1, 2])


def test_a_load_ends_when_the_prefill_it_waits_for_ends_without_pages(ranks: Ranks):
    producer, consumer = ranks.pair(LONG)
    consumer.load(producer.source, "t", [1, 2], wait=True)
    until(lambda: producer.gauge("outgoing_transfers"))
    producer.agent.submit(Expect("t"))
    producer.agent.submit(Withdraw("t"))
    assert consumer.loaded("t").cause == Cause.PREFILL_ENDED


def test_a_load_does_not_wait_for_ever_for_a_prefill(ranks: Ranks):
    producer, consumer = ranks.pair(SHORT)
    producer.agent.submit(Expect("t"))
    consumer.load(producer.source, "t", [1, 2], wait=True)
    assert consumer.loaded("t").cause == Cause.WAIT_TIMEOUT


def test_a_consumer_that_holds_keeps_the_lease_and_one_that_does_not_loses_it(ranks: Ranks):
    producer, consumer = ranks.pair(SHORT)
    producer.offer("held", [1, 2])
    producer.offer("forgotten", [3])
    consumer.agent.submit(Hold("load of held", "held", producer.source))
    assert producer.freed("forgotten").cause == Cause.LEASE_EXPIRED
    until(lambda: consumer.gauge("incoming_transfers"))
    consumer.load(producer.source, "held", [5, 6])
    assert consumer.loaded("held").cause is None


@pytest.mark.parametrize("wait", [False, True])
def test_an_unknown_transfer_fails_with_its_cause(ranks: Ranks, wait: bool):
    producer, consumer = ranks.pair(SHORT | {"wait_timeout_s": 30.0})
    consumer.load(producer.source, "nobody's", [1], wait=wait)
    assert consumer.loaded("nobody's").cause == Cause.UNKNOWN_TRANSFER


def test_other_tokens_are_refused_and_the_pages_stay_for_whom_they_are_meant(ranks: Ranks):
    producer, consumer = ranks.pair(LONG)
    other = ranks(LONG, seed=2, produces=False)
    before = other.page(1)
    producer.offer("t", [8, 9])
    other.load(producer.source, "t", [1, 2], identity=b"other tokens")
    assert other.loaded("t").cause == Cause.TOKENS
    assert other.page(1) == before
    consumer.load(producer.source, "t", [1, 2])
    assert consumer.loaded("t").cause is None


@pytest.mark.parametrize(
    ("options", "cause", "words"),
    [
        ({"model": b"another"}, Cause.MODEL, "same weights"),
        (
            {"geometry": Geometry(Shard(0, 2, 0, 3), 8, 20, "uint8", "test")},
            Cause.GEOMETRY,
            "4 / 8",
        ),
        (
            {"geometry": Geometry(Shard(0, 2, 0, 3), 4, 20, "uint8", "other")},
            Cause.GEOMETRY,
            "layout test / other",
        ),
    ],
)
def test_unlike_engines_get_no_session(ranks: Ranks, options: Any, cause: Cause, words: str):
    producer = ranks(SHORT, consumes=False)
    consumer = ranks(SHORT, produces=False, **options)
    consumer.load(producer.source, "t", [1])
    finished = consumer.loaded("t")
    assert finished.cause == cause
    assert words in finished.detail
    assert producer.count("rejected_sessions", cause=cause) == 1


def test_another_engine_than_the_wanted_one_gets_no_session(ranks: Ranks):
    producer, consumer = ranks.pair(LONG)
    consumer.load(producer.source._replace(engine_id="the one before"), "t", [1])
    finished = consumer.loaded("t")
    assert finished.cause == Cause.UNREACHABLE
    assert "the one before" in finished.detail


def test_one_producer_under_several_names_serves_all_of_them(ranks: Ranks):
    """Not every proxy tells the engine id, and `localhost` is 127.0.0.1."""
    producer, consumer = ranks.pair(LONG)
    sources = [
        producer.source,
        producer.source._replace(engine_id=""),
        producer.source._replace(host="localhost"),
    ]
    for round_ in range(2):
        for i, source in enumerate(sources):
            producer.offer(f"{round_}{i}", [1, 2, 3])
            consumer.load(source, f"{round_}{i}", [4 * i, 4 * i + 1, 4 * i + 2])
            assert consumer.loaded(f"{round_}{i}").cause is None
    assert consumer.gauge("producer_sessions") == 3


@pytest.mark.parametrize("newest", [0, 2])
def test_a_version_without_a_common_schema_is_refused_with_both_versions(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, newest: int
):
    producer, consumer = ranks.pair(LONG)
    monkeypatch.setattr(wire, "common_schema", lambda newest, oldest: None)
    consumer.load(producer.source, "t", [1])
    finished = consumer.loaded("t")
    assert finished.cause == Cause.VERSION
    assert "producer speaks 1-1, consumer 1-1" in finished.detail


@pytest.mark.parametrize(
    ("producers", "consumers"), [(KEY, ""), ("", KEY), (KEY, KEY + " but another")]
)
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_without_the_same_key_there_is_no_session(
    ranks: Ranks, producers: str, consumers: str, transport: str
):
    settings = SHORT | {"transports": (transport,)}
    producer = ranks(settings | {"key": producers}, consumes=False)
    consumer = ranks(settings | {"key": consumers}, produces=False)
    consumer.load(producer.source, "t", [1])
    assert consumer.loaded("t").cause in (Cause.AUTHENTICATION, Cause.UNREACHABLE)
    assert producer.gauge("consumer_sessions") == 0


@pytest.mark.parametrize(
    "host", ["192.0.2.1", "example.invalid", "::ffff:192.0.2.1", "127.0.0.1.evil"]
)
def test_without_a_key_only_loopback_is_dialled(ranks: Ranks, host: str):
    consumer = ranks(LONG, produces=False)
    consumer.load(Source(host, 9, ""), "t", [1])
    finished = consumer.loaded("t")
    assert finished.cause == Cause.INSECURE_ADDRESS
    assert host in finished.detail


@pytest.mark.parametrize("port", [1, 0, -1, 65536, 2**70])
def test_a_port_where_nobody_listens_fails_at_once(ranks: Ranks, port: int):
    consumer = ranks(LONG | {"connect_timeout_s": 60.0}, produces=False)
    consumer.load(Source("127.0.0.1", port, ""), "t", [1])
    assert consumer.loaded("t").cause == Cause.UNREACHABLE


def test_a_name_that_is_no_name_fails_in_bounded_time(ranks: Ranks):
    consumer = ranks(SHORT | {"key": KEY}, produces=False)
    for i, host in enumerate(["no such host.invalid", "a;b", "", "x\0y", "[", "ü"]):
        consumer.load(Source(host, 9, ""), f"t{i}", [1])
        assert consumer.loaded(f"t{i}").cause == Cause.UNREACHABLE


def test_a_rank_reports_a_port_only_if_it_produces(ranks: Ranks):
    assert ranks(LONG, produces=False).agent.port == 0
    assert ranks(LONG, consumes=False).agent.port > 0


def test_a_page_larger_than_a_slot_is_an_error_at_the_start():
    geometry = Geometry(Shard(0, 1, 0, 1), 64, 1 << 15, "uint8", "huge pages")
    with pytest.raises(ConfigError, match="slot_mib 1"):
        Rank(LONG, geometry=geometry, pages=2)


def test_a_host_that_is_not_here_is_an_error_that_leaves_nothing_open(ranks: Ranks):
    config = {"host": "192.0.2.1", "key": secrets.token_hex(16)}
    with pytest.raises(PDConnectorError, match=r"192\.0\.2\.1"):
        Rank(LONG | config)


def test_closing_twice_is_harmless(ranks: Ranks):
    rank = ranks(LONG)
    rank.agent.close()
    rank.agent.close()
    ranks.stop(rank)


def test_an_agent_that_dies_ends_what_it_owes(ranks: Ranks, monkeypatch: pytest.MonkeyPatch):
    producer, consumer = ranks.pair(LONG)
    producer.offer("t", [1])
    consumer.load(producer.source, "later", [1], wait=True)
    until(lambda: producer.gauge("outgoing_transfers") == 2)

    def fail(now: float) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(producer.agent, "_step", fail)
    monkeypatch.setattr(consumer.agent, "_step", fail)
    assert producer.freed("t").cause == Cause.INTERNAL
    assert consumer.loaded("later").cause == Cause.INTERNAL
    assert producer.count("agent_failures") == 1
    ranks.stop(producer)
    ranks.stop(consumer)


@pytest.mark.parametrize("moment", ["held", "dialled", "waiting", "streaming"])
@each_transport
def test_a_load_can_be_dropped_at_any_moment(ranks: Ranks, moment: str, transport: str):
    settings = SHORT | TRANSPORTS[transport]
    producer, consumer = ranks.pair(settings)
    if moment == "held":
        producer.offer("t", [1])
        consumer.agent.submit(Hold("load of t", "t", producer.source))
        until(lambda: consumer.gauge("producer_sessions"))
    elif moment == "dialled":
        producer.offer("t", [1])
        consumer.load(producer.source, "t", [1])
    elif moment == "waiting":
        producer.agent.submit(Expect("t"))
        consumer.load(producer.source, "t", [1], wait=True)
        until(lambda: producer.gauge("consumer_sessions"))
    else:
        producer.offer("t", [1, 2, 3])
        consumer.load(producer.source, "t", [1, 2, 3], wait=True)
        until(lambda: consumer.gauge("incoming_transfers") or consumer.look())
    consumer.agent.submit(Drop("load of t", Cause.ABORTED))
    if moment != "held":
        assert consumer.loaded("t").cause in (Cause.ABORTED, None)
    if moment == "waiting":
        until(lambda: producer.gauge("outgoing_transfers") == 0)
        producer.offer("t", [1])
    assert producer.freed("t").cause in (Cause.ABORTED, None)


def test_config_defaults_are_what_an_agent_starts_with(ranks: Ranks):
    rank = ranks({})
    assert rank.agent._config == Config()
    assert rank.gauge("landing_slots") == 0
    assert TOKENS
