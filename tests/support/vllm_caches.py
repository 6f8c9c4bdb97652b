# SPDX-License-Identifier: Apache-2.0
"""Workers of vLLM engines without an engine: caches as vLLM's own specs lay them out, described by the door, filled with
numbered elements, and with real agents. What no CPU engine can compute passes between them all the same."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
from vllm.v1.kv_cache_layout import KVCacheLayout

from pd_connector.agent.agent import Agent
from pd_connector.config import Config
from pd_connector.kv.geometry import pages_for
from pd_connector.plan.chunks import plan
from pd_connector.plan.route import routes
from pd_connector.protocol.consuming.incoming import Load
from pd_connector.protocol.producing.outgoing import Offer
from pd_connector.protocol.wire.peers import Peer
from pd_connector.vllm.cache import describe_cache
from pd_connector.vllm.pages.windows import Windows
from pd_connector.vllm.shards import engine_shards
from support.agents import MODEL, TOKENS, Rank

MARK = 0xA5
"""Every byte of pages that nobody has written."""

Words = npt.NDArray[Any]


class Engine(NamedTuple):
    """How an engine is started."""

    tp: int = 1
    pcp: int = 1
    dcp: int = 1
    interleave: int = 1
    page: int = 16
    layout: KVCacheLayout = KVCacheLayout.LBHNC

    @property
    def ranks(self) -> int:
        return self.tp * self.pcp

    def config(self, rank: int, modules: Mapping[str, Any]) -> Any:
        """What the door reads of vLLM's configuration."""
        return SimpleNamespace(
            cache_config=SimpleNamespace(cache_dtype="auto"),
            compilation_config=SimpleNamespace(static_forward_context=modules),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=self.tp,
                pipeline_parallel_size=1,
                prefill_context_parallel_size=self.pcp,
                decode_context_parallel_size=self.dcp,
                cp_kv_cache_interleave_size=self.interleave,
                rank=rank,
                world_size=self.ranks,
            ),
        )

    def cp_rank(self, rank: int) -> int:
        """A worker's place in its group of decode context parallelism, as vLLM forms these groups."""
        ranks = torch.arange(self.ranks).reshape(self.pcp, self.tp).transpose(-1, -2)
        groups = ranks.reshape(-1, self.dcp).tolist()
        return int(next(group.index(rank) for group in groups if rank in group))

    def places(self, rank: int, tokens: int) -> list[int | None]:
        """For each token of a sequence, its place among those that a worker keeps; None if it does not keep it. By vLLM's
        own count of the tokens that a worker has."""
        lengths = get_dcp_local_seq_lens(
            torch.arange(tokens + 1), self.dcp, self.cp_rank(rank), self.interleave
        ).tolist()
        counts = itertools.pairwise(lengths)
        return [here if after > here else None for here, after in counts]


