# SPDX-License-Identifier: Apache-2.0
"""What came from which producer is counted apart, in a number of series that has a bound."""

from __future__ import annotations

from support.agents import LONG, Ranks, geometry_of, ranks, until

from pd_connector.agent.commands import Computed, Expect
from pd_connector.agent.consuming.pair_counts import MOST_PRODUCERS, OTHERS, PairCounts
from pd_connector.errors import Cause
from pd_connector.protocol.consuming.incoming import Finished
from pd_connector.protocol.wire.peers import Source
from pd_connector.telemetry import Telemetry

__all__ = ["ranks"]

LARGE_PAGES = geometry_of(heads=1, page_size=512, key_dim=128, value_dim=128)


def test_bytes_chunks_and_transfers_are_counted_by_their_producer(ranks: Ranks) -> None:
    producer, consumer = ranks.pair(LONG, geometry=LARGE_PAGES)
    producer.offer("t", [5, 3])
    consumer.load(producer.source, "t", [20, 1])
    assert consumer.loaded("t").cause is None
    name = producer.source.label
    assert name == f"127.0.0.1:{producer.source.port}"
    moved = consumer.count("received_bytes")
    assert moved > 0
    assert consumer.count("pair_bytes", producer=name, codec="raw") == moved
    chunks = consumer.count("received_chunks")
    assert consumer.count("pair_chunks", producer=name, prompt="computed") == chunks
    assert consumer.count("pair_chunks", producer=name, prompt="computing") == 0
    assert consumer.count("pair_transfers", producer=name, result="received") == 1


def test_chunks_that_come_while_their_prompt_is_computed_are_counted_as_such(ranks: Ranks) -> None:
    producer, consumer = ranks.pair(LONG, geometry=LARGE_PAGES)
    producer.agent.submit(Expect("t"))
    consumer.load([producer.peer], "t", [20, 1, 7, 2], wait=True)
    until(lambda: producer.gauge("outgoing_transfers"))
    producer.offer("t", [5, 3, 17, 0], computed=0)
    producer.agent.submit(Computed("t", "offer of t", 1024))
    until(lambda: consumer.count("received_chunks") >= 2)
    named = {"producer": producer.source.label, "prompt": "computing"}
    assert consumer.count("pair_chunks", **named) >= 2
    producer.offer("t", [5, 3, 17, 0])
    assert consumer.loaded("t").cause is None


def test_a_transfer_that_fails_is_counted_by_its_cause(ranks: Ranks) -> None:
    producer, consumer = ranks.pair(LONG, geometry=LARGE_PAGES)
    consumer.load(producer.source, "nobody's", [20])
    finished = consumer.loaded("nobody's")
    assert finished.cause is Cause.UNKNOWN_TRANSFER
    named = {"producer": producer.source.label, "result": Cause.UNKNOWN_TRANSFER}
    assert consumer.count("pair_transfers", **named) == 1


def test_producers_beyond_a_bound_are_counted_together() -> None:
    telemetry = Telemetry()
    counts = PairCounts(telemetry)
    for _ in range(2):
        for port in range(1, MOST_PRODUCERS + 51):
            counts.ended(Finished("r", None, "", source=Source("h", port, "e")))
    snapshot = telemetry.take()
    assert snapshot is not None
    by_producer = {dict(labels)["producer"]: n for (_, labels), n in snapshot.counts.items()}
    assert len(by_producer) == MOST_PRODUCERS + 1
    assert by_producer["h:1"] == 2
    assert by_producer[OTHERS] == 100


def test_an_address_of_ipv6_is_written_as_in_a_url() -> None:
    assert Source("fd00::1", 7100, "e").label == "[fd00::1]:7100"
