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
from pd_connector.kv.geometry import Geometry, Group, Shard, pages_for
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

_SHIFT = 977
"""Each layer has the values of the previous layer, moved by this many elements."""
_SIDES = ("producer", "consumer")
_IDENTITY = b"wire"
_ENGINE = "bench"
_WAIT_S = 0.1


class WireCache:
    """A rank's paged cache in bfloat16, pages of 16 tokens as `[head][token][K, V]`.

    Args:
        role: `producer` or `consumer`. The producer's cache holds normal random values, the consumer's holds
            zeros. Each has its prompt's pages in its own random order.
        tokens: number of tokens of the prompt; the last page may be partly filled. The cache holds nothing else.
        shape: layers, KV heads, dims of K, and of V; 0 dims of V for a latent.
        device: torch's name of the device of its memory.
    """

    def __init__(
        self,
        role: str,
        tokens: int,
        shape: tuple[int, int, int, int] = (LAYERS, KV_HEADS, HEAD_DIM, HEAD_DIM),
        device: str = "cpu",
    ) -> None:
        self.tokens = tokens
        layers, heads, key_dim, value_dim = shape
        self.page_count = pages_for(tokens, PAGE_TOKENS)
        pages = range(self.page_count)
        self.tables = {side: random.Random(side).sample(pages, len(pages)) for side in _SIDES}
        self.pages = self.tables[role]
        random_values = torch.Generator().manual_seed(1)
        size = self.page_count, heads, PAGE_TOKENS, key_dim + value_dim
        self._base = torch.randn(size, generator=random_values).to(torch.bfloat16).to(device)
        self.layers = [torch.zeros_like(self._base) for _ in range(layers)]
        if role == "producer":
            for number, layer in enumerate(self.layers):
                layer.copy_(self._values(number))
        group = Group(
            "attention" if value_dim else "latent",
            tuple(range(layers)),
            heads,
            key_dim,
            value_dim,
            PAGE_TOKENS,
            0,
            "bfloat16",
            "bench/HNC",
            heads_apart=True,
        )
        self.geometry = Geometry(Shard(0, layers, 0, 1), (group,))

    @property
    def nbytes(self) -> int:
        """Bytes of all whole pages."""
        return sum(int(layer.nbytes) for layer in self.layers)

    def layer_pages(self) -> dict[int, LayerPages]:
        """The cache in the form that kernels take."""
        (group,) = self.geometry.groups
        views: dict[int, LayerPages] = {}
        for number, layer in enumerate(self.layers):
            value = layer[..., group.key_dim :] if group.value_dim else None
            rows = layer.view(torch.uint8).flatten(2)
            views[number] = LayerPages(layer[..., : group.key_dim], value, (rows,))
        return views

    def paged(self) -> PagedCache:
        """The cache in the form that an agent takes."""
        return PagedCache(self.layer_pages(), self.geometry)

    def wipe(self) -> None:
        for layer in self.layers:
            layer.zero_()

    def check(self, lossy: bool) -> str:
        """Why a consumer's cache is wrong after a transfer; empty if all tokens are right."""
        theirs, mine = self.tables["producer"], self.tables["consumer"]
        tail = self.tokens - (self.page_count - 1) * PAGE_TOKENS
        for number, layer in enumerate(self.layers):
            expected, received = self._values(number)[theirs], layer[mine]
            for pages in (expected, received):  # the slots after the prompt belong to no token
                pages[-1, :, tail:] = 0
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
