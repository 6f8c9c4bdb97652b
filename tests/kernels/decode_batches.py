# SPDX-License-Identifier: Apache-2.0
"""Random batches over paged caches, whose memory outside the sequences holds NaN."""

from collections.abc import Sequence
from typing import Any

import decode_interpreted  # noqa: F401 - before what it imports
import torch

from pd_kernels.attention.decode_call import DecodeCall
from pd_kernels.attention.decode_plan import DecodePlan, launch_plan
from pd_kernels.attention.mla import launch_mla
from pd_kernels.attention.mla_call import MlaCall
from pd_kernels.attention.paged_call import PagedCall
from pd_kernels.attention.paged_kernel import launch_paged
from pd_kernels.attention.reference import reference_mla_decode, reference_paged_decode

FP8 = torch.float8_e4m3fn
CPU = torch.device("cpu")
NOT_A_PAGE = 1 << 30


def paged_tables(lengths: Sequence[int], page: int, seed: int) -> tuple[torch.Tensor, int]:
    """A table of shuffled pages, int32, and how many pages there are; unused entries are no
    pages."""
    counts = [-(-length // page) for length in lengths]
    pages = sum(counts) + 2
    ids = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).int()
    table = torch.full((len(lengths), max(counts) + 1), NOT_A_PAGE, dtype=torch.int32)
    done = 0
    for row, count in enumerate(counts):
        table[row, :count] = ids[done : done + count]
        done += count
    return table, pages


def fill_tokens(
    cache: torch.Tensor, table: torch.Tensor, lengths: Sequence[int], seed: int
) -> None:
    """Ordinary numbers in a cache `[page, token, ...]` where the sequences lie, NaN elsewhere."""
    cache.copy_(torch.full(cache.shape, torch.nan))
    source = torch.Generator().manual_seed(seed)
    for row, length in enumerate(lengths):
        for token in range(0, length, cache.shape[1]):
            count = min(cache.shape[1], length - token)
            numbers = torch.randn(count, *cache.shape[2:], generator=source)
            cache[int(table[row, token // cache.shape[1]]), :count] = numbers.to(cache.dtype)


def paged_batch(
    lengths: Sequence[int],
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    page: int = 16,
    queries: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    cache: torch.dtype | None = None,
    order: str = "NHD",
    seed: int = 1,
    value_dim: int | None = None,
    **others: Any,
) -> PagedCall:
    """`order`: NHD or HND, K and V side by side as vLLM lays them out, or `apart`."""
    dims = [dim, value_dim or dim]
    table, pages = paged_tables(lengths, page, seed)
    kind = cache or dtype
    if order == "apart":
        keys, values = (torch.zeros(pages, page, kv_heads, each).to(kind) for each in dims)
    else:
        shape = (page, kv_heads) if order == "NHD" else (kv_heads, page)
        both = torch.zeros(pages, *shape, sum(dims)).to(kind)
        keys, values = (both if order == "NHD" else both.transpose(1, 2)).split(dims, dim=3)
    fill_tokens(keys, table, lengths, seed + 1)
    fill_tokens(values, table, lengths, seed + 2)
    source = torch.Generator().manual_seed(seed + 3)
    query = torch.randn(len(lengths), queries, heads, dim, generator=source).to(dtype)
    given = {
        "scale": dim**-0.5,
        "key_scale": 1.0,
        "value_scale": 1.0,
        "causal": True,
        "window": 0,
        "score_mod": None,
        "mask_mod": None,
    }
    number = torch.tensor(lengths, dtype=torch.int32)
    batch = PagedCall(query, keys, values, table, number, **(given | others))
    batch.check()
    batch.check_kernel()
    return batch


def by_reference(batch: DecodeCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Result and lse, float32."""
    out = torch.full((*batch.query.shape[:3], batch.width), 7.0)
    lse = torch.full(batch.query.shape[:3], 7.0)
    if isinstance(batch, MlaCall):
        reference_mla_decode(batch, out, lse)
    else:
        reference_paged_decode(batch, out, lse)
    return out, lse


def plan_of(batch: DecodeCall, workers: int) -> DecodePlan:
    plan = DecodePlan.of(
        *(batch.rows, batch.costs, len(batch.lengths), workers, batch.height, batch.width, CPU),
        batch.paired,
    )
    launch_plan(plan, batch.lengths)
    return plan


def by_kernel(
    batch: DecodeCall, workers: int, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `by_reference`, interpreted: all workers attend before one merges, since they run in
    turn."""
    shape = (*batch.query.shape[:3], batch.width)
    out = torch.full(shape, 7.0, dtype=dtype or batch.query.dtype)
    lse = torch.full(batch.query.shape[:3], 7.0)
    plan = plan_of(batch, workers)
    launch = launch_mla if isinstance(batch, MlaCall) else launch_paged
    launch(batch, out, lse, plan.tensors, ((True, False), (False, True)))
    assert not plan.counters.any(), "counters are zero for the next launch"
    return out.float(), lse


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative, in the 2-norm."""
    return float((found - wanted).norm() / wanted.norm())


def mla_batch(
    lengths: Sequence[int],
    heads: int = 16,
    page: int = 64,
    queries: int = 1,
    coded: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    causal: bool = True,
    seed: int = 1,
    kv_scale: float = 0.0,
) -> MlaCall:
    """A cache of latents; `coded`: in FlashMLA's FP8 layout, `kv_scale`: in FP8 with this scale."""
    table, pages = paged_tables(lengths, page, seed)
    cache = torch.zeros(pages, page, 576, dtype=dtype)
    fill_tokens(cache, table, lengths, seed + 1)
    source = torch.Generator().manual_seed(seed + 3)
    query = torch.randn(len(lengths), queries, heads, 576, generator=source).to(dtype)
    number = torch.tensor(lengths, dtype=torch.int32)
    latents = flash_mla_codes(cache) if coded else cache
    if kv_scale:
        latents = (cache.float() / kv_scale).to(FP8)
    batch = MlaCall(query, latents, table, number, 192**-0.5 / 2, causal, kv_scale or 1.0)
    batch.check()
    batch.check_kernel()
    return batch


TREE = torch.tensor(
    [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 0, 1, 0, 1],
    ]
).bool()
"""Whether a draft sees another: two branches of the first, with two drafts each."""


def tree_words(seen: torch.Tensor, batch: int) -> torch.Tensor:
    """The words of `mla_decode` for a batch in which each sequence has the same tree."""
    words = [sum(1 << place for place, sees in enumerate(row) if sees) for row in seen.tolist()]
    return torch.tensor([words] * batch, dtype=torch.int32)


def latents_by_hand(batch: MlaCall, latents: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Each sequence by itself, with torch's attention in float32: the last queries see what `seen` says of each other.
    `latents`: the cache, decoded, float32."""
    rows, (drafts, heads) = [], batch.query.shape[1:3]
    for query, pages, length in zip(batch.query, batch.table, batch.lengths.tolist(), strict=True):
        page = latents.shape[1]
        tokens = [latents[pages[place // page], place % page] for place in range(length)]
        keys = torch.stack(tokens) if tokens else torch.zeros(0, 576)
        first = length - drafts
        mask = torch.ones(drafts, length, dtype=torch.bool)
        for row in range(drafts):
            for place in range(max(0, first), length):
                mask[row, place] = seen[row, place - first]
        every = keys.expand(heads, -1, -1)
        told = query.float().transpose(0, 1), every, every[..., :512], mask
        attend = torch.nn.functional.scaled_dot_product_attention
        rows.append(attend(*told, scale=batch.scale).transpose(0, 1).nan_to_num())
    return torch.stack(rows)


def flash_mla_codes(latents: torch.Tensor) -> torch.Tensor:
    """bfloat16 `[..., 576]` in FlashMLA's FP8 layout, uint8 `[..., 656]`; NaN stays NaN."""
    groups = latents[..., :512].float().unflatten(-1, (4, 128))
    scales = groups.abs().amax(-1) / 448
    codes = (groups / scales[..., None]).to(FP8).flatten(-2)
    parts = (codes, scales, latents[..., 512:].contiguous())
    return torch.cat([part.view(torch.uint8) for part in parts], -1)
