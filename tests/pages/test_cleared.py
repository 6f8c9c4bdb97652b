# SPDX-License-Identifier: Apache-2.0
"""Pages that a load fills in part. Layers of states and of attention share memory in vLLM, so what an earlier request left
in a page can be NaN."""

import math
from typing import Any

import msgspec
import pytest
import torch

from pd_connector.kv.geometry import Geometry, Group, Shard
from pd_connector.pages.paged_cache import LayerPages, PagedCache

PAGE = 8
GROUP = Group("attention", (0, 1), 2, 4, 4, PAGE, 0, "float32", "", False)


def cache(window: int = 0, parts: int = 1, **options: Any) -> tuple[PagedCache, torch.Tensor]:
    """A cache of 6 pages without a number in it, and its memory `[layer, page part, head, token, K and V]`."""
    group = msgspec.structs.replace(GROUP, window=window)
    memory = torch.full((2, 6 * parts, 2, PAGE // parts, 8), math.nan)
    layers = {n: LayerPages(memory[n, ..., :4], memory[n, ..., 4:], ()) for n in (0, 1)}
    return PagedCache(layers, Geometry(Shard(0, 2, 0, 1), (group,)), **options), memory


def cleared(memory: torch.Tensor, parts: int = 1) -> list[int]:
    """The pages that are zero; all others are as they were."""
    pages = memory.unflatten(1, (6, parts))
    zero = [page for page in range(6) if bool((pages[:, page] == 0).all())]
    rest = [page for page in range(6) if page not in zero]
    assert bool(pages[:, rest].isnan().all())
    return zero


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    ("first", "stop", "zero"),
    [
        (0, 20, [5]),  # pages 1, 3 and 5 of the table
        (16, 20, [5]),
        (0, 24, []),  # the last page is filled
        (0, 3, [1]),
        (18, 20, []),  # what precedes the load in this page was computed here
        (20, 20, []),
    ],
)
def test_a_page_that_a_load_fills_in_part_is_zeroed_first(
    first: int, stop: int, zero: list[int], parts: int
) -> None:
    pages, memory = cache(parts=parts, clears=True)
    pages.clear(([1, 3, 5],), first, stop)
    assert cleared(memory, parts) == zero


def test_no_page_of_a_table_that_no_prefix_fills_is_kept() -> None:
    """vLLM has allocated them for this load, also those before its first token."""
    pages, memory = cache(window=10, clears=True)
    pages.geometry = msgspec.structs.replace(pages.geometry, uncached=(0,))
    pages.clear(([-1, 3, 5],), 16, 24)
    assert cleared(memory) == [3, 5]


def test_pages_of_a_window_that_begins_within_them_are_zeroed() -> None:
    pages, memory = cache(window=10, clears=True)
    pages.clear(([-1, 3, 5],), 0, 24)
    assert cleared(memory) == [3, 5]


def test_a_cache_of_one_kind_is_not_touched() -> None:
    pages, memory = cache()
    pages.clear(([1, 3, 5],), 0, 20)
    assert cleared(memory) == []


def test_a_page_of_no_cache_is_not_cleared() -> None:
    pages, _ = cache(clears=True)
    with pytest.raises(IndexError, match="6"):
        pages.clear(([6],), 0, 3)
