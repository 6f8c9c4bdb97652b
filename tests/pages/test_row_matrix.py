# SPDX-License-Identifier: Apache-2.0
"""Rows of a strided view, moved in one call: the same as torch's own indexing, and nothing beside."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pd_connector.pages.copiers import HostCopier
from pd_connector.pages.row_matrix import RowMatrix
from pd_connector.pages.spans import TokenSpan

PAGES, HEADS, TOKENS = 6, 4, 8


def cache(dim: int, order: tuple[int, ...], dtype: torch.dtype = torch.int16) -> torch.Tensor:
    """`[page, head, token, K and V]` whose axes lie in memory in this order."""
    axes = [(PAGES, HEADS, TOKENS, 2 * dim)[axis] for axis in order]
    count = int(np.prod(axes))
    return torch.arange(count).to(dtype).view(axes).permute(*np.argsort(order).tolist())


ORDERS = st.sampled_from([(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3), (2, 0, 1, 3)])


@given(
    ORDERS,
    st.integers(1, 9),
    st.tuples(st.integers(0, HEADS - 1), st.integers(1, HEADS)),
    st.permutations(range(PAGES)),
    st.integers(0, 3 * TOKENS - 1),
    st.integers(1, 3 * TOKENS),
    st.booleans(),
    st.integers(0, 8),
)
def test_planes_are_what_indexing_gives(
    order: tuple[int, ...],
    dim: int,
    cut: tuple[int, int],
    pages: list[int],
    first: int,
    count: int,
    value: bool,
    odd: int,
) -> None:
    whole = cache(dim, order)
    heads = slice(cut[0], min(HEADS, cut[0] + cut[1]))
    view = whole[:, heads, :, dim * value : dim * (1 + value)]
    stop = min(first + count, first // TOKENS * TOKENS + PAGES * TOKENS)
    where = TokenSpan(tuple(pages), first, stop, TOKENS, TOKENS)
    base = first // TOKENS * TOKENS
    tokens = [(pages[(t - base) // TOKENS], t % TOKENS) for t in range(first, stop)]
    wanted = torch.stack([view[page, :, token] for page, token in tokens], 1)
    memory = torch.empty(wanted.nbytes + 8, dtype=torch.uint8)
    places = memory[2 * (odd // 2) :][: wanted.nbytes].view(torch.int16)
    plane = places.view(wanted.shape)
    assert RowMatrix.of(view) is not None
    copier = HostCopier()
    copier.read(view, where, plane)
    assert torch.equal(plane, wanted)

    before = whole.clone()
    plane += 1
    copier.write(view, where, plane)
    for page, token in tokens:
        assert torch.equal(
            view[page, :, token], before[page, heads, token].narrow(1, dim * value, dim) + 1
        )
        view[page, :, token] -= 1
    assert torch.equal(whole, before), "nothing else was written"


def test_rows_that_are_no_places_of_a_grid_have_none() -> None:
    """K of 4 elements beside V of 5: rows of 8 bytes, 18 apart."""
    packed = torch.zeros(PAGES, HEADS, TOKENS, 9, dtype=torch.int16)
    assert RowMatrix.of(packed[..., :4]) is None
    assert RowMatrix.of(packed.transpose(2, 3)) is None, "a row lies scattered"


@pytest.mark.parametrize("heads", [slice(0, 4), slice(1, 3), slice(2, 3), slice(0, 3)])
@pytest.mark.parametrize("padding", [0, 8, 24])
def test_whole_pages_of_some_heads(heads: slice, padding: int) -> None:
    row = 24
    memory = torch.arange(PAGES * (HEADS * row + padding)).to(torch.uint8).view(PAGES, -1)
    rows = memory[:, : HEADS * row].unflatten(1, (HEADS, row))[:, heads]
    index = np.array([4, 0, 3])
    buffer = np.zeros((3, *rows.shape[1:]), np.uint8)
    copier = HostCopier()
    copier.take_rows(rows, index, buffer)
    assert np.array_equal(buffer, rows.numpy()[index])
    wanted = memory.clone()
    wanted[:, : HEADS * row].unflatten(1, (HEADS, row))[index, heads] += 1
    copier.put_rows(rows, index, buffer + 1)
    assert torch.equal(memory, wanted)
