# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Where tokens lie in a paged cache: for the kernels, and in torch for the references."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl


@triton.jit
def block_row(table, block, WIDE: tl.constexpr, ELEMENT: tl.constexpr):
    """Address of a block's view, int64, and its strides in elements of ELEMENT bytes: int32 but for
    the head's, which may be as long as a layer's whole cache.

    WIDE says that all are multiples of 16 bytes, and the elements of a row consecutive.
    """
    row = table + block * 5
    address = tl.load(row)
    page = (tl.load(row + 1) // ELEMENT).to(tl.int32)
    head = tl.load(row + 2)
    if ELEMENT > 1:  # a division by 1 would be folded away, and what `multiple_of` says of it too
        head = head // ELEMENT
    token = (tl.load(row + 3) // ELEMENT).to(tl.int32)
    dim = (tl.load(row + 4) // ELEMENT).to(tl.int32)
    if WIDE:
        address = tl.multiple_of(address, 16)
        page = tl.multiple_of(page, 16 // ELEMENT)
        head = tl.multiple_of(head, 16 // ELEMENT)
        token = tl.multiple_of(token, 16 // ELEMENT)
    return address, page, head, token, dim


@triton.jit
def token_offsets(
    pages, place, inside, page_stride, token_stride, VIEW: tl.constexpr, PAGES: tl.constexpr
):
    """Offsets in elements, int64, of tokens within one head of a view.

    Args:
        pages: int32, the engine's pages of the chunk.
        place: of each token, counted from the first token of the first page.
        inside: whether there is such a token.
        VIEW: tokens of a page of the view.
        PAGES: pages of the view that are one page of the engine.
    """
    part = place // VIEW
    page = tl.load(pages + part // PAGES, mask=inside, other=0)
    if PAGES > 1:
        page = page * PAGES + part % PAGES
    # 32 bits by 32 bits: one instruction, as offsets within a page are
    return page.to(tl.int64) * page_stride.to(tl.int64) + (place % VIEW) * token_stride


def spans(
    pages: list[int], first_token: int, tokens: int, page_size: int, view_tokens: int
) -> Iterator[tuple[int, slice, slice]]:
    """A chunk's tokens, page by page of a view: its page, which tokens of it, which of the chunk.

    Args:
        pages: of the engine; the first holds `first_token`.
        first_token: counted from the start of the first page.
        page_size: tokens of a page of the engine.
        view_tokens: tokens of a page of the view.
    """
    per_page = page_size // view_tokens
    token = 0
    while token < tokens:
        part, within = divmod(first_token + token, view_tokens)
        count = min(view_tokens - within, tokens - token)
        page = pages[part // per_page] * per_page + part % per_page
        yield page, slice(within, within + count), slice(token, token + count)
        token += count


def read_tokens(
    view: torch.Tensor, pages: list[int], first_token: int, tokens: int, page_size: int
) -> torch.Tensor:
    """The tokens, dense: `[head, token, dim]`."""
    _, heads, view_tokens, dim = view.shape
    found = torch.empty((heads, tokens, dim), dtype=view.dtype, device=view.device)
    for page, there, here in spans(pages, first_token, tokens, page_size, view_tokens):
        found[:, here] = view[page, :, there]
    return found


def write_tokens(
    view: torch.Tensor, pages: list[int], first_token: int, page_size: int, block: torch.Tensor
) -> None:
    """Put `block`, `[head, token, dim]`, into the pages."""
    for page, there, here in spans(pages, first_token, block.shape[1], page_size, view.shape[2]):
        view[page, :, there] = block[:, here]
