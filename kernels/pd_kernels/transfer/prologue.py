# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The first work of every gather and scatter kernel: find its plane in the payload and in the
cache.

A launch has three extents: column (K or V of a head), tile (some tokens) and layer. Device
functions only; `chunk_launch.py` passes the arguments.
"""

import triton
import triton.language as tl

UNSPECIALISED = (
    *("first", "tokens", "layer_sections", "key_sections", "key_scales", "value_scales"),
    *("tiles", "super_pages"),
)
"""Integer arguments that change from chunk to chunk. Triton must not compile a kernel for each
value."""


@triton.jit
def payload_plane(
    column,
    layer,
    layer_sections,
    key_sections,
    key_scales,
    value_scales,
    PARTS: tl.constexpr,
):
    """Where the plane of a program lies in the payload.

    Returns:
        part: 0 for K (or a latent), 1 for V.
        head: the KV head within the plane.
        section: the section of 16 bytes at which the plane begins, int64.
        scales: sections of the plane's scales; the codes begin behind them.
    """
    part, head = column % PARTS, column // PARTS
    section = layer.to(tl.int64) * layer_sections + part * key_sections
    return part, head, section, tl.where(part == 0, key_scales, value_scales)


@triton.jit
def row_vectors(part, KEY_VECTORS: tl.constexpr, VALUE_VECTORS: tl.constexpr):
    """Vectors in one token of one head. If K and V have the same number, it is a constant, which
    divides fast."""
    if KEY_VECTORS == VALUE_VECTORS:
        width = KEY_VECTORS
    else:
        width = tl.where(part == 0, KEY_VECTORS, VALUE_VECTORS)
    return width


@triton.jit
def cache_plane(table, plane, DTYPE: tl.constexpr, WIDE: tl.constexpr):
    """The place of a plane in the cache: a pointer to elements of DTYPE, and strides in these
    elements.

    WIDE says that the address and the strides of page, head and token are multiples of 16 bytes,
    and that the elements of a token are consecutive. With this hint, the compiler uses 16-byte
    accesses.

    Returns:
        cached: pointer to the view's first element.
        page: stride, int32. `Planes` refuses views whose strides of page, token or dim need more
            bits.
        head: stride, int64, because it can span a layer's whole cache.
        token, dim: strides, int32.
    """
    ELEMENT: tl.constexpr = DTYPE.primitive_bitwidth // 8
    row = table + plane * 5
    address = tl.load(row)
    page = (tl.load(row + 1) // ELEMENT).to(tl.int32)
    head = tl.load(row + 2)
    if ELEMENT > 1:  # folding a division by 1 would lose the `multiple_of` below
        head = head // ELEMENT
    token = (tl.load(row + 3) // ELEMENT).to(tl.int32)
    dim = (tl.load(row + 4) // ELEMENT).to(tl.int32)
    if WIDE:
        address = tl.multiple_of(address, 16)
        page = tl.multiple_of(page, 16 // ELEMENT)
        head = tl.multiple_of(head, 16 // ELEMENT)
        token = tl.multiple_of(token, 16 // ELEMENT)
    cached = address.to(tl.pointer_type(DTYPE))
    if WIDE:
        cached = tl.multiple_of(cached, 16)
    return cached, page, head, token, dim


@triton.jit
def token_offsets(
    pages, place, inside, page_stride, token_stride, VIEW: tl.constexpr, PAGES: tl.constexpr
):
    """Offsets of tokens within one head of a view: elements, int64.

    Args:
        pages: int32, the engine's pages of the chunk.
        place: number of each token, counted from the first token of the first page.
        inside: which tokens exist; pages of other tokens are not read.
        page_stride, token_stride: elements, int32.
        VIEW: tokens of a page of the view.
        PAGES: pages of the view per page of the engine.
    """
    part = place // VIEW
    page = tl.load(pages + part // PAGES, mask=inside, other=0)
    if PAGES > 1:
        page = page * PAGES + part % PAGES
    # Products of two 32-bit numbers in 64 bits are one instruction each. In 32 bits the second
    # product would overflow if the tokens of a page lie far apart (tokens outside pages or layers).
    within = (place % VIEW).to(tl.int64) * token_stride.to(tl.int64)
    return page.to(tl.int64) * page_stride.to(tl.int64) + within
