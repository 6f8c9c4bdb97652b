# SPDX-License-Identifier: Apache-2.0
"""Agents with small caches of random bytes, and what must be back when a test ends."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from pd_connector.agent import Agent, Outcome
from pd_connector.config import Config
from pd_connector.consumer import Finished, Load, Source
from pd_connector.geometry import Geometry, Shard
from pd_connector.pages import PagedCache
from pd_connector.producer import Free, Offer

KEY = "a key of more than sixteen characters"
GEOMETRY = Geometry(Shard(0, 2, 0, 3), 4, 20, "uint8", "test")
MODEL = b"model"
TOKENS = b"tokens"

SHORT: dict[str, Any] = {
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

LONG: dict[str, Any] = {"slot_mib": 1, "slots": 4, "heartbeat_s": 0.1}
"""For tests in which nothing may, however slow the machine."""

TRANSPORTS: dict[str, dict[str, Any]] = {
    "shm": {"transports": ("shm",)},
    "tcp": {"transports": ("tcp",)},
    "tcp with a key": {"transports": ("tcp",), "key": KEY},
}


def make_layers(geometry: Geometry, pages: int, seed: int) -> list[torch.Tensor]:
    """Layers `[page, head, token, K and V]` of random bytes."""
    random = torch.Generator().manual_seed(seed)
    shard = geometry.shard
    shape = (pages, shard.heads, geometry.page_size, geometry.token_bytes)
    return [
        torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)
        for _ in range(shard.layers)
    ]


def until(condition: Callable[[], Any], what: str = "", timeout_s: float = 30.0) -> Any:
    """Wait until `condition()` is true; returns what it returned."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what or condition}"
        time.sleep(0.005)
    return found


class Rank:
    """An agent, its cache, and every outcome it has reported."""

    def __init__(
        self,
        settings: dict[str, Any],
        *,
        pages: int = 24,
        seed: int = 0,
        geometry: Geometry = GEOMETRY,
        model: bytes = MODEL,
        engine_id: str = "engine",
        produces: bool = True,
        consumes: bool = True,
        **options: Any,
    ) -> None:
        self.layers = make_layers(geometry, pages, seed)
        self.engine_id = engine_id
        self.ended: dict[str, Outcome] = {}
        self.counts: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        cache = PagedCache(self.layers, geometry)
        roles = {"produces": produces, "consumes": consumes}
        self.agent = Agent(Config(**settings), engine_id, model, cache, **roles, **options)

    @property
    def source(self) -> Source:
        return Source("127.0.0.1", self.agent.port, self.engine_id)

    def offer(self, transfer: str, pages: Sequence[int], identity: bytes = TOKENS) -> None:
        self.agent.submit(Offer(transfer, f"offer of {transfer}", pages, identity))

    def load(
        self,
        source: Source,
        transfer: str,
        pages: Sequence[int],
        *,
        identity: bytes = TOKENS,
        first_page: int = 0,
        wait: bool = False,
    ) -> None:
        request = f"load of {transfer}"
        self.agent.submit(Load(request, transfer, source, identity, first_page, pages, wait))

    def end_of(self, what: str, timeout_s: float = 30.0) -> Outcome:
        """Wait for the outcome of `load of X` or `offer of X`."""
        until(lambda: what in self.look(), f"outcome of {what!r}", timeout_s)
        return self.ended[what]

    def look(self) -> dict[str, Outcome]:
        for outcome in self.agent.outcomes():
            assert outcome.request not in self.ended, "an outcome is reported once"
            self.ended[outcome.request] = outcome
        return self.ended

    def loaded(self, transfer: str) -> Finished:
        ended = self.end_of(f"load of {transfer}")
        assert isinstance(ended, Finished)
        return ended

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

    def page(self, page: int) -> bytes:
        """The bytes of one page in all layers."""
        return b"".join(layer[page].numpy().tobytes() for layer in self.layers)


def assert_pages(
    source: Rank, pages: Sequence[int], destination: Rank, into: Sequence[int]
) -> None:
    for page, local in zip(pages, into, strict=True):
        assert destination.page(local) == source.page(page), f"page {page} -> {local} differs"


def census() -> tuple[int, int]:
    """Open descriptors and threads (ZeroMQ's own included) of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


class Ranks:
    """Starts ranks. At the end each must be idle, and closing it must leave nothing behind."""

    def __init__(self) -> None:
        self._before = census()
        self._started: list[Rank] = []

    def __call__(self, settings: dict[str, Any], **options: Any) -> Rank:
        rank = Rank(settings, **options)
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
        until(self._all_gone, "descriptors and threads gone")

    def _all_gone(self) -> bool:
        return all(now <= then for now, then in zip(census(), self._before, strict=True))


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.finish()
