# SPDX-License-Identifier: Apache-2.0
"""Agents over real sockets whose models are unlike: KV passes only where it is the same KV."""

from typing import Any

import msgspec
import pytest
from support.agents import LONG, Rank, Ranks, assert_pages, geometry_of, ranks
from support.waits import until

from pd_connector.agent.commands import ChangeModel, KnowWeights, ReadWeights
from pd_connector.errors import Cause
from pd_connector.kv.geometry import DRAFT_LAYERS
from pd_connector.kv.model import LayerFacts, ModelFacts

__all__ = ["ranks"]

TCP: dict[str, Any] = {**LONG, "transports": ("tcp",)}
FACTS = ModelFacts(
    b"config",
    b"weights",
    loaded=b"loaded",
    held="all",
    layers=(LayerFacts((0, 1), "model/attention", "scale 1", b"plain"),),
)
WITH_DRAFT = geometry_of(layers=(0, 1, DRAFT_LAYERS))


def facts(**changes: Any) -> ModelFacts:
    return msgspec.structs.replace(FACTS, **changes)


def pair(ranks: Ranks, producer: dict[str, Any], consumer: dict[str, Any]) -> tuple[Rank, Rank]:
    made = ranks(TCP, consumes=False, **producer)
    return made, ranks(TCP, seed=1, produces=False, **consumer)


def fetched(producer: Rank, consumer: Rank, name: str = "t") -> Cause | None:
    """What came of a transfer of two pages."""
    producer.offer(name, [3, 4])
    consumer.load(producer.source, name, [7, 8])
    return consumer.loaded(name).cause


@pytest.mark.parametrize(
    "changes",
    [
        {"config": b"other"},
        {"weights": b"other"},
        {"weights": b"", "loaded": b""},
        {"updates": 1, "loaded": b"new"},
        {"version": "step 2"},
        {"layers": (LayerFacts((0, 1), "model/attention", "scale 1", b"long"),)},
        {"layers": (LayerFacts((0, 1), "model/attention", "scale 2", b"plain"),)},
    ],
)
def test_no_kv_passes_between_models_that_are_not_known_to_be_the_same(
    ranks: Ranks, changes: dict[str, Any]
):
    producer, consumer = pair(ranks, {"facts": FACTS}, {"facts": facts(**changes)})
    assert fetched(producer, consumer) is Cause.MODEL
    assert producer.count("rejected_sessions", cause="model")


def test_models_that_are_the_same_exchange_kv(ranks: Ranks):
    producer, consumer = pair(ranks, {"facts": FACTS}, {"facts": FACTS})
    assert fetched(producer, consumer) is None
    assert_pages(producer, [3, 4], consumer, [7, 8])


@pytest.mark.parametrize(
    "drafts", [("eagle", "eagle"), ("eagle", "other"), ("", "eagle"), ("eagle", "")]
)
def test_an_engine_that_drafts_takes_kv_from_engines_with_the_same_draft_only(
    ranks: Ranks, drafts: tuple[str, str]
):
    sides = [
        {
            "facts": facts(draft=draft.encode()),
            "geometry": WITH_DRAFT if draft else geometry_of(),
        }
        for draft in drafts
    ]
    producer, consumer = pair(ranks, *sides)
    before = consumer.part(7, DRAFT_LAYERS, 0) if drafts[1] else b""
    if drafts[1] and drafts[0] != drafts[1]:
        assert fetched(producer, consumer) is Cause.DRAFT
        assert producer.count("rejected_sessions", cause="draft")
        assert producer.count("sent_chunks") == 0
        assert consumer.part(7, DRAFT_LAYERS, 0) == before
        return
    assert fetched(producer, consumer) is None
    for layer in (0, 1):
        assert consumer.part(7, layer, 0) == producer.part(3, layer, 0)
    if drafts[0] == drafts[1]:
        assert consumer.part(7, DRAFT_LAYERS, 0) == producer.part(3, DRAFT_LAYERS, 0)


def test_a_layer_that_the_producer_lacks_is_named_before_anything_is_sent(ranks: Ranks):
    producer, consumer = pair(
        ranks,
        {"facts": FACTS, "geometry": geometry_of(layers=(0,))},
        {"facts": FACTS},
    )
    assert fetched(producer, consumer) is Cause.GEOMETRY
    assert producer.count("sent_chunks") == 0


