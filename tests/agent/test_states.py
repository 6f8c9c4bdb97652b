# SPDX-License-Identifier: Apache-2.0
"""Agents of hybrid models: KV streams, and states follow after the last step, all at once or not at all."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from support.agents import (
    HALVES,
    LONG,
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
from support.state_caches import Order, Sections, StateRank, gdn, mamba2

from pd_connector.agent.commands import Computed, Drop
from pd_connector.agent.handshake import RankIdentity, RefusedError, check_hello, hello
from pd_connector.agent.page_gate import RevokedError
from pd_connector.errors import Cause
from pd_connector.kv.geometry import Geometry, Group, Shard
from pd_connector.pages.paged_cache import LayerPages, PagedCache
from pd_connector.plan.chunks import Chunk
from pd_connector.plan.route import Route
from pd_connector.protocol.consuming.incoming import Load
from pd_connector.protocol.producing.outgoing import Offer
from pd_connector.protocol.wire import messages
from pd_connector.protocol.wire.peers import Peer

__all__ = ["ranks"]

STATE_LAYERS = (2, 3, 4)
PAGES = [5, 3, 17, 0, 9]
INTO = [20, 1, 7, 2, 13]
PROMPT = 20
STATE_TOKEN = 19
each_transport = pytest.mark.parametrize("transport", TRANSPORTS)


GDN = gdn(2, 4)


class HybridRank(Rank):
    """Two layers of attention and three of states. States of a request are in page 1 of the second table."""

    def __init__(
        self,
        settings: dict[str, Any],
        shard: Shard = WHOLE,
        kept: Sections = GDN,
        order: Order = "SD",
        *,
        fills: bool = False,
        layout: str = "test",
        **options: Any,
    ) -> None:
        whole = msgspec.structs.replace(shard, stop_layer=5)
        self.states = StateRank(whole, STATE_LAYERS, kept, order)
        if fills:
            self.states.fill()
        self.state_writes: list[tuple[int, str]] = []  # chunks of KV before it, and its section
        self.kv_writes = 0
        geometry = geometry_of(shard, layout=layout)
        super().__init__(settings, geometry=geometry, seed=0 if fills else 1, **options)

    def make_cache(self, seen: dict[int, LayerPages], geometry: Geometry) -> PagedCache:
        (states,) = self.states.geometry.groups
        states = msgspec.structs.replace(states, table=1)
        both = Geometry(self.states.geometry.shard, (*geometry.groups, states))
        cache = PagedCache({**seen, **self.states.layers}, both, clears=True)
        scatter = cache.scatter

        def noted(route: Route, chunk: Chunk, *arguments: Any) -> None:
            if route.section is None:
                self.kv_writes += 1
            else:
                self.state_writes.append((self.kv_writes, route.section.name))
            scatter(route, chunk, *arguments)

        cache.scatter = noted  # type: ignore[method-assign]
        return cache

    @property
    def peer(self) -> Peer:
        return Peer(self.source, self.states.geometry.shard)

    def offers(
        self, transfer: str, *, computed: int | None = None, state_token: int = STATE_TOKEN
    ) -> None:
        prompt = len(PAGES) * self.page_tokens
        final = computed is None
        tokens = prompt if computed is None else computed
        tables = PAGES, [1] if final else []
        request = f"offer of {transfer}"
        offer = Offer(transfer, request, tables, TOKENS, prompt, tokens, final)
        self.agent.submit(offer._replace(state_token=state_token))

    def loads(
        self,
        transfer: str,
        peers: Sequence[Peer],
        *,
        first: int = 0,
        stop: int = len(INTO) * 4,
        wait: bool = False,
        state_token: int = STATE_TOKEN,
    ) -> None:
        tables = INTO, [1]
        request = f"load of {transfer}"
        load = Load(request, transfer, tuple(peers), TOKENS, first, stop, tables, wait)
        self.agent.submit(load._replace(state_token=state_token))


def pair(ranks: Ranks, settings: dict[str, Any], **options: Any) -> tuple[HybridRank, HybridRank]:
    producer = ranks.add(HybridRank(settings, fills=True, consumes=False, **options))
    return producer, ranks.add(HybridRank(settings, order="DS", produces=False))


@each_transport
def test_kv_and_states_arrive_exactly(ranks: Ranks, transport: str) -> None:
    producer, consumer = pair(ranks, LONG | TRANSPORTS[transport])
    assert consumer.states.problem() != ""
    producer.offers("t")
    consumer.loads("t", [producer.peer])
    finished = consumer.loaded("t")
    assert (finished.cause, finished.detail) == (None, "")
    assert_pages(producer, PAGES, consumer, INTO)
    assert consumer.states.problem() == ""
    assert producer.freed("t").cause is None


@each_transport
def test_what_a_load_leaves_out_of_its_last_page_is_zero(ranks: Ranks, transport: str) -> None:
    """Attention reads the page whole. What an earlier request has left there, such as a state, can be NaN."""
    settings = LONG | TRANSPORTS[transport]
    producer = ranks.add(HybridRank(settings, fills=True, consumes=False))
    # Pages of another layout do not pass whole.
    consumer = ranks.add(HybridRank(settings, layout="other", produces=False))
    views = [v for n in (0, 1) for v in consumer.cache.layer(n)[:2] if v is not None]
    for view in views:
        view.fill_(float("nan"))
    producer.offers("t")
    consumer.loads("t", [producer.peer], stop=STATE_TOKEN)
    assert consumer.loaded("t").cause is None
    for view in views:
        assert not view[INTO[-1], :, STATE_TOKEN % 4 :].any()
        untouched = [page for page in range(len(view)) if page not in INTO]
        assert view[untouched].isnan().all()  # the control: they did hold no numbers
    producer.freed("t")


@each_transport
def test_states_pass_after_the_last_step_and_are_written_after_all_else(
    ranks: Ranks, transport: str
) -> None:
    producer, consumer = pair(ranks, LONG | TRANSPORTS[transport])
    consumer.loads("t", [producer.peer], wait=True)
    producer.offers("t", computed=8)
    producer.agent.submit(Computed("t", "offer of t", PROMPT))
    until(lambda: consumer.count("received_chunks") >= 2, "KV of a running prefill")
    assert not consumer.state_writes
    producer.offers("t")
    assert consumer.loaded("t").cause is None
    before = {kv for kv, _ in consumer.state_writes}
    assert before == {consumer.kv_writes}
    assert {name for _, name in consumer.state_writes} == {one.name for one in gdn(2, 4)}
    assert consumer.states.problem() == ""


@pytest.mark.parametrize("kept", [gdn(2, 4), mamba2(8, 1)], ids=["gdn", "mamba2 of one group"])
def test_states_of_two_ranks_go_to_one_and_back(ranks: Ranks, kept: Sections) -> None:
    for shards, others in ((HALVES, (WHOLE,)), ((WHOLE,), HALVES)):
        options = {"kept": kept}
        ours = [
            ranks.add(HybridRank(LONG, s, fills=True, consumes=False, **options)) for s in shards
        ]
        own = [msgspec.structs.replace(shard, stop_layer=5) for shard in others]
        theirs = [
            ranks.add(HybridRank(LONG, s, produces=False, order="DS", shards=own, **options))
            for s in others
        ]
        for rank in ours:
            rank.offers("t")
        for rank in theirs:
            rank.loads("t", [one.peer for one in ours])
        for rank in theirs:
            assert rank.loaded("t").cause is None
            assert rank.states.problem() == ""
        assert [rank.freed("t").cause for rank in ours] == [None] * len(ours)


def test_states_alone_where_all_kv_is_there(ranks: Ranks) -> None:
    producer, consumer = pair(ranks, LONG)
    producer.offers("t")
    consumer.loads("t", [producer.peer], first=PROMPT)
    assert consumer.loaded("t").cause is None
    assert consumer.states.problem() == ""
    assert consumer.kv_writes == 0


def test_of_two_positions_the_one_that_is_asked_for_passes(ranks: Ranks) -> None:
    """Audits compare states at an earlier position, whose page is listed behind the latest one's."""
    producer, consumer = pair(ranks, LONG)
    for states in producer.states.layers.values():
        for view in states.sections:
            view[2].copy_(view[1].flip(0))
    prompt = len(PAGES) * producer.page_tokens
    offer = Offer("t", "offer of t", (PAGES, [1, 2]), TOKENS, prompt, prompt, True)
    producer.agent.submit(offer._replace(state_token=STATE_TOKEN, boundary_token=16))
    consumer.loads("t", [producer.peer], state_token=16)
    assert consumer.loaded("t").cause is None
    for layer, states in consumer.states.layers.items():
        for here, there in zip(
            states.sections, producer.states.layers[layer].sections, strict=True
        ):
            assert torch.equal(here[1], there[2])
            assert not torch.equal(here[1], there[1])


