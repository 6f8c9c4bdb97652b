# SPDX-License-Identifier: Apache-2.0
"""Agents over real sockets whose models are unlike: KV passes only where it is the same KV."""

from typing import Any

import msgspec
import pytest
from support.agents import LONG, Rank, Ranks, assert_pages, geometry_of, ranks
from support.waits import until

from pd_connector.agent.commands import ChangeModel, KnowWeights
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


def know(rank: Rank, full: bytes) -> None:
    rank.agent.submit(KnowWeights(full))


@pytest.mark.parametrize("first", ["producer", "consumer"])
def test_weights_that_differ_between_samples_end_the_pair_once_all_bytes_are_read(
    ranks: Ranks, first: str
):
    producer, consumer = pair(ranks, {"facts": FACTS}, {"facts": FACTS})
    assert fetched(producer, consumer) is None, "samples are the same"
    both = {"producer": (producer, b"one"), "consumer": (consumer, b"other")}
    know(*both.pop(first))
    assert fetched(producer, consumer, "half") is None, "only one side has read its own"
    know(*both.popitem()[1])
    until(lambda: consumer.count("lost_sessions", cause="audit"))
    until(lambda: consumer.gauge("distrusted_producers"))
    assert fetched(producer, consumer, "after") is Cause.MODEL
    assert fetched(producer, consumer, "later") is Cause.MODEL


def test_weights_whose_bytes_are_the_same_go_on_in_their_session(ranks: Ranks):
    producer, consumer = pair(ranks, {"facts": FACTS}, {"facts": FACTS})
    assert fetched(producer, consumer) is None
    for rank in (producer, consumer):
        know(rank, b"all")
    assert fetched(producer, consumer, "after") is None
    assert not consumer.count("lost_sessions", cause="audit")
    late = ranks(TCP, seed=2, produces=False, facts=facts(weights_full=b"other"))
    assert fetched(producer, late, "late") is Cause.MODEL, (
        "what was found is told in handshakes, too"
    )


def test_weights_that_differ_are_a_producer_that_is_not_trusted(ranks: Ranks):
    producer, consumer = pair(ranks, {"facts": FACTS}, {"facts": FACTS, "audits": True})
    producer.offer("audited", [3, 4])
    consumer.load(producer.source, "audited", [7, 8])
    assert consumer.loaded("audited").cause is Cause.UNAUDITED
    know(producer, b"one")
    know(consumer, b"other")
    until(lambda: consumer.gauge("distrusted_producers"))