def test_weights_that_change_end_what_was_computed_with_the_old_ones(ranks: Ranks):
    producer, consumer = pair(ranks, {"facts": FACTS}, {"facts": FACTS})
    assert fetched(producer, consumer) is None
    producer.offer("old", [5, 6])
    until(lambda: producer.gauge("outgoing_transfers"))
    producer.agent.submit(ChangeModel(facts(updates=1, loaded=b"new")))
    assert producer.freed("old").cause is Cause.MODEL
    assert fetched(producer, consumer, "mixed") is Cause.MODEL, "only one side has changed"
    consumer.agent.submit(ChangeModel(facts(updates=1, loaded=b"new")))
    assert fetched(producer, consumer, "new") is None
    for rank in (producer, consumer):
        rank.agent.submit(ChangeModel(facts(updates=2, loaded=b"newer", version="step 9")))
    assert fetched(producer, consumer, "named") is None


READING = facts(weights=b"", loaded=b"", reading=True)


def know(rank: Rank, weights: bytes) -> None:
    rank.agent.submit(KnowWeights(weights, b""))


@pytest.mark.parametrize("model_id", ["", "named"])
@pytest.mark.parametrize("reads", ["producer", "consumer", "both"])
def test_nothing_is_handed_over_before_the_weights_of_both_are_known(
    ranks: Ranks, reads: str, model_id: str
):
    """An operator's name does not replace what will be known in seconds."""
    one, other = (
        msgspec.structs.replace(READING if reads in (side, "both") else FACTS, model_id=model_id)
        for side in ("producer", "consumer")
    )
    producer, consumer = pair(ranks, {"facts": one}, {"facts": other})
    for rank in (producer, consumer):
        rank.agent.submit(ReadWeights(3_100_000_000, 16_000_000_000))
        until(lambda rank=rank: "weights_bytes" in rank.agent.telemetry.gauges())
    finished = unfetched(producer, consumer)
    assert finished.cause is Cause.UNREAD
    assert reads == "consumer" or "weights read 3.1 of 16.0 GB" in finished.detail
    assert producer.count("rejected_sessions", cause="unread")
    until(lambda: producer.gauge("outgoing_transfers") == 0, "its pages are free at once")
    assert not producer.count("sent_chunks")
    assert not producer.count("sessions", transport="tcp")
    for side, rank in (("producer", producer), ("consumer", consumer)):
        if reads in (side, "both"):
            know(rank, b"weights")
    assert fetched(producer, consumer, "after") is None


def unfetched(producer: Rank, consumer: Rank) -> Any:
    producer.offer("early", [5, 6])
    consumer.load(producer.source, "early", [7, 8])
    return consumer.loaded("early")


def test_what_was_computed_before_the_weights_were_known_can_be_fetched_afterwards(ranks: Ranks):
    producer, consumer = pair(ranks, {"facts": READING}, {"facts": FACTS})
    producer.offer("t", [3, 4])
    until(lambda: producer.gauge("outgoing_transfers"))
    know(producer, b"weights")
    consumer.load(producer.source, "t", [7, 8])
    assert consumer.loaded("t").cause is None


def test_weights_of_which_one_row_differs_are_refused_from_the_first_request_on(ranks: Ranks):
    producer, consumer = pair(ranks, {"facts": READING}, {"facts": READING})
    assert unfetched(producer, consumer).cause is Cause.UNREAD
    know(producer, b"one")
    know(consumer, b"other")
    assert fetched(producer, consumer) is Cause.MODEL
    assert not producer.count("sent_chunks")


OLDER = facts(weights=b"", loaded=b"", samples=b"samples")
"""As a version tells its model at its start that compares samples first."""


@pytest.mark.parametrize("older", ["producer", "consumer"])
def test_an_older_version_gets_and_gives_kv_once_it_has_read_all_bytes(ranks: Ranks, older: str):
    sides = {"producer": {"facts": FACTS}, "consumer": {"facts": FACTS}}
    sides[older] = {"facts": OLDER}
    producer, consumer = pair(ranks, sides["producer"], sides["consumer"])
    assert unfetched(producer, consumer).cause in (Cause.MODEL, Cause.UNREAD)
    know({"producer": producer, "consumer": consumer}[older], b"weights")
    assert fetched(producer, consumer) is None


def test_an_older_consumer_hears_a_cause_that_it_knows(ranks: Ranks):
    producer, consumer = pair(ranks, {"facts": READING}, {"facts": facts(samples=b"samples")})
    assert unfetched(producer, consumer).cause is Cause.MODEL
