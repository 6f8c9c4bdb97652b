# SPDX-License-Identifier: Apache-2.0
"""`pd-connector bench core reshard`: gather and scatter between engines of different tensor parallelism and page size.

All ranks of both engines live in this process, and one thread does the work. So only the copying is measured. The
baseline does the same with torch's `index_select`, `permute` and indexing.
"""

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from pd_bench.report import BenchError, Comparison, Param
from pd_bench.sample import Sample
from pd_connector.kv.geometry import Geometry, Group, Shard
from pd_connector.pages.paged_cache import LayerPages, PagedCache
from pd_connector.plan.chunks import Chunk, plan
from pd_connector.plan.route import Route, routes

TP_SIZES = (1, 2, 4, 8)
PAGE_SIZES = (16, 128)
FLAT = 0.5
"""The least rate of the slowest pair of a kind, as a fraction of the fastest pair's rate."""

_LAYERS = 8
_HEADS = 8
_DIM = 128
_SLOT_BYTES = 16 << 20
_GB = 1e9


class _Rank:
    """One rank's cache, pages `[token][head][K, V]` in bfloat16, and the prompt's pages in it.

    Args:
        model: `[layer, token, head, K and V]` of the whole model, of which the cache holds a part; None for an empty
            cache.
    """

    def __init__(
        self, rank: int, tp: int, page_size: int, tokens: int, model: torch.Tensor | None
    ) -> None:
        shard = Shard(0, _LAYERS, rank, tp)
        layers = tuple(range(_LAYERS))
        group = Group(
            "attention", layers, _HEADS, _DIM, _DIM, page_size, 0, "bfloat16", "NHC", False
        )
        self.geometry = Geometry(shard, (group,))
        self.heads = shard.heads(_HEADS)
        count = tokens // page_size
        self.pages = random.Random(rank).sample(range(count), count)
        self.index = torch.tensor(self.pages)
        self.layers = [
            torch.zeros(count, page_size, len(self.heads), 2 * _DIM, dtype=torch.bfloat16)
            for _ in layers
        ]
        if model is not None:
            own = slice(self.heads.start, self.heads.stop)
            for layer, values in zip(self.layers, model[:, :, own], strict=True):
                layer[self.index] = values.reshape(layer.shape)
        self.cache = PagedCache(dict(enumerate(map(_views, self.layers))), self.geometry)

    def holds(self, model: torch.Tensor) -> bool:
        own = slice(self.heads.start, self.heads.stop)
        return all(
            torch.equal(layer[self.index].flatten(0, 1), values)
            for layer, values in zip(self.layers, model[:, :, own], strict=True)
        )


class _RankChunk(NamedTuple):
    """A chunk, and the pages of both sides that hold its tokens."""

    source: _Rank
    destination: _Rank
    route: Route
    chunk: Chunk
    source_pages: Sequence[int]
    destination_pages: Sequence[int]


class Engines(NamedTuple):
    """The cut of the model on two engines."""

    source_tp: int
    destination_tp: int
    source_page: int
    destination_page: int

    @property
    def params(self) -> dict[str, Param]:
        return {
            "tp": f"{self.source_tp} to {self.destination_tp}",
            "page": f"{self.source_page} to {self.destination_page}",
        }


def measure(
    tokens: int, runs: int, tp_sizes: Sequence[int], page_sizes: Sequence[int]
) -> list[Comparison]:
    """Measure every pair. Then, for each pair of page sizes, the slowest beside the fastest.

    Equal pairs pass whole pages without resharding. They are measured, but do not count for the flatness.

    Args:
        tokens: tokens of the prompt, a multiple of all page sizes.

    Raises:
        BenchError: a destination has wrong KV.
    """
    model = torch.randn(
        _LAYERS, tokens, _HEADS, 2 * _DIM, generator=torch.Generator().manual_seed(1)
    ).to(torch.bfloat16)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return list(_measure(model, runs, tp_sizes, page_sizes))
    finally:
        torch.set_num_threads(threads)


