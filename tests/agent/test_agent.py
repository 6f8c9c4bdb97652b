# SPDX-License-Identifier: Apache-2.0
"""Two agents over real sockets: what must arrive arrives exactly, and everything comes home."""

import random
import secrets
import time
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
from support.agents import (
    HALVES,
    KEY,
    LONG,
    MODEL,
    SHORT,
    TOKENS,
    TRANSPORTS,
    Rank,
    Ranks,
    assert_pages,
    geometry_of,
    ranks,
    until,
    views,
)

from pd_connector.agent.commands import Computed, Drop, Expect, Hold, Withdraw
from pd_connector.agent.consuming import dialler
from pd_connector.agent.handshake import RefusedError
from pd_connector.config import Config
from pd_connector.errors import Cause, ConfigError, PDConnectorError
from pd_connector.kv.geometry import Shard
from pd_connector.kv.model import ModelFacts
from pd_connector.pages.paged_cache import PagedCache
from pd_connector.protocol.wire import messages
from pd_connector.protocol.wire.peers import Peer, Source

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
    assert finished.nbytes == 5 * len(producer.page(0))
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


LARGE_PAGES = geometry_of(heads=1, page_size=512, key_dim=128, value_dim=128)
GEOMETRIES = {
    "one token pages, one layer": geometry_of(Shard(0, 1, 0, 1), heads=1, page_size=1),
    "nothing is a power of two": geometry_of(
        Shard(0, 5, 0, 1), heads=7, page_size=3, key_dim=5, value_dim=9
    ),
    "a shard": geometry_of(Shard(8, 12, 1, 2), heads=6, page_size=16, key_dim=64, value_dim=64),
    "two pages a slot": geometry_of(
        Shard(0, 3, 0, 1), heads=4, page_size=512, key_dim=64, value_dim=64
    ),
    "one page a slot": geometry_of(
        Shard(0, 2, 0, 1), heads=8, page_size=512, key_dim=64, value_dim=64
    ),
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_pages_of_any_geometry_arrive(ranks: Ranks, name: str):
    chance, geometry = random.Random(name), GEOMETRIES[name]
    settings = LONG | TRANSPORTS[chance.choice(list(TRANSPORTS))]
    producer, consumer = ranks.pair(settings, geometry=geometry, pages=20)
    for transfer in ("a", "b"):
        length = chance.randint(1, 12)
        pages, into = chance.sample(range(20), length), chance.sample(range(20), length)
        producer.offer(transfer, pages)
        consumer.load([producer.peer], transfer, into)
        assert consumer.loaded(transfer).cause is None
        assert_pages(producer, pages, consumer, into)


@each_transport
def test_many_transfers_share_few_slots(ranks: Ranks, transport: str):
    geometry = LARGE_PAGES
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
    geometry = LARGE_PAGES
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
    producer.agent.submit(Withdraw("t", "offer of t"))
    assert consumer.loaded("t").cause == Cause.PREFILL_ENDED


def test_a_load_does_not_wait_for_ever_for_a_prefill(ranks: Ranks):
    producer, consumer = ranks.pair(LONG | {"wait_timeout_s": 1.5})
    producer.agent.submit(Expect("t"))
    consumer.load(producer.source, "t", [1, 2], wait=True)
    assert consumer.loaded("t").cause == Cause.WAIT_TIMEOUT


def test_a_consumer_that_holds_keeps_the_lease_and_one_that_does_not_loses_it(ranks: Ranks):
    producer, consumer = ranks.pair(LONG | {"lease_s": 4.0})
    producer.offer("held", [1, 2])
    producer.offer("forgotten", [3])
    consumer.agent.submit(Hold("load of held", "held", (producer.peer,), False))
    assert producer.freed("forgotten").cause == Cause.LEASE_EXPIRED
    until(lambda: consumer.gauge("incoming_transfers"))
    consumer.load(producer.source, "held", [5, 6])
    assert consumer.loaded("held").cause is None


@pytest.mark.parametrize("wait", [False, True])
def test_an_unknown_transfer_fails_with_its_cause(ranks: Ranks, wait: bool):
    producer, consumer = ranks.pair(LONG | {"lease_s": 1.5})
    consumer.load(producer.source, "nobody's", [1], wait=wait)
    assert consumer.loaded("nobody's").cause == Cause.UNKNOWN_TRANSFER


def test_other_tokens_are_refused_and_the_pages_stay_for_whom_they_are_meant(ranks: Ranks):
    settings = LONG | {"heartbeat_s": 3.0}  # after a refusal, another one has twice that time
    producer, consumer = ranks.pair(settings)
    other = ranks(settings, seed=2, produces=False)
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
        ({"facts": ModelFacts(b"config", b"another")}, Cause.MODEL, "same weights"),
        (
            {"geometry": geometry_of(heads=8)},
            Cause.GEOMETRY,
            "heads 4 / 8",
        ),
        (
            {"geometry": geometry_of(key_dim=8)},
            Cause.GEOMETRY,
            "key_dim 6 / 8",
        ),
    ],
)
def test_unlike_engines_get_no_session_and_no_page_is_kept_for_them(
    ranks: Ranks, options: Any, cause: Cause, words: str
):
    producer = ranks(LONG, consumes=False)
    consumer = ranks(LONG, produces=False, **options)
    producer.offer("t", [1])
    consumer.load(producer.source, "t", [1])
    finished = consumer.loaded("t")
    assert finished.cause == cause
    assert words in finished.detail
    assert producer.freed("t").cause == cause
    assert producer.count("rejected_sessions", cause=cause) == 1


