# SPDX-License-Identifier: Apache-2.0
"""Where each block, its scales and its codes lie in a payload: arithmetic only.

A payload is a row of blocks, `[layer][K|V]`, each `[scales, zeros up to a section][codes]`, codes as
`[head][token][dim]`; or, `verbatim`, `[layer][page][head][bytes]`.
"""

from typing import Literal, NamedTuple, get_args

CodecName = Literal["raw", "fp8_e4m3", "int8", "verbatim"]
CODECS: tuple[str, ...] = get_args(CodecName)

SECTION_BYTES = 16
SUPER_PAGE = 128
"""Tokens that share the scales of K in `int8`, counted from the block's first token."""


class BlockBytes(NamedTuple):
    """One block: its scales with the zeros behind them, and its codes."""

    scales: int
    codes: int

    @property
    def total(self) -> int:
        return self.scales + self.codes


def scale_bytes_per_head(codec: str, key: bool, tokens: int, dim: int) -> int:
    """Bytes of the scales of one head of a block, without padding."""
    if codec == "fp8_e4m3":
        return 4
    if codec == "int8":
        return 2 * (super_pages(tokens) * dim if key else tokens)
    return 0


def block_bytes(
    codec: str, key: bool, heads: int, tokens: int, dim: int, element: int
) -> BlockBytes:
    """Sizes of one block.

    Args:
        key: whether it is K (or a latent) and not V.
        tokens: of the chunk; its pages, where `codec` is `verbatim`.
        dim: elements of a token of one head; bytes of a page of one head, where it is `verbatim`.
        element: bytes of an element of the source's cache.
    """
    raw_scales = heads * scale_bytes_per_head(codec, key, tokens, dim)
    scales = -(-raw_scales // SECTION_BYTES) * SECTION_BYTES
    code = element if codec == "raw" else 1
    return BlockBytes(scales, heads * tokens * dim * code)


def super_pages(tokens: int) -> int:
    return -(-tokens // SUPER_PAGE)
