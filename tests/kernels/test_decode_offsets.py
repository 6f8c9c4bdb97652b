# SPDX-License-Identifier: Apache-2.0
"""Where tokens lie is counted in 64 bits where their pages are longer than 32 bits can count: views
may have any strides."""

import decode_interpreted  # noqa: F401 - before what it imports
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from pd_kernels.attention.paged_tile import tile_tokens, token_offsets, token_places

LENGTH, TILE = 100, 32


@InterpretedFunction
def offsets_of_a_tile(
    table, found, LATENT: tl.constexpr, STRIDES: tl.constexpr, PAGE: tl.constexpr,
    WORD: tl.constexpr, LENGTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Offsets of the tokens of tile 1, as the loops over tiles count them."""
    number = tl.arange(0, TILE)
    if LATENT:
        zero = tl.zeros((), tl.int64)
        places, _, _, _ = tile_tokens(zero, table, 1, LENGTH, PAGE, TILE, STRIDES)
        tl.store(found + number, tl.reshape(places, (TILE,)))
    else:
        token = TILE + number
        page, within = token_places(table, 1, token, token < LENGTH, PAGE, TILE)
        tl.store(found + number, token_offsets(page, within, STRIDES, PAGE, WORD))


@pytest.mark.parametrize("page", [16, 24, 64, 128])
@pytest.mark.parametrize(
    ("latent", "word"), [(False, 1), (False, 2), (True, 1)], ids=["16 bits", "words", "latents"]
)
@pytest.mark.parametrize("token_stride", [128, 1 << 28, (1 << 31) - 2, 1 << 33])
def test_tokens_of_a_page_that_lie_far_apart_are_found(
    page: int, latent: bool, word: int, token_stride: int
) -> None:
    """In 32 bits the ninth token, 2^28 elements from one to the next, would lie before the first."""
    page_stride = 64
    table = torch.tensor([3, 1, 4, 1, 5, 9, 2], dtype=torch.int32)
    found = torch.zeros(TILE, dtype=torch.int64)
    offsets_of_a_tile[(1,)](
        table, found, LATENT=latent, STRIDES=(page_stride, token_stride), PAGE=page, WORD=word,
        LENGTH=LENGTH, TILE=TILE,
    )  # fmt: skip
    wanted = [
        int(table[token // page]) * page_stride + token % page * token_stride
        for token in range(TILE, 2 * TILE)
    ]
    assert found.tolist() == [each // word for each in wanted]