def test_a_consumer_that_does_not_take_the_welcome_has_no_page_kept_for_it(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
):
    producer, consumer = ranks.pair(LONG)
    refused = RefusedError(Cause.VERSION, "not with you")
    monkeypatch.setattr(dialler, "check_welcome", Mock(side_effect=refused))
    producer.offer("t", [1, 2])
    consumer.load(producer.source, "t", [1, 2])
    assert consumer.loaded("t").cause == Cause.VERSION
    assert producer.freed("t").cause == Cause.VERSION
    until(lambda: producer.gauge("leased_pages") == 0)


@pytest.mark.parametrize(("weights", "taken"), [(b"another", False), (MODEL.weights, True)])
def test_a_consumer_compares_the_model_too(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, weights: bytes, taken: bool
):
    """A producer that does not, or lies."""
    said = msgspec.structs.replace(MODEL, weights=weights)
    producer, consumer = ranks.pair(LONG)
    encode = messages.encode

    def changed(message: Any) -> bytes:
        if isinstance(message, messages.Welcome):
            message = msgspec.structs.replace(message, facts=said)
        return encode(message)

    monkeypatch.setattr(messages, "encode", changed)
    producer.offer("t", [1])
    consumer.load(producer.source, "t", [2])
    assert consumer.loaded("t").cause == (None if taken else Cause.MODEL)
    producer.freed("t")


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
    assert consumer.gauge("producer_sessions") == 1


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
    geometry = geometry_of(heads=64, page_size=2048)
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


def test_an_agent_that_dies_ends_what_it_owes(ranks: Ranks):
    producer, consumer = ranks.pair(LONG)
    producer.offer("t", [1])
    consumer.load(producer.source, "later", [1], wait=True)
    until(lambda: producer.gauge("outgoing_transfers") == 2)
    producer.die()
    consumer.die()
    assert producer.freed("t").cause == Cause.INTERNAL
    assert consumer.loaded("later").cause == Cause.INTERNAL
    assert producer.count("agent_failures") == 1
    ranks.stop(producer)
    ranks.stop(consumer)


@pytest.mark.parametrize("moment", ["held", "dialled", "waiting", "streaming"])
@each_transport
def test_a_load_can_be_dropped_at_any_moment(ranks: Ranks, moment: str, transport: str):
    producer, consumer = ranks.pair(LONG | TRANSPORTS[transport])
    if moment == "held":
        producer.offer("t", [1])
        consumer.agent.submit(Hold("load of t", "t", (producer.peer,), False))
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
    # All but what this machine has decided.
    config = msgspec.structs.replace(rank.loop._config, transports=Config().transports)
    assert config == Config()
    assert rank.gauge("landing_slots") == 0
    assert TOKENS


def test_a_wait_ends_with_an_outcome_and_without_transfers_it_does_not_begin(ranks: Ranks):
    producer, consumer = ranks.pair(LONG)
    began = time.monotonic()
    assert consumer.agent.wait_for_outcome(20.0)
    consumer.load([producer.peer], "t", [1], wait=True)
    until(lambda: consumer.gauge("incoming_transfers"))
    producer.offer("t", [1])
    assert consumer.agent.wait_for_outcome(20.0)
    assert consumer.loaded("t").cause is None
    consumer.load([producer.peer], "never", [1], wait=True)
    until(lambda: consumer.gauge("incoming_transfers"))
    assert time.monotonic() - began < 20.0, "neither wait lasted to its end"
    began = time.monotonic()
    assert not consumer.agent.wait_for_outcome(0.2)
    assert time.monotonic() - began >= 0.2
    consumer.agent.submit(Drop("load of never", Cause.ABORTED))
    assert consumer.loaded("never").cause == Cause.ABORTED


# Streams, watched holds and several ranks.


