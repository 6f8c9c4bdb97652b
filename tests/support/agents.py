# SPDX-License-Identifier: Apache-2.0
"""Agents with small caches of random bytes, and what must be back when a test ends."""

import resource
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import pytest
import torch

from pd_connector.agent.agent import Agent, Outcome
from pd_connector.agent.loop import Loop
from pd_connector.codec import COMPILER
from pd_connector.config import Config
from pd_connector.kv.geometry import Geometry, Group, Shard
from pd_connector.kv.model import ModelFacts
from pd_connector.pages.paged_cache import LayerPages, PagedCache
from pd_connector.protocol.consuming.incoming import Finished, Held, Load
from pd_connector.protocol.producing.outgoing import Free, Offer
from pd_connector.protocol.wire.peers import Peer, Source
from pd_connector.transport.base import Transport
from support.leftovers import census, wait_for_leftovers
from support.waits import until

torch.set_num_threads(1)  # a test counts its threads; torch would keep some of its own

KEY = "0123456789abcdef" * 3 + "fedcba9876543210"  # in the form of `pd-connector key`
WHOLE = Shard(0, 2, 0, 1)
HALVES = (Shard(0, 2, 0, 2), Shard(0, 2, 1, 2))
MODEL = ModelFacts(b"config", b"weights")
TOKENS = b"tokens"
PAGE_TOKENS = 4


def geometry_of(shard: Shard = WHOLE, **changes: Any) -> Geometry:
    """Pages `[head][K|V][token][dim]` of bfloat16."""
    layers = tuple(range(shard.first_layer, shard.stop_layer))
    group = Group("attention", layers, 4, 6, 4, PAGE_TOKENS, 0, "bfloat16", "test", True)
    return Geometry(shard, (msgspec.structs.replace(group, **changes),))


GEOMETRY = geometry_of()

SHORT: dict[str, Any] = {
    "lease_share": 1.0,
    "slot_mib": 1,
    "slots": 4,
    "lease_s": 1.5,
    "heartbeat_s": 0.1,
    "session_timeout_s": 1.0,
    "connect_timeout_s": 1.0,
    "stall_timeout_s": 1.0,
    "wait_timeout_s": 1.5,
}
"""For tests in which something is to time out."""

LONG: dict[str, Any] = {
    "slot_mib": 1,
    "slots": 4,
    "heartbeat_s": 0.1,
    "lease_share": 1.0,
    "connect_timeout_s": 60.0,
    "stall_timeout_s": 60.0,
}
"""For tests in which nothing may, however slow the machine."""

TRANSPORTS: dict[str, dict[str, Any]] = {
    "shm": {"transports": ("shm",), "direction": "read"},
    "shm direct": {"transports": ("shm",)},
    "shm written": {"transports": ("shm",), "direction": "write"},
    "tcp": {"transports": ("tcp",)},
    "tcp with a key": {"transports": ("tcp",), "key": KEY},
}


def make_layers(geometry: Geometry, pages: int, seed: int) -> dict[int, torch.Tensor]:
    """Each layer `[page, head, K and V of its tokens]`: the rank's part of a model's random KV."""
    (group,) = geometry.groups
    heads = geometry.heads(group)
    layers = {}
    for layer in group.layers:
        random = torch.Generator().manual_seed(1000 * seed + layer)
        shape = (pages, group.heads, group.page_size * (group.key_dim + group.value_dim))
        whole = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=random)
        layers[layer] = whole[:, heads.start : heads.stop].contiguous().view(torch.bfloat16)
    return layers


def views(layer: torch.Tensor, group: Group) -> LayerPages:
    """What a cache is told of a layer made by `make_layers`."""
    tokens, keys = group.page_size, group.page_size * group.key_dim
    return LayerPages(
        layer[..., :keys].unflatten(2, (tokens, group.key_dim)),
        layer[..., keys:].unflatten(2, (tokens, group.value_dim)),
        (layer.view(torch.uint8),),
    )