@pytest.mark.parametrize(
    ("told", "detail"),
    [
        (20, "states stand after 20 tokens, wanted after 19"),
        (0, "states are not kept, wanted after 19"),
    ],
)
def test_states_that_stand_elsewhere_are_refused_with_both_values(
    ranks: Ranks, told: int, detail: str
) -> None:
    producer, consumer = pair(ranks, LONG)
    producer.offers("t", state_token=told)
    consumer.loads("t", [producer.peer])
    finished = consumer.loaded("t")
    assert finished.cause is Cause.TOKENS
    assert detail in finished.detail
    assert not consumer.state_writes
    producer.agent.submit(Drop("offer of t", Cause.ABORTED))
    producer.freed("t")


def test_a_final_offer_with_another_position_than_the_first_ones_is_refused(ranks: Ranks) -> None:
    producer, consumer = pair(ranks, LONG)
    consumer.loads("t", [producer.peer], wait=True)
    producer.offers("t", computed=8)
    producer.agent.submit(Computed("t", "offer of t", PROMPT))
    until(lambda: consumer.count("received_chunks") >= 1, "KV of a running prefill")
    producer.offers("t", state_token=PROMPT)
    finished = consumer.loaded("t")
    assert finished.cause is Cause.TOKENS
    assert "after 20 tokens, wanted after 19" in finished.detail
    assert not consumer.state_writes
    producer.freed("t")


