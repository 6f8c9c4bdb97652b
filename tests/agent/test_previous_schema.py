# SPDX-License-Identifier: Apache-2.0
"""A rolling upgrade transfers: this version and the previous wire schema's hand over to each other, in two processes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from previous_schema import PreviousRank, unpack
from support.agents import HALVES, Rank, Ranks, geometry_of, make_layers, ranks, views

from pd_connector.errors import Cause
from pd_connector.kv.geometry import Geometry, Shard
from pd_connector.plan.rules import RULES, PlanRules
from pd_connector.protocol.peers import Peer, Source

__all__ = ["ranks"]

PAGES = 160
PAGE_TOKENS = 16
PROMPT_PAGES = 63
WIDE: dict[str, Any] = {"page_size": PAGE_TOKENS, "key_dim": 64, "value_dim": 64}
"""1 KiB a token and layer: a prompt is several chunks, and its edges are cut up."""
KEY = "5f0c7b1de96a42388d14c37be0a95f26137be4d8092fa65cb37e18d4f0296ca1"
"""As `pd-connector key` makes them. Keys that a person thought of are stretched since schema 3, and take no part in a
rolling upgrade."""
PATIENT: dict[str, Any] = {"slot_mib": 1, "slots": 4, "heartbeat_s": 0.1}
"""Settings that both versions know."""
ODD = PlanRules(
    chunk_tokens=96,
    min_chunk_tokens=32,
    streamed_rows=1,
    min_chunk_bytes=32 * 1024,
    spare_bytes=1,
    edge_pieces=3,
    edge_cuts=1,
)

TRANSPORTS: dict[str, dict[str, Any]] = {
    "shm direct": {"transports": ["shm"]},
    "shm read": {"transports": ["shm"], "direction": "read"},
    "shm written": {"transports": ["shm"], "direction": "write"},
    "tcp": {"transports": ["tcp"]},
    "tcp with a key": {"transports": ["tcp"], "key": "5e" * 32},  # it does not stretch phrases
}
Previous = Callable[..., PreviousRank]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("schema2"))


@pytest.fixture
def previous(root: Path) -> Iterator[Previous]:
    started: list[PreviousRank] = []

    def start(settings: dict[str, Any], geometry: dict[str, Any], **options: Any) -> PreviousRank:
        started.append(PreviousRank(root, settings, geometry, pages=PAGES, **options))
        return started[-1]

    yield start
    for rank in started:
        rank.close()


def settings_of(transport: str, **changes: Any) -> dict[str, Any]:
    return PATIENT | TRANSPORTS[transport] | changes


def as_tuples(settings: dict[str, Any]) -> dict[str, Any]:
    return settings | {"transports": tuple(settings["transports"])}


def tokens_of(
    geometry: Geometry, layers: dict[int, torch.Tensor], pages: list[int], layer: int
) -> torch.Tensor:
    """K and V of a prompt in these pages, `[K|V, head, token, dim]` as bits."""
    (group,) = geometry.groups
    seen = views(layers[layer], group)
    assert seen.value is not None
    parts = [part[pages].transpose(0, 1).flatten(1, 2) for part in (seen.key, seen.value)]
    return torch.stack([part.view(torch.int16) for part in parts])


def layers_of(rank: PreviousRank, geometry: Geometry, pages: list[int]) -> dict[int, torch.Tensor]:
    """What these pages hold there, at the same numbers; other pages are zero."""
    (group,) = geometry.groups
    found = make_layers(geometry, PAGES, 0)
    for number, layer in found.items():
        layer.zero_()
        for page in pages:
            for head in geometry.heads(group):
                part = bytearray(rank.call("part", page, number, head))
                place = head - geometry.heads(group).start
                layer[page, place] = torch.frombuffer(part, dtype=torch.bfloat16)
    return found


def assert_moved(
    here: tuple[Geometry, dict[int, torch.Tensor], list[int]],
    there: tuple[Geometry, dict[int, torch.Tensor], list[int]],
    tokens: int,
) -> None:
    """What lies there is what lies here, for the heads that are there. Bit by bit."""
    heads = there[0].heads(there[0].groups[0])
    for layer in there[0].groups[0].layers:
        wanted = tokens_of(*here, layer)[:, heads.start : heads.stop, :tokens]
        assert torch.equal(tokens_of(*there, layer)[:, :, :tokens], wanted), f"layer {layer}"


UNLIKE = {
    "alike": {},
    "half the pages": {"page_size": 8},
    "double pages": {"page_size": 32},
    "another layout": {"layout": "another"},
    "half the heads": {"shard": msgspec.structs.astuple(HALVES[1])},
}


each_way = pytest.mark.parametrize(
    ("transport", "change"),
    [
        *(
            (transport, change)
            for transport in TRANSPORTS
            for change in ("alike", "half the heads")
        ),
        *(("tcp", change) for change in ("half the pages", "double pages", "another layout")),
    ],
)


def geometries(change: str) -> tuple[dict[str, Any], Geometry]:
    """What differs at the consumer, and its geometry."""
    told = WIDE | UNLIKE[change]
    shard = Shard(*told["shard"]) if "shard" in told else Shard(0, 2, 0, 1)
    return told, geometry_of(shard, **{k: v for k, v in told.items() if k != "shard"})


def consumer_pages(geometry: Geometry) -> list[int]:
    (group,) = geometry.groups
    count = -(-PROMPT_PAGES * PAGE_TOKENS // group.page_size)
    return [(7 * n + 3) % PAGES for n in range(count)]


HERE = geometry_of(**WIDE)
PRODUCER_PAGES = [(11 * n + 5) % PAGES for n in range(PROMPT_PAGES)]
TOKENS = PROMPT_PAGES * PAGE_TOKENS - 7
"""The last page is not full."""


def from_previous(
    ranks: Ranks, previous: Previous, transport: str, change: str, **settings: Any
) -> tuple[Rank, Any]:
    """The previous version prefills, this one decodes; returns this one's rank and the outcome."""
    told = settings_of(transport, **settings)
    producer = previous(told, dict(WIDE), consumes=False)
    _, geometry = geometries(change)
    shards = HALVES if geometry.shard.tp_size > 1 else (geometry.shard,)
    options = {"pages": PAGES, "geometry": geometry, "shards": shards}
    consumer = ranks(as_tuples(told), seed=1, produces=False, **options)
    producer.call("offer", "t", PRODUCER_PAGES)
    peer = Peer(Source(*producer.call("source")), HERE.shard)
    pages = consumer_pages(geometry)
    consumer.load([peer], "t", pages, tokens=TOKENS)
    finished = consumer.loaded("t")
    if finished.cause is None:
        theirs = HERE, make_layers(HERE, PAGES, 0), PRODUCER_PAGES
        assert_moved(theirs, (geometry, consumer.layers, pages), TOKENS)
    return consumer, finished


