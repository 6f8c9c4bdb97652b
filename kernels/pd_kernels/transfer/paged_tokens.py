# SPDX-License-Identifier: Apache-2.0
"""Tokens of a chunk in a paged cache, read and written with torch. The references of the kernels
use it."""

from collections.abc import Iterator

import torch


def spans(
    pages: list[int], first_token: int, tokens: int, page_size: int, view_tokens: int
) -> Iterator[tuple[int, slice, slice]]:
    """Cut a chunk's tokens at the pages of a view.

    Args:
        pages: the engine's pages; the first one holds `first_token`.
        first_token: the chunk's first token, counted from the start of the first page.
        tokens: tokens of the chunk.
        page_size: tokens of a page of the engine.
        view_tokens: tokens of a page of the view; divides `page_size`.

    Yields:
        The page of the view, the tokens within that page, and the same tokens within the chunk.
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
    """Copy the tokens of a chunk out of `view`, `[page, head, token, dim]`: dense `[head, token,
    dim]`."""
    _, heads, view_tokens, dim = view.shape
    tokens_out = torch.empty((heads, tokens, dim), dtype=view.dtype, device=view.device)
    for page, there, here in spans(pages, first_token, tokens, page_size, view_tokens):
        tokens_out[:, here] = view[page, :, there]
    return tokens_out


def write_tokens(
    view: torch.Tensor, pages: list[int], first_token: int, page_size: int, plane: torch.Tensor
) -> None:
    """Copy `plane`, `[head, token, dim]`, into the pages of `view`, `[page, head, token, dim]`."""
    for page, there, here in spans(pages, first_token, plane.shape[1], page_size, view.shape[2]):
        view[page, :, there] = plane[:, here]
