# SPDX-License-Identifier: Apache-2.0
"""Made-up engines that write and read chunks of the pool, and what must hold of the pages that were read."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from hypothesis import assume
from hypothesis import strategies as st

from pd_connector.errors import Miss, PoolError
from pd_connector.kv.geometry import Geometry, Group, Shard
from pd_connector.pages.paged_cache import LayerPages, PagedCache
from pd_connector.pool.chunk_layout import kept_layers
from pd_connector.pool.keys import CHUNK_TOKENS
from support.caches import Rank
from support.filled import bits, ranks, snapshot
from support.pool_ranks import Dense, Files, index, own_part, read, seen
from support.setups import Layer, Model, Setup

MODEL: Model = (Layer(8, 4, 4),) * 4


TOKENS = 3 * CHUNK_TOKENS


Tables = Sequence[Sequence[int]]


def assert_loaded(
    rank: Rank, before: dict[int, torch.Tensor], dense: Dense, wanted: dict[int, slice]
) -> None:
    """The wanted tokens of each layer are right, and no byte is changed outside of the pages of `wanted`."""
    for layer, group in rank.groups.items():
        tokens = wanted[layer]
        allowed = torch.zeros(len(rank.storage[layer]), dtype=torch.bool)
        for v in rank.parts(layer):
            found, right = (
                seen(rank, layer, v)[:, tokens],
                own_part(rank, dense, layer, v)[:, tokens],
            )
            assert torch.equal(found, right), f"layer {layer}, V: {v}"
            allowed[index(rank, layer, v)[:, tokens]] = True
        changed = bits(rank.storage[layer]) != bits(before[layer])
        assert not (changed & ~allowed).any(), f"layer {layer} of {group.layers}: a byte of others"


WRITERS = [
    Setup(page_sizes=(32,)),
    Setup(tp=16, page_sizes=(64,)),
    Setup(tp=2, starts=(0, 2), page_sizes=(32,)),
    Setup(starts=(0, 1, 2, 3)),
    Setup(page_sizes=(96,)),
    Setup(page_sizes=(256,), layout="NHD"),
]


READERS = [
    Setup(page_sizes=(32,)),
    Setup(tp=2, page_sizes=(64,)),
    Setup(starts=(0, 2), page_sizes=(16,)),
    Setup(tp=4, starts=(0, 2), page_sizes=(128,)),
    Setup(tp=16, page_sizes=(256,)),
    Setup(tp=2, page_sizes=(96,)),
]


def after_windows(rank: Rank, computed: int) -> list[list[int]]:
    """A rank's tables after `tokens` tokens: pages before a window are gone."""
    tables = [list(table) for table in rank.tables]
    for group in rank.geometry.groups:
        if group.window:
            kept = max(0, computed - group.window + 1) // group.page_size
            tables[group.table][:kept] = [-1] * kept
    return tables


def assert_right(
    rank: Rank,
    before: dict[int, torch.Tensor],
    dense: Dense,
    wanted: dict[int, range],
    own: Tables,
    first: int = 0,
) -> None:
    """Wanted tokens are right; what changed lies in pages that may be written, and is right, too."""
    for layer, group in rank.groups.items():
        changed = bits(rank.storage[layer]) != bits(before[layer])
        for v in rank.parts(layer):
            where, found, right = (
                index(rank, layer, v),
                seen(rank, layer, v),
                own_part(rank, dense, layer, v),
            )
            here = torch.tensor([page >= 0 for page in own[group.table]]).repeat_interleave(
                group.page_size
            )
            tokens = torch.tensor([t for t in wanted[layer] if here[t]], dtype=torch.int64)
            assert torch.equal(found[:, tokens], right[:, tokens]), f"layer {layer}"
            moved = changed[where]
            assert not moved[:, ~here].any(), "a page that must not be written"
            assert not moved[:, :first].any(), "a token before those that are loaded"
            assert torch.equal(found[:, :TOKENS][moved[:, :TOKENS]], right[moved[:, :TOKENS]])
            changed[where] = False
        assert not changed.any(), "a page of another request"


