# SPDX-License-Identifier: Apache-2.0
"""`pd-connector bench core audit`: the cost of an audit for the audited request, and for every other request."""

import statistics
import time
from collections.abc import Callable, Iterator

import msgspec
import torch

from pd_bench.core.overhead import planning_overhead
from pd_bench.report import BenchError, Comparison
from pd_bench.sample import Sample
from pd_connector.kv.geometry import Geometry, Group, Shard, pages_for
from pd_connector.pages.paged_cache import LayerPages, PagedCache
from pd_connector.plan.chunks import plan
from pd_connector.plan.route import routes

_LAYERS = 8
_HEADS = 8
_DIM = 128
_TOKENS = 2048
_CHUNK_BYTES = 16 << 20
_ROUNDS = 5

_SETUPS = {
    "whole pages": (16, "raw"),
    "into pages of 32 tokens": (32, "raw"),
    "coded as int8": (16, "int8"),
}


def measure(runs: int) -> list[Comparison]:
    """GB/s of comparing landed chunks beside writing them into pages. Also milliseconds of the consumer's bookkeeping
    for an unaudited request, with and without audits.

    Args:
        runs: runs of each side; both sides run in turn.

    Raises:
        BenchError: equal KV was found to differ.
    """
    comparisons = []
    for name, (page_size, codec) in _SETUPS.items():
        compare, scatter, nbytes = _calls(page_size, codec)
        pairs = [(_rate(compare, nbytes), _rate(scatter, nbytes)) for _ in range(runs)]
        ours, written = (Sample(tuple(side)) for side in zip(*pairs, strict=True))
        params = {"cost of": "comparing", "chunks": name}
        comparisons.append(Comparison("audit", params, ours, written, "GB/s", more_is_better=True))
    rounds = [(planning_overhead(audits=True)[1], planning_overhead()[1]) for _ in range(_ROUNDS)]
    with_, without = (Sample((statistics.median(side),)) for side in zip(*rounds, strict=True))
    params = {"cost of": "a request that is not audited", "chunks": "whole pages"}
    comparisons.append(Comparison("audit", params, with_, without, "ms"))
    return comparisons


def _calls(page_size: int, codec: str) -> tuple[Callable[[], None], Callable[[], None], int]:
    """A function that compares a landed prompt, a function that writes it into the same pages, and its bytes in the
    cache."""
    source, destination = _cache(16), _cache(page_size)
    paths = routes(source.geometry, destination.geometry, [codec], [codec])
    landed = []
    for chunk in plan(paths, 0, _TOKENS, _CHUNK_BYTES):
        route = paths[chunk.route]
        slot = memoryview(bytearray(chunk.nbytes(route)))
        source.gather(route, chunk, chunk.pages(16), slot)
        landed.append((route, chunk, chunk.pages(page_size), slot))

    def compare() -> None:
        for pair in landed:
            if any(max(difference.by_page) > 0.1 for difference in destination.compare(*pair)):
                raise BenchError("equal KV was found to differ")

    def scatter() -> None:
        for pair in landed:
            destination.scatter(*pair)

    return compare, scatter, _TOKENS * _LAYERS * _HEADS * 2 * _DIM * 2


def _cache(page_size: int) -> PagedCache:
    """The same numbers each time, in pages `[kv head][token][K and V]` in the prompt's order."""
    layers = tuple(range(_LAYERS))
    group = Group(
        "attention", layers, _HEADS, _DIM, _DIM, 16, 0, "bfloat16", "HNC", heads_apart=True
    )
    geometry = Geometry(
        Shard(0, _LAYERS, 0, 1), (msgspec.structs.replace(group, page_size=page_size),)
    )
    return PagedCache(dict(_layers(page_size)), geometry)


def _layers(page_size: int) -> Iterator[tuple[int, LayerPages]]:
    pages = pages_for(_TOKENS, page_size)
    for number in range(_LAYERS):
        seed = torch.Generator().manual_seed(number)
        whole = torch.randn(_TOKENS, _HEADS, 2 * _DIM, generator=seed).to(torch.bfloat16)
        paged = whole.view(pages, page_size, _HEADS, -1).transpose(1, 2).contiguous()
        plane = paged.view(torch.uint8).view(pages, _HEADS, -1)
        yield number, LayerPages(paged[..., :_DIM], paged[..., _DIM:], (plane,))


def _rate(call: Callable[[], None], nbytes: int) -> float:
    began = time.perf_counter()
    call()
    return nbytes / (time.perf_counter() - began) / 1e9
