# SPDX-License-Identifier: Apache-2.0
"""Audits between real agents: KV that was received is compared with KV that is there, and who fails is not believed
again before it has restarted."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.agents import (
    GEOMETRY,
    HALVES,
    LONG,
    SHORT,
    TOKENS,
    TRANSPORTS,
    WHOLE,
    Rank,
    Ranks,
    assert_pages,
    geometry_of,
    ranks,
    until,
)

from pd_connector.agent.commands import Distrust, Drop
from pd_connector.errors import Cause
from pd_connector.kv.geometry import Shard
from pd_connector.protocol.consuming.consumer import Consumer
from pd_connector.protocol.consuming.incoming import Finished, Load
from pd_connector.protocol.wire.peers import Peer, Source

__all__ = ["ranks"]

THEIRS, OURS = [1, 2, 3, 4], [9, 8, 7, 6]
STAGES = (Shard(0, 1, 0, 1), Shard(1, 2, 0, 1))
STAGES_OF_TWO = tuple(Shard(layer, layer + 1, rank, 2) for layer in range(2) for rank in range(2))


def numbers(rank: Rank) -> None:
    """Ordinary numbers in the cache: the same in every rank, page by page."""
    for layer, storage in rank.layers.items():
        for page in range(len(storage)):
            random = torch.Generator().manual_seed(1000 * layer + page)
            made = torch.randn(4, storage.shape[2], generator=random)
            (group,) = rank.geometry.groups
            heads = rank.geometry.heads(group)
            storage[page] = made[heads.start : heads.stop].to(storage.dtype)


def computed(producers: Sequence[Rank], consumer: Rank, noise: float = 0.0) -> None:
    """The consumer has computed the prompt itself, into `OURS`."""
    for layer, storage in consumer.layers.items():
        for theirs, ours in zip(THEIRS, OURS, strict=True):
            random = torch.Generator().manual_seed(1000 * layer + theirs)
            made = torch.randn(4, storage.shape[2], generator=random)
            made = made * (1 + noise * torch.randn(made.shape, generator=random))
            (group,) = consumer.geometry.groups
            heads = consumer.geometry.heads(group)
            storage[ours] = made[heads.start : heads.stop].to(storage.dtype)


def load(
    consumer: Rank,
    peers: Rank | Sequence[Rank],
    transfer: str,
    *,
    compares: bool,
    pages: Sequence[int] = OURS,
    **changes: Any,
) -> Finished:
    """Load the prompt that producers have offered; returns how that ended."""
    every = [peers] if isinstance(peers, Rank) else peers
    consumer.agent.submit(load_of(every, transfer, pages, compares=compares, **changes))
    return consumer.loaded(transfer)


def load_of(
    producers: Sequence[Rank], transfer: str, pages: Sequence[int] = OURS, **changes: Any
) -> Load:
    whole = Load(
        request=f"load of {transfer}",
        transfer=transfer,
        peers=tuple(producer.peer for producer in producers),
        identity=TOKENS,
        first_token=0,
        stop_token=4 * len(pages) - 1,
        pages=(list(pages),),
        wait=False,
    )
    return whole._replace(**changes)


def offer(producer: Rank, *transfers: str) -> None:
    for transfer in transfers:
        producer.offer(transfer, THEIRS)


@pytest.fixture
def start(ranks: Ranks) -> Any:
    def start(settings: dict[str, Any] = TRANSPORTS["shm"], **options: Any) -> tuple[Rank, Rank]:
        producer = ranks(LONG | settings, consumes=False)
        consumer = ranks(LONG | settings, seed=1, produces=False, audits=True, **options)
        numbers(producer)
        computed([producer], consumer)
        return producer, consumer

    return start


@pytest.mark.parametrize("transport", list(TRANSPORTS))
def test_who_passes_is_believed_from_then_on(start: Any, transport: str) -> None:
    producer, consumer = start(TRANSPORTS[transport])
    offer(producer, "early", "audited", "late")
    before = consumer.page(9)
    early = load(consumer, producer, "early", compares=False, pages=[11, 12, 13, 14])
    assert early.cause == Cause.UNAUDITED
    audited = load(consumer, producer, "audited", compares=True)
    assert (audited.cause, audited.detail) == (None, "")
    assert audited.comparison is not None
    assert audited.comparison.pages == 2 * 2 * 4, "two layers, K and V, four pages"
    assert consumer.page(9) == before
    assert consumer.count("audits", cause="passed") == 1
    assert consumer.count("received_transfers") == 0, "none of it was used"
    late = load(consumer, producer, "late", compares=False, pages=[11, 12, 13, 14])
    assert late.cause is None
    assert_pages(producer, THEIRS[:3], consumer, [11, 12, 13])


def test_pages_that_can_be_read_where_they_lie_are_audited_like_that(start: Any) -> None:
    producer, consumer = start(TRANSPORTS["shm direct"])
    producer.layers[1][3, 0, :6] *= -1  # K of one token in one head
    before = consumer.page(9)
    offer(producer, "t")
    found = load(consumer, producer, "t", compares=True)
    assert found.cause == Cause.AUDIT
    assert "layer 1, page 2, K" in found.detail
    assert consumer.count("pulled_pieces") > 0, "by the path of later transfers"
    assert consumer.page(9) == before, "and not into pages"


def test_with_a_choice_of_codecs_each_is_audited(start: Any) -> None:
    producer, consumer = start(TRANSPORTS["tcp"] | {"codec": "auto"})
    offer(producer, "a", "b", "c", "d")
    first = load(consumer, producer, "a", compares=True)
    assert first.cause == Cause.UNAUDITED
    assert "raw): the next prompt is audited, too" in first.detail or "int8)" in first.detail
    assert load(consumer, producer, "b", compares=True).cause is None
    assert consumer.count("audits", cause="passed") == 2
    for transfer in ("c", "d"):
        assert load(consumer, producer, transfer, compares=False).cause is None


@pytest.mark.parametrize("transport", list(TRANSPORTS))
def test_who_fails_loses_its_session_and_is_believed_no_more(start: Any, transport: str) -> None:
    producer, consumer = start(TRANSPORTS[transport])
    keys = 4 * 6  # of a head in a page
    producer.layers[1][3, :, :keys] *= 1.5
    offer(producer, "audited", "late", "again")
    audited = load(consumer, producer, "audited", compares=True)
    assert audited.cause == Cause.AUDIT
    assert "layer 1, page 2, K: KV is 0.50" in audited.detail
    until(lambda: consumer.count("lost_sessions", cause="audit"), "the session to end")
    until(lambda: consumer.gauge("distrusted_producers") == 1, "the gauge, which follows the step")
    for transfer, compares in (("late", False), ("again", True)):
        found = load(consumer, producer, transfer, compares=compares)
        assert found.cause == Cause.AUDIT
        assert "an earlier audit found: layer 1, page 2, K" in found.detail


def test_without_audits_it_is_believed(start: Any, ranks: Ranks) -> None:
    """The harm, with the guard off."""
    producer, _ = start()
    consumer = ranks(LONG | TRANSPORTS["shm"], seed=2, produces=False)
    producer.layers[1][3] *= 1.5
    offer(producer, "t")
    assert load(consumer, producer, "t", compares=False).cause is None


def test_the_message_names_both_models(start: Any, ranks: Ranks) -> None:
    from pd_connector.kv.model import ModelFacts

    facts = [ModelFacts(bytes([7]) * 4, bytes([n]) * 4, model_id="same") for n in (1, 1)]
    producer = ranks(LONG | TRANSPORTS["shm"], consumes=False, facts=facts[0])
    consumer = ranks(LONG | TRANSPORTS["shm"], seed=1, produces=False, audits=True, facts=facts[1])
    numbers(producer)
    offer(producer, "t")
    found = load(consumer, producer, "t", compares=True)
    assert found.cause == Cause.AUDIT
    ours = "the model here: config 07070707 weights 01010101 model_id 'same'"
    assert f"{ours}; at the producer: config 07070707 weights 01010101" in found.detail


def test_each_adapter_passes_by_itself_and_a_mismatch_counts_for_that_one(start: Any) -> None:
    producer, consumer = start()
    offer(producer, "a", "b", "c", "d", "e")
    assert load(consumer, producer, "a", compares=True, adapter="one").cause is None
    assert load(consumer, producer, "b", compares=False, adapter="one").cause is None
    computed([producer], consumer)
    assert load(consumer, producer, "c", compares=False, adapter="two").cause == Cause.UNAUDITED
    producer.layers[0] *= 2
    assert load(consumer, producer, "d", compares=True, adapter="two").cause == Cause.AUDIT
    assert load(consumer, producer, "e", compares=False, adapter="two").cause == Cause.AUDIT
    offer(producer, "f", "g", "h")
    assert load(consumer, producer, "f", compares=False, adapter="one").cause is None
    computed([producer], consumer)
    assert load(consumer, producer, "g", compares=True).cause == Cause.AUDIT
    assert load(consumer, producer, "h", compares=False, adapter="one").cause == Cause.AUDIT


def test_who_starts_anew_has_to_pass_again(start: Any, ranks: Ranks) -> None:
    producer, consumer = start()
    offer(producer, "a")
    assert load(consumer, producer, "a", compares=True).cause is None
    ranks.stop(producer)
    again = ranks(LONG | TRANSPORTS["shm"], consumes=False)
    numbers(again)
    offer(again, "b", "c")
    assert load(consumer, again, "b", compares=False).cause == Cause.UNAUDITED
    assert load(consumer, again, "c", compares=True).cause is None


def test_a_new_epoch_at_the_same_address_has_to_pass_again(start: Any) -> None:
    """As an agent whose thread died has it, or a pod that is started again under its name."""
    producer, consumer = start()
    offer(producer, "a")
    assert load(consumer, producer, "a", compares=True).cause is None
    producer.die()
    until(lambda: producer.count("agent_restarts"), "the agent to start again", 30)
    until(lambda: consumer.count("lost_sessions", cause="session_lost"), "the loss to be noticed")
    offer(producer, "b", "c")
    assert load(consumer, producer, "b", compares=False).cause == Cause.UNAUDITED
    assert load(consumer, producer, "c", compares=True).cause is None
    for rank in (producer, consumer):
        rank.counts.pop(("agent_failures", ()), None)


def test_changed_weights_have_to_pass_again(start: Any, ranks: Ranks) -> None:
    from pd_connector.agent.commands import ChangeModel
    from pd_connector.kv.model import ModelFacts

    old, new = (ModelFacts(b"config", model_id="m", version=v) for v in ("1", "2"))
    settings = LONG | TRANSPORTS["shm"]
    producer = ranks(settings, consumes=False, facts=old)
    consumer = ranks(settings, seed=1, produces=False, audits=True, facts=old)
    numbers(producer)
    computed([producer], consumer)
    offer(producer, "a")
    assert load(consumer, producer, "a", compares=True).cause is None
    for rank in (producer, consumer):
        rank.agent.submit(ChangeModel(new))
    until(lambda: not producer.gauge("consumer_sessions"), "sessions to end")
    offer(producer, "b", "c")
    assert load(consumer, producer, "b", compares=False).cause == Cause.UNAUDITED
    assert load(consumer, producer, "c", compares=True).cause is None


def engines(ranks: Ranks, sources: Any, destinations: Any) -> tuple[list[Rank], list[Rank]]:
    """The ranks of a producer and of a consumer engine, which has computed what the producer has."""
    settings = LONG | TRANSPORTS["tcp"]
    producers = [
        ranks(settings, consumes=False, geometry=geometry_of(shard), shards=sources)
        for shard in sources
    ]
    consumers = [
        ranks(
            settings,
            seed=1,
            produces=False,
            audits=True,
            geometry=geometry_of(shard, layout="other"),
            shards=destinations,
        )
        for shard in destinations
    ]
    for rank in producers:
        numbers(rank)
    for consumer in consumers:
        computed(producers, consumer)
    return producers, consumers


def load_by_all(
    producers: Sequence[Rank], consumers: Sequence[Rank], transfer: str, **changes: Any
) -> list[Finished]:
    """Every rank of the consumer loads its part."""
    for producer in producers:
        offer(producer, transfer)
    for consumer in consumers:
        consumer.agent.submit(load_of(producers, transfer, **changes))
    return [consumer.loaded(transfer) for consumer in consumers]


@pytest.mark.parametrize(("sources", "destinations"), [(HALVES, (WHOLE,)), ((WHOLE,), HALVES)])
def test_every_rank_compares_its_part(ranks: Ranks, sources: Any, destinations: Any) -> None:
    producers, consumers = engines(ranks, sources, destinations)
    producers[-1].layers[0][2, -1] = 0  # the last head, in one page
    found = load_by_all(producers, consumers, "t", compares=True)
    assert [one.cause for one in found[:-1]] == [None] * (len(found) - 1)
    assert found[-1].cause == Cause.AUDIT
    assert "layer 0, page 1" in found[-1].detail
    # Their scheduler tells the other ranks.
    for consumer in consumers[:-1]:
        assert consumer.gauge("distrusted_producers") == 0
        consumer.agent.submit(Distrust("engine", "a rank found it"))
        until(lambda: consumer.gauge("distrusted_producers"), "the other rank to follow")  # noqa: B023


@pytest.mark.parametrize(
    ("sources", "destinations"),
    [
        (STAGES, (WHOLE,)),
        ((WHOLE,), STAGES),
        (STAGES, STAGES),
        (STAGES, HALVES),
        (STAGES_OF_TWO, STAGES),
    ],
    ids=["2 to 1", "1 to 2", "2 to 2", "2 to TP 2", "2 of TP 2 to 2"],
)
def test_every_pipeline_stage_compares_its_layers(
    ranks: Ranks, sources: Any, destinations: Any
) -> None:
    """What is wrong on one stage only is found by the ranks that hold its layers, and named by the
    layer's number in the model. Adapters pass by themselves."""
    producers, consumers = engines(ranks, sources, destinations)
    for transfer, adapter in (("a", ""), ("b", "one")):
        found = load_by_all(producers, consumers, transfer, compares=True, adapter=adapter)
        assert [one.cause for one in found] == [None] * len(consumers)
        compared = [one.comparison.pages for one in found if one.comparison is not None]
        parts = max(1, sources[0].tp_size // destinations[0].tp_size)  # of a page's heads
        layers = [len(consumer.layers) for consumer in consumers]
        assert compared == [2 * 4 * parts * count for count in layers], "K and V of four pages"
    for producer in producers:
        if 1 in producer.layers:
            producer.layers[1][3] *= 1.5
    found = load_by_all(producers, consumers, "c", compares=True, adapter="one")
    for consumer, one in zip(consumers, found, strict=True):
        if 1 in consumer.layers:
            assert one.cause == Cause.AUDIT
            assert "layer 1, page 2" in one.detail
        else:
            assert one.cause is None
    # Until the scheduler has told the others, only these refuse: a load needs all ranks.
    found = load_by_all(producers, consumers, "d", compares=False, adapter="one")
    assert [one.cause == Cause.AUDIT for one in found] == [1 in c.layers for c in consumers]
    for consumer in consumers:
        consumer.agent.submit(Distrust("engine", "a rank found it", "one"))
        until(lambda: consumer.gauge("distrusted_producers"), "every rank to follow")  # noqa: B023


@pytest.mark.parametrize("codec", ["fp8_e4m3", "int8"])
def test_what_a_codec_rounds_passes_and_what_is_wrong_does_not(start: Any, codec: str) -> None:
    producer, consumer = start(TRANSPORTS["tcp"] | {"codec": codec})
    computed([producer], consumer, noise=0.02)
    offer(producer, "a", "b")
    assert load(consumer, producer, "a", compares=True).cause is None
    producer.layers[1][:, :, : 4 * 6] *= 1.5
    assert load(consumer, producer, "b", compares=True).cause == Cause.AUDIT


def test_an_audit_that_comes_to_no_end_says_nothing(start: Any) -> None:
    producer, consumer = start()
    gone = load(consumer, producer, "unknown", compares=True)
    assert gone.cause == Cause.UNKNOWN_TRANSFER
    offer(producer, "a")
    lost = load(consumer, producer, "a", compares=True, pages=[-1] * 4)
    assert lost.cause == Cause.WINDOW
    assert "no page of layer 0 was left here" in lost.detail
    assert consumer.gauge("distrusted_producers") == 0
    assert consumer.count("audits", cause="window") == 1
    offer(producer, "b", "c")
    assert load(consumer, producer, "b", compares=False).cause == Cause.UNAUDITED
    assert load(consumer, producer, "c", compares=True, pages=[-1, -1, 7, 6]).cause is None


def test_a_prompt_that_is_still_being_computed_there_is_audited_at_its_end(start: Any) -> None:
    producer, consumer = start()
    producer.offer("t", THEIRS, computed=8)
    consumer.agent.submit(load_of([producer], "t", compares=True, wait=True))
    until(lambda: consumer.gauge("incoming_transfers"), "the load to begin")
    producer.offer("t", THEIRS)
    assert consumer.loaded("t").cause is None


def test_what_is_found_in_pages_that_were_taken_back_says_nothing(start: Any) -> None:
    """An engine that revokes late has overwritten pages before it says so: a difference is believed
    only when it has told what it took back."""
    producer, consumer = start(late_revokes=True)
    consumer.agent.engine_steps()
    consumer.layers[0][OURS] = 0  # preempted: another request's pages are zeroed now
    offer(producer, "a", "b")
    dropped = load_of([producer], "a", compares=True)
    consumer.agent.submit(dropped)
    until(lambda: consumer.count("received_chunks") and not consumer.gauge("incoming_transfers"))
    assert not consumer.look(), "it is in doubt"
    consumer.agent.engine_steps()
    consumer.agent.submit(Drop("load of a", Cause.ABORTED))
    assert consumer.loaded("a").cause == Cause.ABORTED
    assert consumer.gauge("distrusted_producers") == 0
    chunks = consumer.count("received_chunks")
    consumer.agent.submit(load_of([producer], "b", compares=True))
    until(lambda: consumer.count("received_chunks") == 2 * chunks, "all to be compared")
    consumer.agent.engine_steps()
    assert "load of b" not in consumer.look()

    def believed() -> bool:
        consumer.agent.engine_steps()
        return "load of b" in consumer.look()

    until(believed, "the steps that take nothing back")
    assert consumer.loaded("b").cause == Cause.AUDIT


def test_what_was_taken_back_while_the_agent_was_busy_accuses_nobody(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent's turn may take longer than a step of the engine."""
    producer, consumer = start(late_revokes=True)
    consumer.agent.engine_steps()
    consumer.layers[0][OURS] = 0  # preempted: another request's pages are zeroed now
    offer(producer, "a")
    consumer.agent.submit(load_of([producer], "a", compares=True))
    until(lambda: consumer.count("received_chunks") and not consumer.gauge("incoming_transfers"))
    busy, go_on = threading.Event(), threading.Event()
    tick = Consumer.tick

    def tick_late(machine: Consumer, now: float) -> Any:  # commands were taken before
        busy.set()
        assert go_on.wait(60)
        return tick(machine, now)

    monkeypatch.setattr(Consumer, "tick", tick_late)
    assert busy.wait(60)
    consumer.agent.engine_steps()
    consumer.agent.submit(Drop("load of a", Cause.ABORTED))
    consumer.agent.engine_steps()
    go_on.set()
    assert consumer.loaded("a").cause == Cause.ABORTED
    assert consumer.gauge("distrusted_producers") == 0


def test_taken_for_one_that_tells_in_time_it_would_be_believed(start: Any) -> None:
    """The harm, with the guard off."""
    producer, consumer = start()
    consumer.layers[0][OURS] = 0
    offer(producer, "a")
    assert load(consumer, producer, "a", compares=True).cause == Cause.AUDIT


def test_a_dropped_audit_reads_no_page_any_more(start: Any) -> None:
    producer, consumer = start()
    producer.offer("t", THEIRS, computed=4)
    consumer.agent.submit(load_of([producer], "t", compares=True, wait=True))
    until(lambda: consumer.gauge("incoming_transfers"), "the load to begin")
    consumer.agent.submit(Drop("load of t", Cause.ABORTED))
    for layer in consumer.layers.values():
        layer[OURS] = 0
    producer.offer("t", THEIRS)
    assert consumer.loaded("t").cause == Cause.ABORTED
    assert consumer.gauge("distrusted_producers") == 0


def test_an_unreachable_producer_is_not_distrusted(ranks: Ranks) -> None:
    consumer = ranks(SHORT, produces=False, audits=True)
    peers = (Peer(Source("127.0.0.1", 9, "engine"), GEOMETRY.shard),)
    consumer.agent.submit(load_of([], "t", compares=True, peers=peers))
    assert consumer.loaded("t").cause == Cause.UNREACHABLE
    assert consumer.gauge("distrusted_producers") == 0