def test_a_load_that_says_no_position_is_refused(ranks: Ranks) -> None:
    producer, consumer = pair(ranks, LONG)
    producer.offers("t")
    consumer.loads("t", [producer.peer], state_token=0)
    finished = consumer.loaded("t")
    assert finished.cause is Cause.GEOMETRY
    assert "layers 2-4 keep states" in finished.detail
    producer.freed("t")


def test_kv_alone_is_compared_where_the_producer_keeps_no_state_of_before(ranks: Ranks) -> None:
    producer = ranks.add(HybridRank(LONG, fills=True, consumes=False))
    consumer = ranks.add(HybridRank(LONG, fills=True, order="DS", produces=False))
    stop = len(PAGES) * producer.page_tokens
    for transfer, wanted, cause in (("s", 16, Cause.TOKENS), ("t", 0, None)):
        producer.offers(transfer)
        tables, request = (PAGES, [-1, 1]), f"load of {transfer}"
        load = Load(request, transfer, (producer.peer,), TOKENS, 0, stop, tables, False)
        consumer.agent.submit(load._replace(compares=True, state_token=wanted))
        finished = consumer.loaded(transfer)
        assert finished.cause is cause, finished.detail
        producer.agent.submit(Drop(f"offer of {transfer}", Cause.ABORTED))
        producer.freed(transfer)
    assert not consumer.state_writes


