# SPDX-License-Identifier: Apache-2.0
"""The payload's format in numbers: how many bytes each plane has. pd_connector's codecs and the
kernels both read it here.

A plane is K or V (or the MLA latent) of one layer. A payload is a row of planes, `[layer][K|V]`;
each plane is `[scales][zeros up to a section][codes]`, codes in the order `[head][token][dim]`. A
payload of whole pages (`verbatim`) is `[layer][page][head][bytes]` and has no scales.
docs/codecs.md describes it byte by byte.
"""

from typing import NamedTuple

SECTION_BYTES = 16
"""Codes begin at a multiple of this, so that GPU kernels may load 16 bytes at once."""

SUPER_PAGE = 128
"""Tokens that share a scale of a head in `fp8_e4m3`, and a scale per channel of K in `int8`. They are
counted from the plane's first token."""

CODEC_NAMES = ("raw", "fp8_e4m3", "int8")
"""Codecs that code element by element."""

FP8_SCALE_BYTES = 4  # float32
INT8_SCALE_BYTES = 2  # bfloat16

INT8_MAX = 127.0
"""Largest magnitude of a code of `int8`."""

SMALLEST_SCALE = 2.0**-126
"""Smallest scale of any codec: a normal number, because a GPU may flush smaller ones to zero."""


class PlaneBytes(NamedTuple):
    """Sizes of one plane.

    Attributes:
        scales: bytes of the scales and of the zeros behind them; a multiple of SECTION_BYTES.
        codes: bytes of the codes.
    """

    scales: int
    codes: int

    @property
    def total(self) -> int:
        return self.scales + self.codes


def padded(nbytes: int) -> int:
    """`nbytes`, rounded up to whole sections."""
    return -(-nbytes // SECTION_BYTES) * SECTION_BYTES


def super_pages(tokens: int) -> int:
    """The number of super-pages that `tokens` tokens fill; the last one may be partly filled."""
    return -(-tokens // SUPER_PAGE)


def scale_bytes_per_head(codec: str, key: bool, tokens: int, dim: int) -> int:
    """Bytes of the scales of one head of a plane, without the zeros behind them.

    `fp8_e4m3` has one scale per super-page. `int8` has one per channel and super-page of K, and one
    per token of V.
    """
    if codec == "fp8_e4m3":
        return FP8_SCALE_BYTES * super_pages(tokens)
    if codec == "int8":
        return INT8_SCALE_BYTES * (super_pages(tokens) * dim if key else tokens)
    return 0


def plane_bytes(
    codec: str, key: bool, heads: int, tokens: int, dim: int, element_bytes: int
) -> PlaneBytes:
    """Sizes of one plane.

    Args:
        codec: `raw`, `fp8_e4m3`, `int8` or `verbatim`.
        key: whether the plane is K (or a latent) and not V.
        heads: KV heads of the plane.
        tokens: tokens of the chunk. For `verbatim`, pages of the chunk.
        dim: elements of one token of one head. For `verbatim`, bytes of one head of one page.
        element_bytes: bytes of an element in the producer's cache. Only `raw` sends elements as
            they are; a code of the other codecs has one byte.

    Example:
        Eight heads of 200 tokens in `fp8_e4m3`: 16 float32 scales, and one byte per element.

        >>> plane_bytes("fp8_e4m3", key=True, heads=8, tokens=200, dim=128, element_bytes=2)
        PlaneBytes(scales=64, codes=204800)
        >>> plane_bytes("raw", key=True, heads=8, tokens=100, dim=128, element_bytes=2).total
        204800
    """
    scales = padded(heads * scale_bytes_per_head(codec, key, tokens, dim))
    code_bytes = element_bytes if codec == "raw" else 1
    return PlaneBytes(scales, heads * tokens * dim * code_bytes)
