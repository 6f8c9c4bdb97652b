# SPDX-License-Identifier: Apache-2.0
"""Workers of vLLM engines without an engine: caches as vLLM's own specs lay them out, described by the door, filled with
numbered elements, and with real agents. What no CPU engine can compute passes between them all the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
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
from pd_connector.vllm.packing import CpuPacking
from pd_connector.vllm.pages.state_tables import StateTables
from pd_connector.vllm.pages.windows import Windows
from pd_connector.vllm.shards import engine_shards
from support.agents import MODEL, TOKENS, Rank

MARK = 0xA5
"""Every byte of pages that nobody has written."""

Words = npt.NDArray[Any]


@pytest.fixture(autouse=True, scope="module")
def pages_as_on_a_gpu() -> Iterator[None]:
    """No backend of vLLM's for CPUs packs these pages. For a test file that imports it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPacking, "of", classmethod(lambda *_: None))
        yield


class Engine(NamedTuple):
    """How an engine is started."""

    tp: int = 1
    pcp: int = 1
    dcp: int = 1
    interleave: int = 1
    page: int = 16
    layout: KVCacheLayout = KVCacheLayout.LBHNC
    cache_dtype: str = "auto"

    @property
    def ranks(self) -> int:
        return self.tp * self.pcp

    def config(self, rank: int, modules: Mapping[str, Any]) -> Any:
        """What the door reads of vLLM's configuration."""
        return SimpleNamespace(
            cache_config=SimpleNamespace(cache_dtype=self.cache_dtype, block_size=self.page),
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
    """A layer of a model.

    Attributes:
        spec: makes vLLM's, for each engine.
        heads: KV heads in the whole model; 0: every worker has all that its spec says.
    """

    name: str
    spec: Callable[[Engine], kv.AttentionSpec]
    heads: int = 0


def attention(name: str, heads: int, dim: int, value_dim: int, **options: Any) -> Layer:
    """A layer of full attention in bfloat16, or of MLA if it has no V."""

    def spec(engine: Engine) -> kv.AttentionSpec:
        told: dict[str, Any] = {
            "block_size": engine.page,
            "num_kv_heads": max(1, heads // engine.tp),
            "head_size": dim,
            "dtype": torch.bfloat16,
            **options,
        }
        if value_dim:
            return kv.FullAttentionSpec(**told, head_size_v=value_dim)
        return kv.MLAAttentionSpec(**told)

    return Layer(name, spec, heads)


class Worker(Rank):
    """A rank of an engine, with one request.

    Args:
        settings: of its agent; empty: it has none.
        layers: of the model; each has a page table.
        tokens: of the request: those that it keeps if it `fills`, else those that it loads.
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
        self.specs = [layer.spec(engine) for layer in layers]
        self.windows = Windows.of(self.specs, engine.dcp)
        self.states = StateTables.of(self.specs)
        counts = [pages_for(tokens, size) for size in self.windows.page_sizes]
        # vLLM frees what a window has passed with the next step, which does not come.
        first = self.windows.first_kept(tokens)
        self.pages = 2 * max(counts) + 3
        self.tables = [
            [-1] * first[place]
            + np.random.default_rng(2 * place + fills)
            .permutation(self.pages)[: count - first[place]]
            .tolist()
            for place, count in enumerate(counts)
        ]
        kept = zip(layers, self.specs, strict=True)
        self.tensors = [self._pages(layer, spec) for layer, spec in kept]
        if fills:
            for number, tensor in enumerate(self.tensors):
                for (page, place), values in self.entries(number).items():
                    words(tensor)[page, :, place] = values
        names = [layer.name for layer in layers]
        modules = {
            layer.name: SimpleNamespace(total_num_kv_heads=layer.heads or None) for layer in layers
        }
        config = (told or engine).config(rank, modules)
        self.cache = describe_cache(
            dict(zip(names, self.tensors, strict=True)),
            kv.KVCacheConfig(
                self.pages,
                [],
                [
                    kv.KVCacheGroupSpec([name], spec)
                    for name, spec in zip(names, self.specs, strict=True)
                ],
            ),
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

    def entries(self, number: int, first: int = 0) -> dict[tuple[int, int], Words]:
        """What this worker keeps in a layer of the entries whose tokens are all there, from token `first` on: words `[head, K
        and V]` by page and place in it. Elements are numbered, all unlike as far as their width allows."""
        layer, spec, table = self.kept[number], self.specs[number], self.tables[number]
        _, own, rows, width = self.tensors[number].shape
        ring = isinstance(spec, kv.CircularBufferSpec)
        each = int(spec.tokens_per_state)
        heads = layer.heads or own
        start = self.worker % self.engine.tp * heads // self.engine.tp if layer.heads else 0
        sharded = spec.dcp_sharded and self.engine.dcp > 1
        places = self.engine.places(self.worker, self.tokens) if sharded else range(self.tokens)
        found: dict[tuple[int, int], Words] = {}
        for token in range(0, self.tokens // each * each, each):
            place = places[token]
            if place is None or token < first:
                continue
            page, at = (0, token % rows) if ring else divmod(place // each, rows)
            if table[page] >= 0:
                head = np.arange(start, start + own)[:, None]
                values = ((token // each * heads + head) * width + np.arange(width)) * 7
                values = (values + 7919 * number + 1).astype(f"u{self.tensors[number].itemsize}")
                found[table[page], at] = values
        return found

    def problem(self) -> str:
        """Where this worker's pages differ from what it would keep of the request; empty: nowhere. What nobody needs may be
        there or not: entries that a window has passed, and those of a page that passes whole."""
        for number, tensor in enumerate(self.tensors):
            spec, found = self.specs[number], words(tensor)
            window = getattr(spec, "sliding_window", None)
            wanted = self.entries(number, max(0, self.tokens - window + 1) if window else 0)
            for (page, place), values in wanted.items():
                if not np.array_equal(found[page, :, place], values):
                    return f"{self.kept[number].name}: page {page}, entry {place}"
            others = np.setdiff1d(np.arange(self.pages), self.tables[number])
            if (np.ascontiguousarray(found[others]).view(np.uint8) != MARK).any():
                return f"{self.kept[number].name}: a page of others was written"
        return ""

    def offers(self, transfer: str) -> None:
        tables = self.states.only(self.tables, self.tokens)
        request, tokens = f"offer of {transfer}", self.tokens
        offer = Offer(transfer, request, tables, TOKENS, tokens, tokens, True)
        self.agent.submit(offer._replace(state_token=tokens if self.states else 0))

    def loads(self, transfer: str, peers: Sequence[Peer], *, first: int = 0) -> None:
        request, stop = f"load of {transfer}", self.tokens
        tables = self.states.only(self.tables, stop)
        load = Load(request, transfer, tuple(peers), TOKENS, first, stop, tables, False)
        self.agent.submit(load._replace(state_token=stop if self.states else 0))


def words(tensor: torch.Tensor) -> Words:
    """A layer's memory as unsigned words of its width."""
    width = tensor.element_size()
    numbers = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[width]).numpy()
    return numbers.view(f"u{width}")


def workers(
    engine: Engine,
    layers: Sequence[Layer],
    tokens: int,
    *,
    fills: bool,
    told: Engine | None = None,
    **settings: Any,
) -> list[Worker]:
    """All workers of an engine."""
    return [
        Worker(settings, engine, rank, layers, tokens, fills=fills, told=told)
        for rank in range(engine.ranks)
    ]


def moved(sources: Sequence[Worker], others: Sequence[Worker], first: int = 0) -> int:
    """Tokens from this one on, and states, from every worker to every other, without agents; the number of chunks."""
    count = 0
    for source in sources:
        for other in others:
            pair = routes(source.geometry, other.geometry, ("raw",), ("raw",))
            state = other.tokens if other.states else 0
            for chunk in plan(pair, first, other.tokens, 1 << 14, state_token=state):
                route = pair[chunk.route]
                slot = memoryview(bytearray(chunk.nbytes(route)))
                mine = [source.tables[route.source.table][n] for n in chunk.source_pages(route)]
                payload = source.cache.gather(route, chunk, mine, slot)
                own = other.tables[route.destination.table]
                pages = [own[n] for n in chunk.destination_pages(route)]
                other.cache.scatter(route, chunk, pages, payload)
                count += 1
    return count


def hand_over(sources: Sequence[Worker], others: Sequence[Worker], first: int = 0) -> None:
    """The same, by their agents."""
    for worker in sources:
        worker.offers("t")
    for worker in others:
        worker.loads("t", [source.peer for source in sources], first=first)
    for worker in others:
        finished = worker.loaded("t")
        assert (finished.cause, finished.detail) == (None, "")
    assert [worker.freed("t").cause for worker in sources] == [None] * len(sources)
