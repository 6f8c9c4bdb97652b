# SPDX-License-Identifier: Apache-2.0
"""Where tokens lie is counted in 64 bits: some layouts put more than 2^31 elements between tokens
of a page."""

import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from pd_kernels.transfer import Planes, Stored
from pd_kernels.transfer.prologue import cache_plane, token_offsets

FAR = (1 << 31) - 1
"""The longest stride of a view of bytes."""


@InterpretedFunction
def offsets_of_a_page(table, pages, found, TOKENS: tl.constexpr, DTYPE: tl.constexpr):
    place = tl.arange(0, TOKENS)
    _, page, _, token, _ = cache_plane(table, 0, DTYPE, False)
    tl.store(found + place, token_offsets(pages, place, place >= 0, page, token, TOKENS, 1))


def offsets(page_stride: int, token_stride: int, page: int) -> list[int]:
    """Offsets of the 8 tokens of a page in a cache of bytes, as the kernels count them."""
    table = torch.tensor([[0, page_stride, 0, token_stride, 1]])
    found = torch.zeros(8, dtype=torch.int64)
    pages = torch.tensor([page], dtype=torch.int32)
    offsets_of_a_page[(1,)](table, pages, found, TOKENS=8, DTYPE=tl.uint8)
    return found.tolist()


def test_tokens_that_lie_far_apart_are_found() -> None:
    """With a product in 32 bits, the third token would lie before the first one."""
    assert offsets(64, FAR, page=0) == [token * FAR for token in range(8)]


def test_pages_that_lie_far_apart_are_found() -> None:
    assert offsets(FAR, 64, page=5) == [5 * FAR + token * 64 for token in range(8)]


@pytest.mark.parametrize("axis", ["page", "token", "dim"])
def test_strides_that_kernels_cannot_hold_are_refused(axis: str) -> None:
    """On the meta device, which has no memory. Elements of a row are counted in 32 bits: together
    they must span less than 2 GiB, a single stride of pages and tokens as well."""
    stored = Stored(torch.float32)
    strides = {"page": 1 << 29, "token": 1 << 29, "dim": (1 << 29) // 15 + 1}

    def view(stride: int) -> torch.Tensor:
        by_axis = {"page": 64, "head": 1, "token": 16, "dim": 1} | {axis: stride}
        return torch.empty_strided((2, 1, 4, 16), tuple(by_axis.values()), device="meta")

    with pytest.raises(ValueError, match="less than 2 GiB apart"):
        Planes.of([view(strides[axis])], [], 4, "raw", stored, stored)
    Planes.of([view(strides[axis] - 1)], [], 4, "raw", stored, stored)
