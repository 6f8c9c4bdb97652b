# SPDX-License-Identifier: Apache-2.0
"""Gather and scatter move whole pages, exactly, whatever the order of elements within a page."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_connector.errors import UnsupportedGeometryError
from pd_connector.geometry import Geometry, Shard
from pd_connector.pages import PagedCache
from pd_connector.plan import Chunk

PAGES = 9


def make(
    layers: int, heads: int, tokens: int, width: int, order: tuple[int, ...], seed: int
) -> tuple[list[torch.Tensor], Geometry]:
    """Layers `[page, head, token, width]` whose memory is ordered by `order` within a page."""
    random_bytes = torch.Generator().manual_seed(seed)
    shape = (heads, tokens, width)
    inverse = [order.index(axis) + 1 for axis in range(3)]
    made = []
    for _ in range(layers):
        stored = [PAGES, *(shape[axis] for axis in order)]
        bits = torch.randint(0, 1 << 15, stored, dtype=torch.int16, generator=random_bytes)
        made.append(bits.view(torch.bfloat16).permute(0, *inverse))
    return made, Geometry(Shard(0, layers, 0, heads), tokens, 2 * width, "bfloat16", str(order))


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.int16), two.contiguous().view(torch.int16))


@given(
    layers=st.integers(1, 4),
    heads=st.integers(1, 3),
    tokens=st.integers(1, 5),
    width=st.integers(1, 6),
    order=st.permutations(range(3)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_what_was_gathered_scatters_into_any_pages_of_a_cache_that_looks_alike(
    layers: int, heads: int, tokens: int, width: int, order: list[int], seed: int
):
    source, geometry = make(layers, heads, tokens, width, tuple(order), seed)
    destination, _ = make(layers, heads, tokens, width, tuple(order), seed + 1)
    before = [layer.clone() for layer in destination]
    chance = random.Random(seed)
    first = chance.randrange(layers)
    count = chance.randint(1, PAGES)
    chunk = Chunk(0, first, chance.randint(first + 1, layers), 0, count)
    pages, into = chance.sample(range(PAGES), count), chance.sample(range(PAGES), count)
    slot = memoryview(bytearray(chunk.nbytes(geometry) + 7))
    filled = PagedCache(source, geometry).gather(chunk, pages, slot)
    assert len(filled) == chunk.nbytes(geometry)
    assert bytes(slot[len(filled) :]) == bytes(7), "nothing behind the chunk is written"
    PagedCache(destination, geometry).scatter(chunk, into, filled)
    for i in range(layers):
        for page in range(PAGES):
            moved = page in into and chunk.first_layer <= i < chunk.stop_layer
            wanted = source[i][pages[into.index(page)]] if moved else before[i][page]
            assert same(destination[i][page], wanted), f"layer {i}, page {page}"


def test_a_slot_holds_layer_by_layer_page_by_page():
    layers, geometry = make(3, 2, 4, 5, (0, 1, 2), 0)
    chunk = Chunk(0, 1, 3, 0, 2)
    slot = memoryview(bytearray(chunk.nbytes(geometry)))
    PagedCache(layers, geometry).gather(chunk, [7, 2], slot)
    wanted = torch.cat([layers[i][page].reshape(-1) for i in (1, 2) for page in (7, 2)])
    assert bytes(slot) == wanted.view(torch.int16).numpy().tobytes()


def test_a_received_buffer_may_be_read_only_and_odd_in_memory():
    layers, geometry = make(1, 1, 1, 3, (0, 1, 2), 0)
    payload = memoryview(b"x" + bytes(range(6)))[1:]
    PagedCache(layers, geometry).scatter(Chunk(0, 0, 1, 0, 1), [4], payload)
    assert layers[0][4].reshape(-1).view(torch.uint8).tolist() == list(range(6))


@pytest.mark.parametrize("page", [-1, PAGES, 2**40])
def test_a_page_that_does_not_exist_is_an_error_and_nothing_is_touched(page: int):
    layers, geometry = make(1, 1, 2, 2, (0, 1, 2), 0)
    before = layers[0].clone()
    cache, chunk = PagedCache(layers, geometry), Chunk(0, 0, 1, 0, 2)
    slot = memoryview(bytearray(chunk.nbytes(geometry)))
    with pytest.raises(IndexError, match="cache of 9"):
        cache.gather(chunk, [1, page], slot)
    with pytest.raises(IndexError, match="cache of 9"):
        cache.scatter(chunk, [1, page], slot)
    assert same(layers[0], before)
    assert bytes(slot) == bytes(len(slot))


def test_a_payload_of_another_size_is_an_error_and_nothing_is_touched():
    layers, geometry = make(1, 1, 2, 2, (0, 1, 2), 0)
    before = layers[0].clone()
    with pytest.raises(ValueError, match="reshape"):
        PagedCache(layers, geometry).scatter(Chunk(0, 0, 1, 0, 2), [1, 2], memoryview(bytes(9)))
    assert same(layers[0], before)


def test_pages_may_lie_apart_but_each_must_be_one_run_of_bytes():
    stored = torch.zeros(PAGES, 3, 4, 5, dtype=torch.bfloat16)
    geometry = Geometry(Shard(0, 1, 0, 1), 4, 10, "bfloat16", "test")
    apart = stored[:, :1]
    cache = PagedCache([apart], geometry)
    chunk = Chunk(0, 0, 1, 0, 1)
    cache.scatter(chunk, [2], memoryview(b"\x01" * 40))
    assert int(np.count_nonzero(stored[2, 0].view(torch.int16).numpy())) == 20
    assert not stored[:, 1:].any()
    with pytest.raises(UnsupportedGeometryError, match="one dense run of 40 bytes"):
        PagedCache([stored[:, 0, :, :4].unsqueeze(1)], geometry)
    with pytest.raises(UnsupportedGeometryError, match="strides"):
        PagedCache([torch.zeros(PAGES, 1, 4, 10, dtype=torch.bfloat16)[..., ::2]], geometry)


def test_kernel_pages_smaller_than_pages_are_refused():
    """Such a cache has several rows a page; this version does not gather those."""
    geometry = Geometry(Shard(0, 1, 0, 2), 32, 8, "bfloat16", "kernel pages of 16")
    with pytest.raises(UnsupportedGeometryError, match="one dense run of 512 bytes"):
        PagedCache([torch.zeros(PAGES, 2, 16, 4, dtype=torch.bfloat16)], geometry)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_pages_of_a_gpu_go_through_host_slots():
    source, geometry = make(2, 3, 4, 8, (1, 0, 2), 0)
    destination, _ = make(2, 3, 4, 8, (1, 0, 2), 1)
    cache = PagedCache([layer.cuda() for layer in source], geometry)
    into = [layer.cuda() for layer in destination]
    chunk = Chunk(0, 0, 2, 0, 3)
    slot = memoryview(bytearray(chunk.nbytes(geometry)))
    filled = cache.gather(chunk, [8, 0, 3], slot, cache.fence())
    PagedCache(into, geometry).scatter(chunk, [1, 2, 5], filled.toreadonly())
    for i in range(2):
        for page, local in zip([8, 0, 3], [1, 2, 5], strict=True):
            assert same(into[i][local].cpu(), source[i][page])