class Rank:
    """An agent, its cache, and every outcome it has reported."""

    def __init__(
        self,
        settings: dict[str, Any],
        *,
        pages: int = 24,
        seed: int = 0,
        geometry: Geometry = GEOMETRY,
        facts: ModelFacts = MODEL,
        engine_id: str = "engine",
        produces: bool = True,
        consumes: bool = True,
        **options: Any,
    ) -> None:
        self.layers = make_layers(geometry, pages, seed)
        self.geometry = geometry
        self.engine_id = engine_id
        self.ended: dict[str, Outcome] = {}
        self.told: dict[str, Held] = {}
        self.counts: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        (group,) = geometry.groups
        self.page_tokens = group.page_size
        seen = {number: views(layer, group) for number, layer in self.layers.items()}
        self.cache = self.make_cache(seen, geometry)
        roles = {"produces": produces, "consumes": consumes}
        self.agent = Agent(Config(**settings), engine_id, facts, self.cache, **roles, **options)

    def make_cache(self, seen: dict[int, LayerPages], geometry: Geometry) -> PagedCache:
        """The cache that the agent gets; a subclass may add layers."""
        return PagedCache(seen, geometry)

    @property
    def loop(self) -> Loop:
        """The agent's present life: a test may break it, hold it up, or look at what it has forgotten."""
        return self.agent._loop

    @property
    def transports(self) -> list[Transport]:
        return self.loop._transports

    def die(self) -> None:
        """The agent's next turn ends it."""

        def fail(now: float) -> None:
            raise RuntimeError("a defect")

        self.loop.step = fail  # type: ignore[method-assign]

    @property
    def source(self) -> Source:
        return Source("127.0.0.1", self.agent.port, self.engine_id)

    @property
    def peer(self) -> Peer:
        return Peer(self.source, self.geometry.shard)

    def offer(
        self,
        transfer: str,
        pages: Sequence[int],
        identity: bytes = TOKENS,
        *,
        computed: int | None = None,
        provisional: bool = False,
    ) -> None:
        """Offer pages; with `computed`, those of a running prefill with that number of tokens computed. A `provisional`
        offer may still be withdrawn."""
        prompt = len(pages) * self.page_tokens
        final = computed is None
        tokens = prompt if computed is None else computed
        request, tables = f"offer of {transfer}", (list(pages),)
        offer = Offer(transfer, request, tables, identity, prompt, tokens, final)
        self.agent.submit(offer._replace(provisional=provisional))

    def load(
        self,
        producer: Source | Sequence[Peer],
        transfer: str,
        pages: Sequence[int],
        *,
        identity: bytes = TOKENS,
        first_page: int = 0,
        tokens: int | None = None,
        wait: bool = False,
    ) -> None:
        """Load a prompt, or its first `tokens` tokens, into pages; those before `first_page` are
        here already."""
        peers = (Peer(producer, WHOLE),) if isinstance(producer, Source) else tuple(producer)
        tables = ([-1] * first_page + list(pages),)
        first = first_page * self.page_tokens
        stop = tokens or first + len(pages) * self.page_tokens
        request = f"load of {transfer}"
        self.agent.submit(Load(request, transfer, peers, identity, first, stop, tables, wait))

    def end_of(self, what: str, timeout_s: float = 60.0) -> Outcome:
        """Wait for the outcome of `load of X` or `offer of X`."""
        until(lambda: what in self.look(), f"outcome of {what!r}", timeout_s)
        return self.ended[what]

    def look(self) -> dict[str, Outcome]:
        for outcome in self.agent.outcomes():
            if isinstance(outcome, Held):
                assert outcome.request not in self.told, "a watched hold is told of once"
                self.told[outcome.request] = outcome
                continue
            assert outcome.request not in self.ended, "an outcome is reported once"
            self.ended[outcome.request] = outcome
        return self.ended

    def loaded(self, transfer: str) -> Finished:
        ended = self.end_of(f"load of {transfer}")
        assert isinstance(ended, Finished)
        return ended

    def held(self, transfer: str) -> Held:
        """Wait for what a watched hold, of the same request as a load, is told."""
        request = f"load of {transfer}"
        until(lambda: request in self.look() or request in self.told, f"an answer to {request!r}")
        return self.told[request]

    def freed(self, transfer: str) -> Free:
        ended = self.end_of(f"offer of {transfer}")
        assert isinstance(ended, Free)
        return ended

    def gauge(self, name: str) -> float:
        return self.agent.telemetry.gauges()[name]

    def count(self, name: str, **labels: str) -> float:
        """How often that was counted since the start."""
        if snapshot := self.agent.telemetry.take():
            for key, amount in snapshot.counts.items():
                self.counts[key] = self.counts.get(key, 0) + amount
        return self.counts.get((name, tuple(sorted(labels.items()))), 0)

    def at_rest(self) -> bool:
        gauges = self.agent.telemetry.gauges()
        busy = ("leased_pages", "outgoing_transfers", "incoming_transfers", "landing_slots")
        return not any(gauges.get(name) for name in (*busy, "send_slots"))

    def assert_at_rest(self) -> None:
        until(self.at_rest, f"at rest: {self.agent.telemetry.gauges()}")
        assert self.count("agent_failures") == 0
        assert self.count("session_errors") == 0

    def limit_descriptors(self, most: int) -> None:
        """For a rank in a process of its own."""
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )

    def part(self, page: int, layer: int, head: int) -> bytes:
        """KV of one page in one layer and head, by their numbers in the model."""
        (group,) = self.geometry.groups
        place = head - self.geometry.heads(group).start
        return self.layers[layer][page, place].view(torch.uint8).numpy().tobytes()

    def page(self, page: int) -> bytes:
        """The bytes of one page in all layers."""
        layers = self.layers.values()
        return b"".join(layer[page].view(torch.uint8).numpy().tobytes() for layer in layers)


