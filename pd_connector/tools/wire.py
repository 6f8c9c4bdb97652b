# SPDX-License-Identifier: Apache-2.0
"""KV of one prompt on its way between two agents, without engines: for `bench wire`, here and in `ci/bench`."""

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from pd_connector.agent.agent import Agent
from pd_connector.config import Config
from pd_connector.errors import PDConnectorError
from pd_connector.kv.geometry import Geometry, Group, Shard
from pd_connector.kv.model import ModelFacts
from pd_connector.pages.paged_cache import LayerPages, PagedCache
from pd_connector.protocol.consuming.incoming import Finished, Load
from pd_connector.protocol.producing.outgoing import Offer
from pd_connector.protocol.wire.peers import Peer, Source

LAYERS = 32
KV_HEADS = 8
HEAD_DIM = 128
PAGE_TOKENS = 16
PAGE_BYTES = 2 * KV_HEADS * PAGE_TOKENS * HEAD_DIM * 2
"""One page of one layer, K and V in bfloat16: 64 KiB."""
TOKEN_BYTES = LAYERS * PAGE_BYTES // PAGE_TOKENS
"""One token in all layers: 128 KiB."""
POLL_S = 0.0005
TIMEOUT_S = 120.0

LOSSY_ERROR = 0.04
"""Relative L2 error that a page may have after a lossy codec. E4M3 rounds normal values by 0.026."""

_WIDTH = 2 * HEAD_DIM
_SHIFT = 977
"""Each layer has the values of the previous layer, moved by this many elements."""
_SIDES = ("producer", "consumer")
_IDENTITY = b"wire"
_ENGINE = "bench"
_WAIT_S = 0.1


class WireCache:
    """32 layers x 8 KV heads x 128 in bfloat16, pages of 16 tokens as `[head][token][K, V]`.

    Args:
        role: `producer` or `consumer`. The producer's cache holds normal random values, the consumer's holds
            zeros. Each has its prompt's pages in its own random order.
        tokens: number of tokens of the prompt, a multiple of 16; the cache holds nothing else.
    """

    def __init__(self, role: str, tokens: int) -> None:
        self.tokens = tokens
        self.page_count = tokens // PAGE_TOKENS
        self.tables = {side: _order(side, self.page_count) for side in _SIDES}
        self.pages = self.tables[role]
        shape = (self.page_count, KV_HEADS, PAGE_TOKENS, _WIDTH)
        random_values = torch.Generator().manual_seed(1)
        self._base = torch.randn(shape, generator=random_values).to(torch.bfloat16)
        self.layers = [torch.zeros_like(self._base) for _ in range(LAYERS)]
        if role == "producer":
            for number, layer in enumerate(self.layers):
                layer.copy_(self._values(number))
        layer_numbers = tuple(range(LAYERS))
        group = Group(
            "attention",
            layer_numbers,
            KV_HEADS,
            HEAD_DIM,
            HEAD_DIM,
            PAGE_TOKENS,
            0,
            "bfloat16",
            "bench/HNC",
            heads_apart=True,
        )
        self.geometry = Geometry(Shard(0, LAYERS, 0, 1), (group,))

    @property
    def nbytes(self) -> int:
        return self.tokens * TOKEN_BYTES

    def paged(self) -> PagedCache:
        """The cache in the form that an agent takes."""
        return PagedCache({n: _views(layer) for n, layer in enumerate(self.layers)}, self.geometry)

    def wipe(self) -> None:
        for layer in self.layers:
            layer.zero_()

    def check(self, lossy: bool) -> str:
        """Why a consumer's cache is wrong after a transfer; empty if all pages are right."""
        theirs, mine = self.tables["producer"], self.tables["consumer"]
        for number, layer in enumerate(self.layers):
            expected, received = self._values(number)[theirs], layer[mine]
            if not lossy:
                if not torch.equal(received, expected):
                    return f"layer {number} differs"
                continue
            exact, off = expected.float(), received.float() - expected.float()
            axes = (1, 2, 3)
            error = float((off.square().sum(axes) / exact.square().sum(axes)).max()) ** 0.5
            if not error <= LOSSY_ERROR:
                return f"layer {number}: a page has a relative error of {error:.3f}"
        return ""

    def _values(self, layer: int) -> torch.Tensor:
        return self._base.flatten().roll(layer * _SHIFT).view_as(self._base)