@pytest.mark.parametrize("wrong", ["conv.q", "ssm"])
def test_a_corrupt_section_leaves_the_page_as_it_was(
    ranks: Ranks, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = pair(ranks, LONG | TRANSPORTS["shm"])
    gather = producer.cache.gather

    def gathered(route: Route, *arguments: Any) -> Any:
        payload = gather(route, *arguments)
        if route.section is not None and route.section.name == wrong:
            producer.cache.last_checksum = b"not the sum of it"
        return payload

    monkeypatch.setattr(producer.cache, "gather", gathered)
    before = [view.clone() for pages in consumer.states.layers.values() for view in pages.sections]
    producer.offers("t")
    consumer.loads("t", [producer.peer])
    assert consumer.loaded("t").cause is Cause.CHECKSUM
    assert not consumer.state_writes
    after = [view for pages in consumer.states.layers.values() for view in pages.sections]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    producer.freed("t")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_load_cut_at_any_chunk_writes_no_state(
    ranks: Ranks, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = pair(ranks, LONG | TRANSPORTS[transport])
    before = [view.clone() for pages in consumer.states.layers.values() for view in pages.sections]
    side = consumer.loop.consumer_side
    assert side is not None
    pipeline, cut, placed = side._receive_pipeline, 0, 0
    place = pipeline.place

    def placing(*arguments: Any) -> Any:
        nonlocal placed
        placed += 1
        if placed > cut:
            raise RevokedError
        return place(*arguments)

    monkeypatch.setattr(pipeline, "place", placing)
    for number in range(100):
        placed, cut = 0, number
        producer.offers(f"t{number}")
        consumer.loads(f"t{number}", [producer.peer])
        ended = consumer.loaded(f"t{number}")
        producer.freed(f"t{number}")
        assert not pipeline._states
        if ended.cause is None:
            break
        assert ended.cause is Cause.ABORTED
        after = [view for pages in consumer.states.layers.values() for view in pages.sections]
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert number >= 1 + len(GDN)
    assert consumer.states.problem() == ""


def test_unlike_states_are_refused_in_the_handshake(ranks: Ranks) -> None:
    producer = ranks.add(HybridRank(LONG, fills=True, consumes=False))
    consumer = ranks.add(HybridRank(LONG, kept=gdn(2, 4, rows=4), produces=False))
    producer.offers("t")
    consumer.loads("t", [producer.peer])
    finished = consumer.loaded("t")
    assert finished.cause is Cause.GEOMETRY
    assert "differ in rows of conv.q 3 / 4" in finished.detail
    assert producer.freed("t").cause is not None


OLD = {"frozen": True, "forbid_unknown_fields": True}
OldShard = msgspec.defstruct(
    "OldShard", [(f, int) for f in ("first_layer", "stop_layer", "tp_rank", "tp_size")], **OLD
)
_GROUP = (
    [("kind", str), ("layers", tuple[int, ...])]
    + [(f, int) for f in ("heads", "key_dim", "value_dim", "page_size", "window")]
    + [("dtype", str), ("layout", str), ("heads_apart", bool)]
)
_SCALES = tuple[tuple[float, float], ...]
OldGroup = msgspec.defstruct(
    "OldGroup", [*_GROUP, ("table", int, 0), ("scales", _SCALES, ())], **OLD
)
OldGeometry = msgspec.defstruct(
    "OldGeometry", [("shard", OldShard), ("groups", tuple[OldGroup, ...])], **OLD
)
"""The structs of schema 1, as its first release has them."""


def identity() -> RankIdentity:
    return RankIdentity("engine", 1, Rank.__init__.__kwdefaults__["facts"])


PLAIN = geometry_of()
STATES = StateRank(Shard(0, 5, 0, 1), STATE_LAYERS, gdn(2, 4)).geometry


def test_a_geometry_that_schema_1_can_say_has_its_bytes() -> None:
    group = msgspec.structs.replace(PLAIN.groups[0], table=3, scales=((0.5, 2.0),) * 2)
    for groups in (PLAIN.groups, (group, PLAIN.groups[0])):
        told = msgspec.msgpack.encode(Geometry(Shard(0, 2, 1, 2), groups))
        old = msgspec.msgpack.decode(told, type=OldGeometry)
        assert msgspec.msgpack.encode(old) == told
    said = hello(identity(), PLAIN, ["raw"], [])
    assert b"extended" not in messages.encode(said)
    assert b"state_token" not in messages.encode(messages.Open("t", b"", 0, 1, True, [], 1))


def test_a_peer_of_schema_1_can_read_the_hello_of_a_rank_with_states() -> None:
    said = messages.encode(hello(identity(), STATES, ["raw"], []))
    old = msgspec.defstruct("Hello", [("newest", int), ("oldest", int), ("geometry", OldGeometry)])
    found = msgspec.msgpack.decode(said, type=old)
    assert (found.oldest, found.newest) == (2, 2)
    with pytest.raises(msgspec.ValidationError):  # the control: the true geometry cannot be read
        msgspec.msgpack.decode(msgspec.msgpack.encode(STATES), type=OldGeometry)


@pytest.mark.parametrize(
    ("source", "destination", "told"),
    [
        (STATES, STATES, None),
        (PLAIN, PLAIN, None),
        (STATES, PLAIN, "producer speaks 2-2, consumer 1-1: upgrade pd-connector on the consumer"),
    ],
    ids=["states", "plain", "states to a consumer of schema 1"],
)
def test_a_consumer_of_schema_1_is_refused_by_states_only(
    source: Geometry, destination: Geometry, told: str | None
) -> None:
    said = hello(identity(), destination, ["raw"], [])
    if told is None:
        newest = said.newest if destination is STATES else 1
        said = msgspec.structs.replace(said, newest=newest, oldest=min(said.oldest, newest))
        assert check_hello(said, identity(), source, ["raw"])[0] == newest
        return
    said = msgspec.structs.replace(said, newest=1, oldest=1)
    with pytest.raises(RefusedError, match=told) as refused:
        check_hello(said, identity(), source, ["raw"])
    assert refused.value.cause is Cause.VERSION


def test_a_producer_of_schema_1_refuses_states_with_both_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = hello(identity(), STATES, ["raw"], [])
    monkeypatch.setattr(messages, "SCHEMA", 1)
    with pytest.raises(
        RefusedError, match=r"producer speaks 1-1, consumer 2-2: upgrade .*producer"
    ):
        check_hello(said, identity(), PLAIN, ["raw"])


def test_a_rank_of_prefill_context_parallelism_needs_schema_2() -> None:
    for shard in (Shard(0, 2, 0, 2, 2), Shard(0, 2, 0, 1, 1, 0, 2)):
        assert Geometry(shard, PLAIN.groups).needs_schema == 2
    split: Group = msgspec.structs.replace(PLAIN.groups[0], state_tokens=4)
    assert Geometry(WHOLE, (split,)).needs_schema == 2
    assert PLAIN.needs_schema == 1