class Layer(NamedTuple):
    """A layer that keeps an entry for each token, or for several.

    Attributes:
        heads: KV heads in the whole model.
        value_dim: 0: it keeps latents.
        options: of its spec.
    """

    name: str
    heads: int
    dim: int
    value_dim: int
    dtype: torch.dtype = torch.bfloat16
    options: Mapping[str, Any] = {}

    def spec(self, engine: Engine) -> kv.AttentionSpec:
        """vLLM's, of a worker."""
        told: dict[str, Any] = {
            "block_size": engine.page,
            "num_kv_heads": max(1, self.heads // engine.tp),
            "head_size": self.dim,
            "dtype": self.dtype,
            **self.options,
        }
        if self.value_dim:
            return kv.FullAttentionSpec(**told, head_size_v=self.value_dim)
        return kv.MLAAttentionSpec(**told)

    def whole(self, number: int, entries: int) -> Words:
        """What the model keeps of a sequence: words `[head, entry, K and V]`, all unlike as far as their width allows."""
        shape = self.heads, entries, self.dim + self.value_dim
        start = 1 + 7919 * number
        numbers = np.arange(start, start + math.prod(shape))
        return numbers.astype(f"u{self.dtype.itemsize}").reshape(shape)


class Worker(Rank):
    """A rank of an engine, with one request.

    Args:
        settings: of its agent; empty: it has none.
        layers: of the model; each has a page table.
        tokens: of the request.
        fills: its pages hold the request, and it offers them. Others load it.
        told: what it says of its engine, if that is not the truth.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        engine: Engine,
        rank: int,
        layers: Sequence[Layer],
        tokens: int,
        *,
        fills: bool,
        told: Engine | None = None,
    ) -> None:
        self.engine, self.worker, self.kept, self.tokens = engine, rank, layers, tokens
        specs = [layer.spec(engine) for layer in layers]
        windows = Windows.of(specs, engine.dcp)
        counts = [pages_for(tokens, size) for size in windows.page_sizes]
        self.pages = 2 * max(counts) + 3
        self.tables = [
            list(np.random.default_rng(2 * place + fills).permutation(self.pages)[:count].tolist())
            for place, count in enumerate(counts)
        ]
        self.tensors = [self._pages(layer, spec) for layer, spec in zip(layers, specs, strict=True)]
        if fills:
            for number, tensor in enumerate(self.tensors):
                words(tensor)[...] = self.wanted(number)
        names = [layer.name for layer in layers]
        modules = {layer.name: SimpleNamespace(total_num_kv_heads=layer.heads) for layer in layers}
        config = (told or engine).config(rank, modules)
        groups = [
            kv.KVCacheGroupSpec([name], spec) for name, spec in zip(names, specs, strict=True)
        ]
        self.cache = describe_cache(
            dict(zip(names, self.tensors, strict=True)),
            kv.KVCacheConfig(self.pages, [], groups),
            config,
            {name: number for number, name in enumerate(names)},
        )
        self.geometry = self.cache.geometry
        self.engine_id = "engine"
        self.ended, self.told, self.counts = {}, {}, {}
        if settings:
            self.agent = Agent(
                Config(**settings),
                self.engine_id,
                MODEL,
                self.cache,
                produces=fills,
                consumes=not fills,
                shards=engine_shards(config, self.geometry.shard),
            )

    @property
    def peer(self) -> Peer:
        return Peer(self.source, self.geometry.shard)

    def _pages(self, layer: Layer, spec: kv.AttentionSpec) -> torch.Tensor:
        size = self.pages * spec.page_size_bytes
        placed = kv.KVCacheTensor(size, [layer.name], size, spec.page_size_bytes)
        memory = torch.full((size,), MARK, dtype=torch.uint8).view(torch.int8)
        (view,) = kv.create_kv_cache_views(memory, spec, self.pages, self.engine.layout, placed)
        return view

    def wanted(self, number: int) -> Words:
        """What this worker's tensor of a layer holds if all of the request is there: words of the shape of the tensor."""
        layer, table = self.kept[number], self.tables[number]
        found = np.full_like(words(self.tensors[number]), 0)
        found.view(np.uint8)[...] = MARK
        own = found.shape[1]
        first = self.worker % self.engine.tp * layer.heads // self.engine.tp
        values = layer.whole(number, self.tokens)[first : first + own]
        for token, place in enumerate(self.engine.places(self.worker, self.tokens)):
            if place is not None:
                page, at = divmod(place, found.shape[2])
                found[table[page], :, at] = values[:, token]
        return found

    def offers(self, transfer: str) -> None:
        tables = tuple(self.tables)
        offer = Offer(
            transfer, f"offer of {transfer}", tables, TOKENS, self.tokens, self.tokens, True
        )
        self.agent.submit(offer)

    def loads(self, transfer: str, peers: Sequence[Peer], *, first: int = 0) -> None:
        request, tables = f"load of {transfer}", tuple(self.tables)
        load = Load(request, transfer, tuple(peers), TOKENS, first, self.tokens, tables, False)
        self.agent.submit(load)


def words(tensor: torch.Tensor) -> Words:
    """A layer's memory as unsigned words of its width."""
    width = tensor.element_size()
    numbers = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[width]).numpy()
    return numbers.view(f"u{width}")


def moved(sources: Sequence[Worker], others: Sequence[Worker], first: int = 0) -> int:
    """Tokens from this one on from every worker to every other, without agents; the number of chunks."""
    count = 0
    for source in sources:
        for other in others:
            pair = routes(source.geometry, other.geometry, ("raw",), ("raw",))
            for chunk in plan(pair, first, source.tokens, 1 << 14):
                route = pair[chunk.route]
                slot = memoryview(bytearray(chunk.nbytes(route)))
                mine = [source.tables[route.source.table][n] for n in chunk.source_pages(route)]
                payload = source.cache.gather(route, chunk, mine, slot)
                own = other.tables[route.destination.table]
                pages = [own[n] for n in chunk.destination_pages(route)]
                other.cache.scatter(route, chunk, pages, payload)
                count += 1
    return count
