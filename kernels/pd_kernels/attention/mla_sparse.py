# SPDX-License-Identifier: Apache-2.0
"""Sparse latent attention: each query attends to the tokens that an indexer has chosen for it."""

from typing import Any

import torch

from pd_kernels.attention.decode_plan import DecodePlan
from pd_kernels.attention.mla import mla_decode, plan_mla_decode


def sparse_mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    *,
    scale: float,
    kv_scale: float = 1.0,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    return_partials: bool = False,
    plan: DecodePlan | None = None,
) -> Any:
    """Attend with each query to its own selection of latents.

    It is `mla_decode` over pages of one token. Prompts and decodes are the same to it: each token of a batch is a
    query with a selection.

    Args:
        q: bfloat16 or float16 `[tokens, heads, 576]`, as in `mla_decode`.
        cache: `[rows, 576]` of q's dtype or float8_e4m3fn, or uint8 `[rows, 656]` in FlashMLA's FP8 layout. A row is a
            token.
        slots: int32 `[tokens, top k]`, the rows that each query attends to. -1 marks a missing row, wherever it stands. A row that
            is named twice counts twice. Rows are not checked on the device.
        counts: int32 `[tokens]`, the number of slots that are read of each query, from the first on.
        scale, kv_scale, out, return_lse, return_partials: as in `mla_decode`. The result of a query without rows is zero, and
            its lse is -inf.
        plan: from `plan_sparse_mla_decode`, filled for these counts. By default, the call makes one.

    Returns:
        `out` `[tokens, heads, 512]`, or `(out, lse)`.

    Raises:
        ValueError: shapes, dtypes or strides contradict each other or are not supported.

    Source:
        DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.

    Example:
        >>> import torch
        >>> from pd_kernels.attention import sparse_mla_decode
        >>> q, cache = torch.randn(2, 16, 576).bfloat16(), torch.randn(90, 576).bfloat16()
        >>> slots = torch.tensor([[7, 0, -1], [89, -1, -1]], dtype=torch.int32)
        >>> sparse_mla_decode(q, cache, slots, torch.tensor([3, 1]), scale=192**-0.5).shape
        torch.Size([2, 16, 512])
    """
    if q.dim() != 3 or cache.dim() != 2:
        raise ValueError(
            f"q {list(q.shape)}, cache {list(cache.shape)}: must be [tokens, heads, 576] and [rows, 576 or 656]"
        )
    return mla_decode(
        q,
        cache[:, None],
        slots,
        counts,
        scale=scale,
        kv_scale=kv_scale,
        causal=False,
        out=out,
        return_lse=return_lse,
        return_partials=return_partials,
        plan=plan,
    )


def plan_sparse_mla_decode(
    q: torch.Tensor, cache: torch.Tensor, *, max_tokens: int | None = None
) -> DecodePlan:
    """Allocate a plan for calls of `sparse_mla_decode` with such a `q` and `cache`. All layers share it.

    Fill it once a step (`plan.fill(counts)`).

    Args:
        q, cache: as `sparse_mla_decode` takes them.
        max_tokens: the most queries of a batch; by default those of `q`.
    """
    return plan_mla_decode(q, cache[:, None], max_batch=max_tokens)