@each_transport
def test_kv_streams_while_the_prefill_runs_and_ends_before_it_has(ranks: Ranks, transport: str):
    producer, consumer = ranks.pair(LONG | TRANSPORTS[transport], geometry=LARGE_PAGES)
    pages, into = [5, 3, 17, 0], [20, 1, 7, 2]
    producer.agent.submit(Expect("t"))
    consumer.load([producer.peer], "t", into, wait=True)
    until(lambda: producer.gauge("outgoing_transfers"))
    producer.offer("t", pages, computed=0)
    producer.agent.submit(Computed("t", "offer of t", 1024))
    until(lambda: consumer.count("received_chunks") >= 2)
    assert consumer.look() == {}
    for layer in (1, 2):
        producer.agent.submit(Computed("t", "offer of t", 2048, layer))
    assert consumer.loaded("t").cause is None
    assert_pages(producer, pages, consumer, into)
    assert producer.look() == {}, "the request still owns its pages"
    producer.offer("t", pages)
    assert producer.freed("t").cause is None


def test_what_is_not_computed_is_not_sent(ranks: Ranks):
    producer, consumer = ranks.pair(LONG, geometry=LARGE_PAGES)
    producer.offer("t", [1, 2], computed=511)
    consumer.load([producer.peer], "t", [3, 4], wait=True)
    until(lambda: producer.gauge("consumer_sessions"))
    producer.agent.submit(Computed("t", "offer of t", 511, 2))
    producer.offer("other", [5])
    consumer.load([producer.peer], "other", [6], identity=TOKENS)
    finished = consumer.loaded("other")
    assert finished.cause is None
    assert producer.count("sent_chunks") == finished.chunks, "those of the other transfer"
    producer.agent.submit(Withdraw("t", "offer of t"))
    assert consumer.loaded("t").cause == Cause.PREFILL_ENDED


def test_a_request_is_told_when_the_prefill_has_begun(ranks: Ranks):
    producer, consumer = ranks.pair(LONG, geometry=LARGE_PAGES)
    consumer.agent.submit(Hold("load of t", "t", (producer.peer,), True))
    until(lambda: producer.gauge("outgoing_transfers"))
    assert consumer.look() == {}
    assert consumer.told == {}
    producer.offer("t", [1, 2], computed=0)
    assert consumer.held("t").cause is None
    consumer.load([producer.peer], "t", [3, 4], wait=True)
    producer.offer("t", [1, 2])
    assert consumer.loaded("t").cause is None
    assert_pages(producer, [1, 2], consumer, [3, 4])


@pytest.mark.parametrize("how", ["withdrawn", "silent", "unknown", "unreachable", "lost"])
def test_a_request_is_told_once_that_there_will_be_nothing(ranks: Ranks, how: str):
    short = {"silent": {"wait_timeout_s": 1.5}, "unknown": {"lease_s": 1.5}}
    producer, consumer = ranks.pair(LONG | short.get(how, {}))
    peer = producer.peer
    if how == "unreachable":
        peer = Peer(Source("127.0.0.1", 1, ""), peer.shard)
    if how in ("withdrawn", "silent"):
        producer.agent.submit(Expect("t"))
    consumer.agent.submit(Hold("load of t", "t", (peer,), True))
    if how in ("withdrawn", "lost"):
        until(lambda: consumer.gauge("producer_sessions") and producer.gauge("consumer_sessions"))
    if how == "withdrawn":
        producer.agent.submit(Withdraw("t", "offer of t"))
    if how == "lost":
        ranks.stop(producer)
    assert (
        consumer.held("t").cause
        in {
            "withdrawn": (Cause.PREFILL_ENDED,),
            "silent": (Cause.WAIT_TIMEOUT,),
            "unknown": (Cause.UNKNOWN_TRANSFER, Cause.WAIT_TIMEOUT),
            "unreachable": (Cause.UNREACHABLE,),
            "lost": (Cause.SESSION_LOST,),
        }[how]
    )
    until(lambda: consumer.gauge("incoming_transfers") == 0)


@each_transport
def test_two_ranks_read_their_heads_from_one_and_it_frees_when_both_have(
    ranks: Ranks, transport: str
):
    settings = LONG | TRANSPORTS[transport]
    producer = ranks(settings, consumes=False)
    readers = [
        ranks(settings, produces=False, geometry=geometry_of(half), shards=HALVES, seed=1)
        for half in HALVES
    ]
    producer.offer("t", [1, 2, 3])
    readers[0].load([producer.peer], "t", [7, 8, 9])
    assert readers[0].loaded("t").cause is None
    assert producer.look() == {}
    readers[1].load([producer.peer], "t", [4, 5, 6])
    assert readers[1].loaded("t").cause is None
    assert producer.freed("t").cause is None
    assert_pages(producer, [1, 2, 3], readers[0], [7, 8, 9])
    assert_pages(producer, [1, 2, 3], readers[1], [4, 5, 6])