def _measure(
    model: torch.Tensor, runs: int, tp_sizes: Sequence[int], page_sizes: Sequence[int]
) -> Iterator[Comparison]:
    for sizes in itertools.product(page_sizes, repeat=2):
        resharded: list[Comparison] = []
        for tps in itertools.product(tp_sizes, repeat=2):
            engines = Engines(*tps, *sizes)
            comparison = _compare(model, engines, runs)
            yield comparison
            if comparison.params["pages"] == "resharded":
                resharded.append(comparison)
        if len(resharded) > 1:
            ordered = sorted(resharded, key=lambda row: row.ours.median)
            slowest, fastest = ordered[0], ordered[-1]
            params = {**slowest.params, "tp": f"{slowest.params['tp']} / {fastest.params['tp']}"}
            yield Comparison(
                "slowest / fastest",
                params,
                slowest.ours,
                fastest.ours,
                "GB/s",
                FLAT,
                more_is_better=True,
            )


def _compare(model: torch.Tensor, engines: Engines, runs: int) -> Comparison:
    tokens = model.shape[1]

    def ranks(tp: int, page: int, values: torch.Tensor | None) -> list[_Rank]:
        return [_Rank(rank, tp, page, tokens, values) for rank in range(tp)]

    sources = ranks(engines.source_tp, engines.source_page, model)
    destinations = ranks(engines.destination_tp, engines.destination_page, None)
    pieces = list(_pieces(sources, destinations, tokens))
    slot = memoryview(bytearray(_SLOT_BYTES))
    rates: dict[str, list[float]] = {"ours": [], "torch": []}
    contenders: dict[str, Callable[[], None]] = {
        "ours": lambda: _ours(pieces, slot),
        "torch": lambda: _torch(sources, destinations, tokens),
    }
    for number, (name, move) in itertools.product(range(runs + 1), contenders.items()):
        for destination in destinations:
            for layer in destination.layers:
                layer.zero_()
        began = time.perf_counter()
        move()
        seconds = time.perf_counter() - began
        if not all(destination.holds(model) for destination in destinations):
            raise BenchError(f"{name}: wrong KV after {engines}")
        if number:  # the first run warms up
            rates[name].append(model.nbytes / seconds / _GB)
    whole = all(piece.chunk.verbatim for piece in pieces)
    params = {**engines.params, "pages": "whole" if whole else "resharded"}
    ours, theirs = (Sample(tuple(values)) for values in rates.values())
    return Comparison("reshard", params, ours, theirs, "GB/s", None, more_is_better=True)


def _pieces(
    sources: Sequence[_Rank], destinations: Sequence[_Rank], tokens: int
) -> Iterator[_RankChunk]:
    for source, destination in itertools.product(sources, destinations):
        paths = routes(source.geometry, destination.geometry, ("raw",), ("raw",))
        for chunk in plan(paths, 0, tokens, _SLOT_BYTES):
            route = paths[chunk.route]
            theirs = [source.pages[p] for p in chunk.pages(route.source.page_size)]
            mine = [destination.pages[p] for p in chunk.pages(route.destination.page_size)]
            yield _RankChunk(source, destination, route, chunk, theirs, mine)


def _ours(pieces: Sequence[_RankChunk], slot: memoryview) -> None:
    for source, destination, route, chunk, theirs, mine in pieces:
        payload = source.cache.gather(route, chunk, theirs, slot)
        destination.cache.scatter(route, chunk, mine, payload)


def _torch(sources: Sequence[_Rank], destinations: Sequence[_Rank], tokens: int) -> None:
    for source, destination in itertools.product(sources, destinations):
        first = max(source.heads.start, destination.heads.start)
        stop = min(source.heads.stop, destination.heads.stop)
        if first >= stop:
            continue
        theirs = slice(first - source.heads.start, stop - source.heads.start)
        mine = slice(first - destination.heads.start, stop - destination.heads.start)
        for layer, target in zip(source.layers, destination.layers, strict=True):
            picked = layer.index_select(0, source.index)[:, :, theirs].flatten(0, 1)
            wire = picked.permute(1, 0, 2).contiguous()
            paged = wire.permute(1, 0, 2).unflatten(0, (-1, target.shape[1]))
            target[:, :, mine].index_copy_(0, destination.index, paged)


def _views(layer: torch.Tensor) -> LayerPages:
    by_head = layer.transpose(1, 2)
    rows = layer.view(torch.uint8).view(len(layer), 1, -1)
    return LayerPages(by_head[..., :_DIM], by_head[..., _DIM:], (rows,))