def _order(role: str, count: int) -> list[int]:
    return random.Random(role).sample(range(count), count)


def _views(layer: torch.Tensor) -> LayerPages:
    rows = layer.view(torch.uint8).view(len(layer), KV_HEADS, -1)
    return LayerPages(layer[..., :HEAD_DIM], layer[..., HEAD_DIM:], (rows,))


class BenchCache(Protocol):
    """A cache whose prompt is moved: its tokens, the pages that hold them, and its geometry."""

    tokens: int

    @property
    def pages(self) -> Sequence[int]:
        """The pages that hold the prompt, in its order."""

    @property
    def geometry(self) -> Geometry:
        """What the cache looks like."""

    def paged(self) -> PagedCache:
        """The cache as an agent takes it."""


class MoveError(PDConnectorError):
    """KV did not arrive."""


class WireAgent:
    """One side of a transfer: a real agent, with the given settings of its config."""

    def __init__(self, role: str, cache: BenchCache, settings: Mapping[str, Any]) -> None:
        self._cache = cache
        self._config = Config.load(settings)
        self._peer: Peer | None = None
        self._agent = Agent(
            self._config,
            _ENGINE,
            ModelFacts(b"model", b"model"),
            cache.paged(),
            produces=role == "producer",
            consumes=role == "consumer",
        )

    def address(self) -> dict[str, Any]:
        """The address that the other side needs."""
        return {"host": self._config.host, "port": self._agent.port}

    def meet(self, peer: Mapping[str, Any]) -> None:
        """Learn the other side's `address()`."""
        source = Source(peer["host"], peer["port"], _ENGINE)
        self._peer = Peer(source, self._cache.geometry.shard)

    def offer(self, number: int) -> None:
        """As the producer: offer the whole prompt for one fetch, as transfer `number`."""
        self._agent.outcomes()
        name, tokens = f"transfer {number}", self._cache.tokens
        pages = (tuple(self._cache.pages),)
        self._agent.submit(Offer(name, name, pages, _IDENTITY, tokens, tokens, final=True))

    def fetch(self, number: int) -> int:
        """As the consumer: fetch transfer `number`, and wait until it has arrived.

        Returns:
            The number of chunks, or of pieces if the agent reads pages in place.

        Raises:
            MoveError: it did not arrive.
        """
        assert self._peer is not None, "the other side is known"
        name, tokens = f"transfer {number}", self._cache.tokens
        pages = (tuple(self._cache.pages),)
        load = Load(name, name, (self._peer,), _IDENTITY, 0, tokens, pages, wait=True)
        self._agent.submit(load)
        deadline = time.monotonic() + TIMEOUT_S
        while not (ended := self._agent.outcomes()):
            if time.monotonic() > deadline:
                raise MoveError(f"nothing has ended within {TIMEOUT_S:g} s")
            # Waits as the worker of an idle engine does. Until the agent has the load, there is nothing to wait
            # for.
            time.sleep(POLL_S)
            self._agent.wait_for_outcome(_WAIT_S)
        (finished,) = ended
        assert isinstance(finished, Finished)
        if finished.cause is not None:
            raise MoveError(f"{finished.cause}: {finished.detail}")
        snapshot = self._agent.telemetry.take()
        pulled = snapshot.counts.get(("pulled_pieces", ()), 0) if snapshot else 0
        return int(pulled) or finished.chunks

    def close(self) -> None:
        """End the agent. The cache stays."""
        self._agent.close()