@each_way
def test_the_previous_version_prefills_for_this_one(
    ranks: Ranks, previous: Previous, transport: str, change: str
) -> None:
    _, finished = from_previous(ranks, previous, transport, change)
    assert finished.cause is None, finished
    assert finished.chunks >= 4


@each_way
def test_this_version_prefills_for_the_previous_one(
    ranks: Ranks, previous: Previous, transport: str, change: str
) -> None:
    settings = settings_of(transport)
    producer = ranks(as_tuples(settings), pages=PAGES, geometry=HERE, consumes=False)
    told, geometry = geometries(change)
    consumer = previous(settings, told, seed=1, produces=False)
    producer.offer("t", PRODUCER_PAGES)
    pages = consumer_pages(geometry)
    peers = [[list(producer.source), msgspec.structs.astuple(HERE.shard)]]
    consumer.call("load", peers, "t", pages, tokens=TOKENS)
    _, cause, detail, _, chunks, _ = consumer.call("loaded", "t")
    assert cause is None, (cause, detail)
    assert chunks >= 4
    assert producer.freed("t").cause is None
    there = geometry, layers_of(consumer, geometry, pages), pages
    assert_moved((HERE, producer.layers, PRODUCER_PAGES), there, TOKENS)


def test_kv_streams_to_the_previous_version_while_the_prefill_runs(
    ranks: Ranks, previous: Previous
) -> None:
    settings = settings_of("tcp")
    producer = ranks(as_tuples(settings), pages=PAGES, geometry=HERE, consumes=False)
    consumer = previous(settings, dict(WIDE), seed=1, produces=False)
    producer.offer("t", PRODUCER_PAGES, computed=512)
    pages = consumer_pages(HERE)
    peers = [[list(producer.source), msgspec.structs.astuple(HERE.shard)]]
    consumer.call("load", peers, "t", pages, tokens=TOKENS, wait=True)
    producer.offer("t", PRODUCER_PAGES)
    _, cause, detail, *_ = consumer.call("loaded", "t")
    assert cause is None, (cause, detail)
    there = HERE, layers_of(consumer, HERE, pages), pages
    assert_moved((HERE, producer.layers, PRODUCER_PAGES), there, TOKENS)


def test_codecs_are_read_from_the_previous_version(ranks: Ranks, previous: Previous) -> None:
    """Lossy, so that only their agreement is looked at: the transfer is verified by its checksums."""
    settings = {"codec": "int8"}
    told = settings_of("tcp", **settings)
    producer = previous(told, dict(WIDE), consumes=False)
    consumer = ranks(as_tuples(told), pages=PAGES, seed=1, geometry=HERE, produces=False)
    producer.call("offer", "t", PRODUCER_PAGES)
    peer = Peer(Source(*producer.call("source")), HERE.shard)
    consumer.load([peer], "t", consumer_pages(HERE), tokens=TOKENS)
    finished = consumer.loaded("t")
    assert finished.cause is None, finished
    assert finished.nbytes < 0.6 * TOKENS * 2048, "as codes"


@pytest.mark.parametrize("transport", ["shm written", "tcp"])
def test_rules_of_this_schema_may_change_and_the_previous_one_is_still_planned_with(
    ranks: Ranks, previous: Previous, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    monkeypatch.setitem(RULES, 3, ODD)
    _, finished = from_previous(ranks, previous, transport, "double pages")
    assert finished.cause is None, finished
    settings = as_tuples(settings_of(transport))
    producer, consumer = ranks.pair(settings, pages=PAGES, geometry=HERE)
    producer.offer("t", PRODUCER_PAGES)
    pages = consumer_pages(HERE)
    consumer.load(producer.source, "t", pages, tokens=TOKENS)
    among_ours = consumer.loaded("t")
    assert among_ours.cause is None
    assert among_ours.chunks > finished.chunks, "planned by the rules of this schema"
    theirs = HERE, producer.layers, PRODUCER_PAGES
    assert_moved(theirs, (HERE, consumer.layers, pages), TOKENS)


def test_with_other_rules_than_the_previous_schema_has_transfers_would_fail(
    ranks: Ranks, previous: Previous, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer constant alone, without a schema of its own, is what a rolling upgrade must not meet."""
    monkeypatch.setitem(RULES, 2, ODD)
    _, finished = from_previous(ranks, previous, "tcp", "double pages")
    assert finished.cause is Cause.CHUNK_MISMATCH
