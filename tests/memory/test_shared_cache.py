# SPDX-License-Identifier: Apache-2.0
"""A cache that is shared stays what it was, where it was; peers see it and cannot write it."""

import errno
import mmap
import os
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.memory import alone_in_memory, shared_mappings

from pd_connector.memory import shared_cache
from pd_connector.memory.pieces import Pieces
from pd_connector.memory.shared_cache import CacheWindow, SharedCache, Span
from pd_connector.memory.slab import SLAB_SEALS

NBYTES = 33 << 20


def allocated(seed: int | None = 1) -> torch.Tensor:
    """Random bytes in memory of their own; zeros without a seed."""
    if seed is None:
        return alone_in_memory(torch.zeros(NBYTES, dtype=torch.uint8))
    random = torch.Generator().manual_seed(seed)
    return alone_in_memory(torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, generator=random))


def span(tensor: torch.Tensor) -> Span:
    return Span(tensor.data_ptr(), tensor.nbytes)


def seen(shared: SharedCache, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The tensor's bytes, as a peer sees them."""
    total = sum(each.nbytes for each in shared.spans)
    mapped = np.frombuffer(mmap.mmap(shared.handle, total, prot=mmap.PROT_READ), np.uint8)
    (place,) = CacheWindow(shared.spans, mapped).find(
        Pieces(np.array([tensor.data_ptr()], np.uint64), tensor.nbytes)
    )[0]
    first = int(place) - mapped.ctypes.data
    return mapped[first : first + tensor.nbytes]


def test_a_shared_cache_keeps_its_bytes_and_peers_see_what_is_written():
    layers = [allocated(seed) for seed in (1, 2, None)]
    wanted = [layer.clone() for layer in layers]
    shared = SharedCache.of([span(layer) for layer in layers])
    assert shared is not None
    assert all(torch.equal(layer, kept) for layer, kept in zip(layers, wanted, strict=True))
    for number, layer in enumerate(layers):
        layer[:5] = number
        layer[-5:] = 7
        layer[NBYTES // 2] = 200
        assert np.array_equal(seen(shared, layer), layer.numpy())
    shared.close()
    assert layers[0][0] == 0
    assert torch.equal(layers[0][5 : NBYTES // 2], wanted[0][5 : NBYTES // 2])


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "were it not sealed"])
def test_who_has_the_descriptor_cannot_write(sealed: bool, monkeypatch: pytest.MonkeyPatch):
    if not sealed:
        monkeypatch.setattr(shared_cache, "SEALS", SLAB_SEALS)
    layer = allocated()
    shared = SharedCache.of([span(layer)])
    assert shared is not None
    kept = layer.clone()
    page = bytes(4096)
    for write in (
        lambda: mmap.mmap(shared.handle, len(page), offset=1 << 20).write(page),
        lambda: os.pwrite(shared.handle, page, 2 << 20),
    ):
        if sealed:
            with pytest.raises(PermissionError):
                write()
        else:
            write()
        assert torch.equal(layer, kept) == sealed
        kept = layer.clone()
    for size in (0, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(shared.handle, size)
    shared.close()


def test_nothing_is_left_when_the_cache_is_freed():
    layer = allocated()
    before, kept = len(os.listdir("/proc/self/fd")), shared_mappings()
    shared = SharedCache.of([span(layer)])
    assert shared is not None
    assert shared_mappings() == kept + 1
    shared.close()
    shared.close()
    assert len(os.listdir("/proc/self/fd")) == before
    del layer
    assert shared_mappings() == kept


def test_zeros_take_no_memory():
    layer = allocated(None)
    layer[20 << 20] = 1
    shared = SharedCache.of([span(layer)])
    assert shared is not None
    assert os.fstat(shared.handle).st_blocks * 512 <= 2 * shared_cache._STEP_BYTES < NBYTES
    assert layer.sum() == 1
    shared.close()


def not_malloc() -> Any:
    return np.frombuffer(mmap.mmap(-1, NBYTES), np.uint8)


def inside() -> Any:
    return allocated().numpy()[64:]


def shared_already() -> Any:
    layer = allocated()
    first = SharedCache.of([span(layer)])
    assert first is not None
    first.close()
    return layer.numpy()


@pytest.mark.parametrize("made", [not_malloc, inside, shared_already])
def test_memory_that_is_not_an_allocation_of_its_own_is_left_alone(made: Any):
    array, good = made(), allocated()
    before = shared_mappings()
    spans = [span(good), Span(array.ctypes.data, array.nbytes)]
    assert SharedCache.of(spans) is None
    assert shared_mappings() == before, "none or all"


def test_a_small_allocation_is_left_alone():
    small = [torch.zeros(1000, dtype=torch.uint8) for _ in range(10)]
    assert all(SharedCache.of([span(one)]) is None for one in small)


def test_more_pieces_than_peers_take_are_left_alone(monkeypatch: pytest.MonkeyPatch):
    layers = [allocated(), allocated()]
    monkeypatch.setattr(shared_cache, "MAX_SPANS", 1)
    assert SharedCache.of([span(layer) for layer in layers]) is None


def test_without_memory_for_it_the_cache_stays_as_it_was(monkeypatch: pytest.MonkeyPatch):
    layer = allocated()
    wanted = layer.clone()
    before = len(os.listdir("/proc/self/fd"))

    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    assert SharedCache.of([span(layer)]) is None
    assert torch.equal(layer, wanted)
    assert len(os.listdir("/proc/self/fd")) == before


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
    st.lists(st.integers(0, 120), min_size=1, max_size=20),
    st.integers(1, 10),
)
def test_pieces_are_found_where_they_lie_or_not_at_all(
    laid: list[tuple[int, int]], random: Any, wished: list[int], size: int
):
    """Spans after gaps in any order; a byte of memory is known by its value."""
    spans, address = [], 10
    for gap, nbytes in laid:
        spans.append(Span(address + gap, nbytes))
        address += gap + nbytes
    random.shuffle(spans)
    theirs = [byte for span in spans for byte in range(span.address, span.stop)]
    memory = np.array(theirs, np.uint8)
    window = CacheWindow(spans, memory)
    pieces = Pieces(np.array(wished, np.uint64), size)
    whole = all(any(s.address <= w and w + size <= s.stop for s in spans) for w in wished)
    if not whole:
        with pytest.raises(ValueError, match="not in the memory"):
            window.find(pieces)
        return
    found = window.find(pieces)
    assert found.piece_bytes == size
    for wish, place in zip(wished, found.addresses.tolist(), strict=True):
        first = place - memory.ctypes.data
        assert memory[first : first + size].tolist() == list(range(wish, wish + size))


@pytest.mark.parametrize("address", [0, 5, 2**63, 2**64 - 1, 2**64 - 8])
@pytest.mark.parametrize("size", [1, 8, 2**40])
def test_addresses_and_sizes_of_any_kind_are_refused(address: int, size: int):
    window = CacheWindow([Span(4096, 4096)], np.zeros(4096, np.uint8))
    with pytest.raises(ValueError, match="not in the memory"):
        window.find(Pieces(np.array([4096, address], np.uint64), size))
