# SPDX-License-Identifier: Apache-2.0
"""Block tables for the kernels, made from SGLang's token tables.

SGLang keeps for each request the cache slot of every token (`req_to_token`). Pages are aligned: token
`n * page_size` of a request lies in the first slot of a page, so one entry of each page is enough.
"""

from typing import Any, NamedTuple

import torch


class PageTables(NamedTuple):
    """The places of the KV of a step's requests.

    Attributes:
        table: int32 `[requests, pages]`.
        lengths: `[requests]`, tokens of KV, the new one included.
    """

    table: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of(cls, forward_batch: Any, req_to_token: torch.Tensor, page_size: int) -> "PageTables":
        """The tables of a batch of decodes.

        Args:
            forward_batch: SGLang's `ForwardBatch`.
            req_to_token: `[request rows, tokens]`, the slot of each token.
        """
        lengths = forward_batch.seq_lens
        known = forward_batch.seq_lens_cpu
        longest = req_to_token.shape[1] if known is None else int(known.max())
        slots = req_to_token[forward_batch.req_pool_indices, :longest:page_size]
        return cls((slots // page_size).to(torch.int32), lengths)


class FixedTables:
    """Tables that stay at one address, for CUDA graphs of decodes.

    Args:
        requests: requests of the largest captured batch.
        tokens: tokens of the longest sequence.
    """

    def __init__(self, requests: int, tokens: int, page_size: int, device: Any) -> None:
        pages = -(-tokens // page_size)
        self._page_size = page_size
        self._table = torch.zeros(requests, pages, dtype=torch.int32, device=device)
        self._lengths = torch.ones(requests, dtype=torch.int32, device=device)

    def fill(self, forward_batch: Any, req_to_token: torch.Tensor) -> PageTables:
        """Write the tables of a batch, and return views of the batch's size."""
        count = len(forward_batch.req_pool_indices)
        slots = req_to_token[forward_batch.req_pool_indices, :: self._page_size]
        self._table[:count, : slots.shape[1]] = slots // self._page_size
        self._lengths[:count] = forward_batch.seq_lens
        return PageTables(self._table[:count], self._lengths[:count])
