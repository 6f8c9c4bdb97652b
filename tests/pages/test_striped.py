# SPDX-License-Identifier: Apache-2.0
"""KV whose tokens context-parallel ranks share, and KV with an entry for several tokens: every element arrives where
it belongs, and nothing else is written."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_connector.kv.geometry import Geometry, Group, Shard, pages_for
from pd_connector.pages.copiers import TorchCopier
from pd_connector.pages.paged_cache import LayerPages, PagedCache
from pd_connector.plan.chunks import plan
from pd_connector.plan.route import routes

LAYERS = 2
HEADS, KEY, VALUE = 2, 3, 2
MARK = -7
Words = npt.NDArray[np.int16]


class Engine(NamedTuple):
    """How an engine keeps KV."""

    tp: int = 1
    pcp: int = 1
    cp: int = 1
    interleave: int = 0
    page: int = 16
    heads_apart: bool = True
    state_tokens: int = 1

    def ranks(self, tokens: int) -> list["Rank"]:
        return [Rank(self, t, p, tokens) for t in range(self.tp) for p in range(self.pcp)]


def whole(layer: int, entries: int) -> Words:
    """K and V of each entry of each head in the model: `[head, entry, dim]`; numbers differ."""
    shape = HEADS, entries, KEY + VALUE
    return (np.arange(np.prod(shape)).reshape(shape) + 1000 * layer + 1).astype(np.int16)


class Rank:
    """A rank's cache, with one request of `tokens` tokens in pages that do not lie in order."""

    def __init__(self, engine: Engine, tp_rank: int, pcp_rank: int, tokens: int) -> None:
        group = Group(
            "attention",
            tuple(range(LAYERS)),
            HEADS,
            KEY,
            VALUE,
            engine.page,
            0,
            "bfloat16",
            f"HND {engine.heads_apart}",
            heads_apart=engine.heads_apart,
            state_tokens=engine.state_tokens,
            interleave=engine.interleave if engine.cp > 1 else 0,
        )
        shard = Shard(0, LAYERS, tp_rank, engine.tp, engine.cp, pcp_rank, engine.pcp)
        self.geometry = Geometry(shard, (group,))
        self.entries = tokens // engine.state_tokens
        count = pages_for(tokens, engine.page * engine.cp)
        self.pages = [(5 * n + 2) % (count + 3) for n in range(count)]
        while len(set(self.pages)) < count:
            self.pages = [n + 1 for n in range(count)][::-1]
        heads, per_page = len(self.geometry.heads(group)), group.page_entries
        shape = count + 4, heads, per_page, KEY + VALUE
        self.tensors = [torch.full(shape, MARK, dtype=torch.int16) for _ in range(LAYERS)]
        self.cache = PagedCache(
            {n: _views(x, engine) for n, x in enumerate(self.tensors)}, self.geometry
        )

    def wanted(self, layer: int) -> Words:
        """What this rank's tensor holds if all of the request is there."""
        (group,) = self.geometry.groups
        stripe, shape = self.geometry.stripe(group), self.tensors[layer].shape
        found = np.full(shape, MARK, np.int16)
        heads = self.geometry.heads(group)
        values = whole(layer, self.entries)[heads.start : heads.stop]
        for entry in range(self.entries):
            token = entry * group.state_tokens
            if stripe.holds(token):
                page, place = divmod(stripe.place(token) // group.state_tokens, group.page_entries)
                found[self.pages[page], :, place] = values[:, entry]
        return found

    def fill(self) -> None:
        for layer, tensor in enumerate(self.tensors):
            tensor.numpy()[...] = self.wanted(layer)


def _views(tensor: torch.Tensor, engine: Engine) -> LayerPages:
    words = tensor.view(torch.bfloat16)
    rows = tensor.view(torch.uint8).flatten(2)
    if not engine.heads_apart:
        rows = rows.flatten(1).unsqueeze(1)
    return LayerPages(words[..., :KEY], words[..., KEY:], (rows,))


def hand_over(
    ours: Sequence[Rank], theirs: Sequence[Rank], first: int, stop: int, chunk_bytes: int
) -> int:
    """Move tokens [first, stop) of every rank to every rank; the number of chunks."""
    count = 0
    for source in ours:
        for destination in theirs:
            pair = routes(source.geometry, destination.geometry, ("raw",), ("raw",))
            for chunk in plan(pair, first, stop, chunk_bytes):
                route = pair[chunk.route]
                slot = memoryview(bytearray(chunk.nbytes(route)))
                assert 0 < len(slot) <= chunk_bytes
                mine = [source.pages[n] for n in chunk.source_pages(route)]
                payload = source.cache.gather(route, chunk, mine, slot)
                other = [destination.pages[n] for n in chunk.destination_pages(route)]
                destination.cache.scatter(route, chunk, other, payload)
                count += 1
    return count


@st.composite
def any_engine(draw: st.DrawFn, state_tokens: int = 1) -> Engine:
    tp, pcp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 3]))
    holders = max(1, tp // HEADS) * pcp
    cp = draw(st.sampled_from([n for n in range(1, holders + 1) if holders % n == 0]))
    interleave = state_tokens * draw(st.sampled_from([1, 2, 4]))
    page = draw(st.sampled_from([8, 16, 48])) * state_tokens
    return Engine(tp, pcp, cp, interleave, page, draw(st.booleans()), state_tokens)


@given(st.data(), st.integers(1, 200), st.sampled_from([1024, 4096]), st.sampled_from([1, 4]))
@settings(max_examples=80)
def test_every_element_arrives(
    data: st.DataObject, tokens: int, chunk_bytes: int, state_tokens: int
) -> None:
    ours, theirs = (data.draw(any_engine(state_tokens)).ranks(tokens) for _ in range(2))
    for rank in ours:
        rank.fill()
    hand_over(ours, theirs, 0, tokens, chunk_bytes)
    for rank in theirs:
        for layer, tensor in enumerate(rank.tensors):
            found, wanted = tensor.numpy(), rank.wanted(layer)
            if any(route.verbatim for source in ours for route in _routes(source, rank)):
                found = np.where(wanted == MARK, MARK, found)  # pages pass whole
            assert np.array_equal(found, wanted)


def _routes(source: Rank, destination: Rank):  # type: ignore[no-untyped-def]
    return routes(source.geometry, destination.geometry, ("raw",), ("raw",))


@pytest.mark.parametrize("first", [0, 7, 48, 100])
def test_what_the_consumer_has_already_is_not_written(first: int) -> None:
    ours, theirs = Engine(tp=4, cp=2, interleave=1).ranks(150), Engine(page=48).ranks(150)
    for rank in ours:
        rank.fill()
    hand_over(ours, theirs, first, 150, 4096)
    (rank,) = theirs
    written = np.zeros(150, bool)
    for token in range(150):
        page, place = divmod(token, 48)
        written[token] = (rank.tensors[0].numpy()[rank.pages[page], :, place] != MARK).all()
    assert written.tolist() == [token >= first for token in range(150)]


def test_chunks_begin_and_end_at_whole_entries() -> None:
    """150 tokens with an entry for each 4 have 37 complete entries. The open one does not pass."""
    engine = Engine(state_tokens=4, page=32)
    ours, theirs = engine.ranks(150), engine._replace(page=64).ranks(150)
    ours[0].fill()
    pair = routes(ours[0].geometry, theirs[0].geometry, ("raw",), ("raw",))
    chunks = plan(pair, 6, 150, 1024)
    edges = [edge for chunk in chunks for edge in (chunk.first_token, chunk.stop_token)]
    assert min(edges) == 4
    assert max(edges) == 148
    assert not any(edge % 4 for edge in edges)
    assert plan(pair, 148, 150, 1024) == ()


def test_another_interleave_than_said_is_found_by_the_elements() -> None:
    """A control: the producer holds tokens otherwise than its geometry says."""
    ours, theirs = Engine(tp=4, cp=2, interleave=2).ranks(96), Engine().ranks(96)
    for rank in ours:
        rank.fill()
        (group,) = rank.geometry.groups
        lie = msgspec.structs.replace(group, interleave=1)
        rank.geometry = msgspec.structs.replace(rank.geometry, groups=(lie,))
    hand_over(ours, theirs, 0, 96, 4096)
    assert not np.array_equal(theirs[0].tensors[0].numpy(), theirs[0].wanted(0))


def test_torch_copies_the_same() -> None:
    """What a GPU does without kernels."""
    engine = Engine(tp=4, cp=2, interleave=2)
    for ours, theirs in ((engine, Engine(page=48)), (Engine(page=48), engine)):
        sources, destinations = ours.ranks(130), theirs.ranks(130)
        for rank in (*sources, *destinations):
            rank.cache._copies.copier = TorchCopier()
        for rank in sources:
            rank.fill()
        hand_over(sources, destinations, 0, 130, 4096)
        for rank in destinations:
            assert all(
                np.array_equal(x.numpy(), rank.wanted(n)) for n, x in enumerate(rank.tensors)
            )
