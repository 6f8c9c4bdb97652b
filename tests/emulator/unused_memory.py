# SPDX-License-Identifier: Apache-2.0
"""Memory of attention kernels that they must not read, or not before they have written it."""

from collections.abc import Sequence

import torch
from extents import only

from pd_bench.kernels import decode_cases
from pd_kernels.attention.decode_plan import DecodePlan

NO_PAGE = 1 << 20
"""Number of a page far behind a cache."""
_page_table = decode_cases.page_table


def _without_page_0(lengths: list[int], page: int) -> tuple[torch.Tensor, int]:
    """No sequence has page 0, the number that a load which is masked off gives."""
    table, pages = _page_table(lengths, page)
    return table + 1, pages + 1


decode_cases.DEVICE, decode_cases.page_table = "cpu", _without_page_0


def nothing_outside(cache: torch.Tensor, table: torch.Tensor, lengths: Sequence[int]) -> None:
    """NaN in `[page, token, ...]` wherever no sequence has a token, and no access there."""
    page, used = cache.shape[1], torch.zeros(cache.shape[:2], dtype=torch.bool)
    for row, length in zip(table.tolist(), lengths, strict=True):
        for token in range(length):
            used[row[token // page], token % page] = True
    nothing = 0x7F if cache.dtype == torch.uint8 else torch.nan
    cache.copy_(
        torch.where(used.view(*used.shape, *[1] * (cache.dim() - 2)), cache.float(), nothing)
    )
    only(cache, [tokens[:count] for tokens, count in zip(cache, used.sum(1).tolist(), strict=True)])


def spoil(plan: DecodePlan, table: torch.Tensor, lengths: torch.Tensor, page: int) -> None:
    """Scratch memory that a kernel must write before it reads it, and pages that no sequence has, hold nothing."""
    for row, length in zip(table, lengths.tolist(), strict=True):
        row[-(-length // page) :] = NO_PAGE
    for each in (plan.partials, plan.weights):
        each.fill_(torch.nan)