def assert_pages(
    source: Rank | Sequence[Rank], pages: Sequence[int], destination: Rank, into: Sequence[int]
) -> None:
    """Each page's layers and heads are those of the source rank that holds them."""
    (group,) = destination.geometry.groups
    ranks = [source] if isinstance(source, Rank) else source
    for page, local in zip(pages, into, strict=True):
        for layer in group.layers:
            for head in destination.geometry.heads(group):
                rank = next(r for r in ranks if head in r.geometry.heads(group))
                wanted = rank.part(page, layer, head)
                found = destination.part(local, layer, head)
                assert found == wanted, f"page {page} -> {local} differs, layer {layer} head {head}"


R = TypeVar("R", bound=Rank)


class Ranks:
    """Starts ranks. At the end each must be idle, and closing it must leave nothing behind."""

    def __init__(self) -> None:
        self._before = census()
        self._started: list[Rank] = []

    def __call__(self, settings: dict[str, Any], **options: Any) -> Rank:
        return self.add(Rank(settings, **options))

    def add(self, rank: R) -> R:
        """Look after a rank that a test has made."""
        self._started.append(rank)
        return rank

    def pair(self, settings: dict[str, Any], **options: Any) -> tuple[Rank, Rank]:
        """A producer and a consumer whose caches differ."""
        producer = self(settings, consumes=False, **options)
        return producer, self(settings, seed=1, produces=False, **options)

    def stop(self, rank: Rank) -> None:
        """End a rank in the middle of things."""
        self._started.remove(rank)
        rank.agent.close()

    def finish(self) -> None:
        try:
            for rank in self._started:
                rank.assert_at_rest()
        finally:
            for rank in self._started:
                rank.agent.close()
        if COMPILER._work.begun:  # a thread, for as long as the machine takes
            COMPILER.wait()
        wait_for_leftovers(self._before)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.finish()