class Reading(NamedTuple):
    """Which tokens of a chunk a reader wants, and how far its writer was.

    Attributes:
        number: of the chunk.
        computed: tokens of the prompt that the writer had computed when it saved. Its windows have passed some pages.
        first, until: the tokens of the prompt that are loaded. The reader has the others already, or wants none of them.
    """

    number: int
    computed: int
    first: int
    until: int


@st.composite
def readings(draw: Callable[[st.SearchStrategy[int]], int]) -> Reading:
    number = draw(st.integers(0, 2))
    start, stop = number * CHUNK_TOKENS, (number + 1) * CHUNK_TOKENS
    computed = draw(st.sampled_from([stop, min(stop + 20, TOKENS), TOKENS]))
    first = draw(st.sampled_from([0, start]) | st.integers(0, stop - 1))
    until = draw(st.sampled_from([stop, TOKENS]) | st.integers(max(start, first) + 1, TOKENS))
    return Reading(number, computed, first, until)


def writers(model: Model, ours: Setup) -> list[Rank]:
    """The ranks of an engine that the pool does not refuse."""
    found = ranks(model, ours, TOKENS, 1)
    for rank in found:
        assume(any(kept_layers(rank.geometry.shard, group) for group in rank.geometry.groups))
    return found


def arrives(
    rank: Rank, files: Files, wants: Reading, expected: Dense, model: Model, ours: Setup
) -> bool:
    """Have a rank read a chunk: exactly what it wants arrives, or nothing is written, because the writer's windows had
    passed some of it. Returns which of both."""
    number, computed, first, until = wants
    start, stop = number * CHUNK_TOKENS, (number + 1) * CHUNK_TOKENS
    own = [list(table) for table in after_windows(rank, until)]
    for group in rank.geometry.groups:
        for page in range(first // group.page_size):
            own[group.table][page] = -1
    before = snapshot(rank)
    wanted = {
        layer: range(max(start, first, _window_from(group, until)), min(stop, until))
        for layer, group in rank.groups.items()
    }
    try:
        read(rank, files, number, (first, until), own)
    except PoolError as error:
        problem = error
    else:
        assert_right(rank, before, expected, wanted, own, first)
        return True
    assert problem.cause is Miss.UNLIKE
    assert ours.windows
    assert any(
        tokens and model[layer].window and tokens.start < computed - model[layer].window + 1
        for layer, tokens in wanted.items()
    ), "all wanted tokens were held"
    for layer, storage in rank.storage.items():
        assert torch.equal(bits(storage), bits(before[layer])), "something was written"
    return False


def _window_from(group: Group, until: int) -> int:
    """The first token of the first page that is seen from `until`."""
    begin = max(0, until - group.window + 1) if group.window else 0
    return begin - begin % group.page_size


def by_kernels(cache: PagedCache) -> PagedCache:
    """The same memory, moved by the operators."""
    return PagedCache(
        {n: cache.layer(n) for group in cache.geometry.groups for n in group.layers},
        cache.geometry,
        by_kernels=True,
    )


def opaque(
    tokens: int = 32, heads: int = 2, tp_rank: int = 0, tp: int = 1, dtype: str = "odd"
) -> PagedCache:
    """Pages whose elements nobody can read."""
    pages = TOKENS // tokens + 1
    noise = torch.randint(0, 256, (pages, heads // tp, tokens, 24), dtype=torch.uint8)
    layers = {
        layer: LayerPages(noise.clone(), None, (noise.view(pages, 1, -1),)) for layer in (0, 1)
    }
    layers = {
        layer: LayerPages(x.key, None, (x.key.view(pages, 1, -1),)) for layer, x in layers.items()
    }
    group = Group("attention", (0, 1), heads, 24, 0, tokens, 0, dtype, "A", heads_apart=False)
    return PagedCache(layers, Geometry(Shard(0, 2, tp_rank, tp), (group,)))


class Opaque:
    """As `Rank`, of a cache that nobody can read."""

    def __init__(self, cache: PagedCache) -> None:
        self.cache, self.geometry = cache, cache.geometry
        self.tables = [list(range(cache.pages))]