@each_transport
def test_one_rank_reads_from_two_that_hold_a_half_each(ranks: Ranks, transport: str):
    settings = LONG | TRANSPORTS[transport]
    halves = [ranks(settings, consumes=False, geometry=geometry_of(half)) for half in HALVES]
    consumer = ranks(settings, produces=False, seed=1)
    peers = [half.peer for half in halves]
    for half in halves:
        half.offer("t", [1, 2, 3])
    consumer.load(peers, "t", [7, 8, 9])
    assert consumer.loaded("t").cause is None
    assert_pages(halves, [1, 2, 3], consumer, [7, 8, 9])
    assert [half.freed("t").cause for half in halves] == [None, None]
    halves[0].offer("u", [1, 2])
    halves[1].agent.submit(Expect("u"))
    consumer.load(peers, "u", [7, 8], wait=True)
    until(lambda: consumer.count("received_chunks") >= 3)
    halves[1].agent.submit(Withdraw("u", "offer of u"))
    assert consumer.loaded("u").cause == Cause.PREFILL_ENDED
    assert halves[0].freed("u").cause is not None


def test_half_of_the_heads_is_not_enough(ranks: Ranks):
    half = ranks(LONG, consumes=False, geometry=geometry_of(HALVES[0]))
    consumer = ranks(LONG, produces=False, seed=1)
    half.offer("t", [1, 2])
    consumer.load([half.peer], "t", [3, 4])
    finished = consumer.loaded("t")
    assert finished.cause == Cause.GEOMETRY
    assert "layer 0 head 2" in finished.detail


@each_transport
def test_pages_of_another_size_and_layout_take_the_same_tokens(ranks: Ranks, transport: str):
    settings = LONG | TRANSPORTS[transport]
    producer = ranks(settings, consumes=False, geometry=geometry_of(page_size=4, heads=1))
    other = geometry_of(page_size=12, heads=1, layout="other")
    consumer = ranks(settings, produces=False, geometry=other, seed=1)
    producer.offer("t", [7, 3, 9, 2])
    consumer.load(producer.source, "t", [5, 6], tokens=15)
    assert consumer.loaded("t").cause is None
    for number in producer.layers:
        here = views(producer.layers[number], producer.geometry.groups[0])
        there = views(consumer.layers[number], other.groups[0])
        for mine, yours in ((here.key, there.key), (here.value, there.value)):
            assert mine is not None
            assert yours is not None
            sent = torch.cat([mine[page, 0] for page in (7, 3, 9, 2)])[:15]
            found = torch.cat([yours[page, 0] for page in (5, 6)])[:15]
            assert torch.equal(sent.view(torch.int16), found.view(torch.int16))


def test_tokens_whose_pages_a_window_has_passed_are_refused(ranks: Ranks):
    producer, consumer = ranks.pair(LONG)
    producer.offer("t", [-1, 2, 3])
    consumer.load(producer.source, "t", [4, 5, 6])
    assert consumer.loaded("t").cause == Cause.WINDOW
    assert producer.freed("t").cause == Cause.WINDOW
    producer.offer("u", [-1, 2, 3])
    consumer.load(producer.source, "u", [5, 6], first_page=1)
    assert consumer.loaded("u").cause is None


@pytest.mark.parametrize("side", ["gather", "scatter"])
def test_pages_are_touched_after_what_was_queued_before_they_were_given(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, side: str
):
    """Each command's own point in the engine's stream gets to the copy."""
    points = iter(range(100))
    waited: list[Any] = []
    touch = getattr(PagedCache, side)

    def touched(*arguments: Any) -> Any:
        waited.append(arguments[5])
        return touch(*arguments[:5])

    monkeypatch.setattr(PagedCache, "fence", lambda cache: f"point {next(points)}")
    monkeypatch.setattr(PagedCache, side, touched)
    producer, consumer = ranks.pair(LONG | TRANSPORTS["tcp"])
    for number, transfer in enumerate(("t", "u")):
        producer.offer(transfer, [5])
        consumer.load(producer.source, transfer, [7])
        assert consumer.loaded(transfer).cause is None
        assert waited[number:] == [f"point {2 * number + (side == 'scatter')}"]
        assert producer.freed(transfer).cause is None
    assert consumer.loop.consumer_side is not None
    assert not consumer.loop.consumer_side._receive_pipeline._loads
    assert producer.loop.producer_side is not None
    assert not producer.loop.producer_side._send_pipeline._fences
