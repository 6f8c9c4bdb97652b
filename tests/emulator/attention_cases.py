# SPDX-License-Identifier: Apache-2.0
"""Attention kernels against their references in float32. Memory outside the sequences holds NaN."""

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from transfer_cases import Case
from unused_memory import nothing_outside, spoil

from pd_bench.kernels.decode_cases import FP8, Heads, latent_set, paged_set
from pd_kernels.attention import (
    alibi,
    decode_call,
    decode_plan,
    document,
    launch,
    mixed,
    mixed_kernel,
    mla_call,
    paged_call,
    soft_cap,
)
from pd_kernels.attention.decode_call import DecodeCall
from pd_kernels.attention.decode_plan import DecodePlan, launch_plan
from pd_kernels.attention.merge import launch_merge, reference_merge
from pd_kernels.attention.mixed_kernel import launch_mixed
from pd_kernels.attention.mla import launch_mla
from pd_kernels.attention.mla_call import MlaCall
from pd_kernels.attention.paged_call import COSTS, PagedCall
from pd_kernels.attention.paged_kernel import launch_paged
from pd_kernels.attention.reference import reference_mla_decode, reference_paged_decode
from pd_kernels.attention.tile_mask import TileMask, launch_tile_mask
from pd_kernels.attention.work_partition import RowShape
from pd_kernels.tuning import tuned

BF16 = torch.bfloat16
BOUND = 5e-3
CPU = torch.device("cpu")
CODED_BOUND = 1e-2
"""Queries are coded as well, and the reference does not round them."""
FEW, MANY = Heads(8, 2, 128), Heads(16, 2, 128)
LENGTHS = (70, 0, 37)


def _compare(batch: DecodeCall, workers: int, bound: float) -> None:
    """The plan, the result, lse, and counters that are zero for the next launch."""
    batch.check()
    batch.check_kernel()
    latent = isinstance(batch, MlaCall)
    given = batch.rows, batch.costs, len(batch.lengths), workers, batch.height, batch.width, CPU
    plan = DecodePlan.of(*given, batch.paired)
    if getattr(batch, "mask_mod", None) is not None:
        plan = batch.plan()
    plan.fill(batch.lengths)
    cache: torch.Tensor = getattr(batch, batch.caches[0])
    spoil(plan, batch.table, batch.lengths, cache.shape[1])
    shape = *batch.query.shape[:3], batch.width
    out, lse = torch.full(shape, 7.0, dtype=batch.query.dtype), torch.full(shape[:3], 7.0)
    wanted, sums = out.float(), lse.clone()
    reference: Any = reference_mla_decode if latent else reference_paged_decode
    attend: Any = launch_mla if latent else launch_paged
    reference(batch, wanted, sums)
    attend(batch, out, lse, plan.tensors)
    error = float((out.float() - wanted).norm() / wanted.norm())
    assert error <= bound, f"error {error:.2e}, at most {bound}"
    atol = 4e-3 if bound == CODED_BOUND else 2e-3
    away = (lse - sums).nan_to_num(posinf=0, neginf=0).abs().max()
    assert torch.allclose(lse, sums, atol=atol), f"lse differs by {away:.1e}"
    assert not plan.counters.any(), "counters are not zero after a launch"


def paged(
    lengths: Sequence[int] = LENGTHS,
    heads: Heads = FEW,
    page: int = 16,
    cache: torch.dtype = BF16,
    queries: int = 1,
    window: int = 0,
    workers: int = 3,
    jagged: bool = False,
    value_dim: int | None = None,
    sinks: bool = False,
    **mods: Any,
) -> None:
    torch.manual_seed(1)
    given = paged_set(list(lengths), heads, page, cache, queries)
    given = given._replace(values=given.values[..., :value_dim])
    for each in (given.keys, given.values):
        nothing_outside(each, given.table, lengths)
    scales = (heads.dim**-0.5, 0.7, 1.3) if cache == FP8 else (heads.dim**-0.5, 1.0, 1.0)
    batch = PagedCall(*given, *scales, True, window, mods.get("score"), mods.get("mask"))
    if jagged:
        counts = [queries - 1, *([queries] * (len(lengths) - 1))]
        kept = [own[:count] for own, count in zip(batch.query, counts, strict=True)]
        starts = torch.tensor([0, *counts]).cumsum(0)
        query = torch.cat(kept).unsqueeze(1)
        batch = PagedCall(query, *given[1:], *scales, True, window, None, None, starts, queries)
    if sinks:
        batch = replace(batch, sinks=torch.linspace(-3.0, 6.0, heads.query))
    _compare(batch, workers, BOUND)


def mla(
    heads: int = 16,
    lengths: Sequence[int] = LENGTHS,
    queries: int = 1,
    page: int = 64,
    coded: bool = False,
    workers: int = 2,
    dtype: torch.dtype = BF16,
    chosen: bool = False,
    kv_scale: float = 0.0,
    tree: bool = False,
    **switches: bool,
) -> None:
    """`tree`: queries are drafts of two branches. `chosen`: each row is chosen by itself, and every fifth is none. `kv_scale`: FP8 with this scale."""
    torch.manual_seed(1)
    page = 1 if chosen else page
    given = latent_set(list(lengths), heads, queries, page, coded)
    if not coded:
        cache = (given.cache / kv_scale).to(FP8) if kv_scale else given.cache.to(dtype)
        given = given._replace(query=given.query.to(dtype), cache=cache)
        nothing_outside(given.cache, given.table, lengths)
    if chosen:
        given.table[:, ::5] = -1
    words = torch.tensor([1, 3, 5, 11, 21, 43, 85, 171][:queries], dtype=torch.int32)
    own = words.repeat(len(lengths), 1) if tree else None
    with tuned(**switches):
        _compare(
            MlaCall(*given, 0.05, not chosen, kv_scale or 1.0, own),
            workers,
            CODED_BOUND if coded else BOUND,
        )


def gluon(heads: int = 16, **given: Any) -> None:
    with _on_hopper(mla_call), mock.patch.object(mla_call, "GLUON_LINES", 0):
        mla(heads, **given)


@contextlib.contextmanager
def _on_hopper(module: Any) -> Iterator[None]:
    """What is known of calls without a Hopper is not known of these."""
    known = mock.patch.dict(launch.known_constants, clear=True)
    with known, mock.patch.object(module, "on_hopper", return_value=True):
        yield


def swapped(heads: Heads = FEW, lengths: Sequence[int] = LENGTHS, **given: Any) -> None:
    """FP8 with tokens as the lines of products."""
    with _on_hopper(paged_call):
        paged(lengths, heads, cache=FP8, **given)


def not_swapped() -> None:
    with tuned(swapped=False):
        swapped()


def mixed_swapped() -> None:
    with _on_hopper(paged_call):
        mixed_steps(FP8)


@contextlib.contextmanager
def processors(count: int) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module in (decode_plan, decode_call, mixed_kernel):
            stack.enter_context(mock.patch.object(module, "multiprocessors", return_value=count))
        yield


def mixed_steps(
    cache: torch.dtype = BF16,
    count: int = 2,
    aware: bool = True,
    lengths: Sequence[int] = (70, 33, 90),
    counts: Sequence[int] = (1, 1, 40),
    heads: Heads = FEW,
    launches: int = 2,
    decodes: int = 2,
    **mods: Any,
) -> None:
    """A prefill chunk behind decodes, and the same plan again."""
    torch.manual_seed(2)
    starts = [0, *itertools.accumulate(counts)]
    given = paged_set(list(lengths), heads, 16, cache)
    for each in (given.keys, given.values):
        nothing_outside(each, given.table, lengths)
    query = torch.randn(sum(counts), heads.query, heads.dim, dtype=BF16)
    layer = {"query": query.unsqueeze(1), "keys": given.keys, "values": given.values, **mods}
    with processors(count):
        plan = mixed.MixedPlan.of(query, given.keys, given.table, given.lengths, starts, decodes)
        for call, own in zip((plan.prefill, plan.decode), plan.plans, strict=True):
            spoil(own, call.table, call.lengths, 16)
        wanted = torch.zeros(layer["query"].shape)
        reference_paged_decode(plan.whole(**layer, scale=0.1), wanted, None)
        for _ in range(launches):
            out, calls = torch.full_like(query, 7.0), plan.calls(**layer, scale=0.1)
            told = plan.plans, plan.tickets, out, None
            launch_mixed(*calls, *told, sm_aware=aware, owners=plan.owner)
            error = float((out.float() - wanted[:, 0]).norm() / wanted.norm())
            assert error <= BOUND, f"error {error:.2e}, at most {BOUND}"
            for each in (plan.tickets, *(own.counters for own in plan.plans)):
                assert not each.any(), "tickets or counters are not zero after a launch"


def merge(dim: int, shards: int) -> None:
    torch.manual_seed(7)
    outs, lses = torch.randn(shards, 5, 3, dim), torch.randn(shards, 5, 3)
    outs[1], lses[1] = torch.nan, -torch.inf
    wanted, sums = reference_merge(outs.double(), lses.double())
    out = torch.full((5, 3, dim), 7.0)
    lse = launch_merge(outs, lses, out)
    assert torch.allclose(out.double(), wanted, atol=1e-6), "the merge differs"
    assert torch.allclose(lse.double(), sums, atol=1e-6), "lse differs"


def plan(batch: int, window: int) -> None:
    torch.manual_seed(batch)
    lengths = (torch.rand(batch) ** 4 * 50_000).int()
    made = DecodePlan.of(RowShape(8, 64, 1, window), COSTS, 256, 20, 16, 128, CPU)
    launch_plan(made, lengths)
    assert torch.equal(made.ranges, made.defined(lengths)), "the plan differs from its definition"


def tile_mask() -> None:
    ids = (torch.arange(300, dtype=torch.int32) // 130).repeat(3, 1)
    mask = TileMask.of(document(ids), RowShape(8, 64, 2, 0), 8, 3, 300, CPU)
    lengths = torch.tensor([300, 5, 0], dtype=torch.int32)
    launch_tile_mask(mask, lengths)
    for row, wanted in enumerate(mask.seen_tiles(lengths)):
        assert mask.tiles[row, : len(wanted)].tolist() == wanted.tolist(), (
            "the list of tiles differs"
        )


_IDS = (torch.arange(128, dtype=torch.int32) // 30).repeat(3, 1)
DECODES: dict[str, Case] = {
    "paged": paged,
    "paged, dim 256, 5 heads, window": functools.partial(paged, [37], Heads(5, 1, 256), window=64),
    "paged, fp8": functools.partial(paged, cache=FP8),
    "paged, one worker": functools.partial(paged, workers=1),
    "paged, many workers": functools.partial(paged, [300, 37], Heads(4, 1, 128), workers=7),
    "paged, page 64, window": functools.partial(paged, page=64, window=50),
    "paged, ALiBi": functools.partial(paged, score=alibi(torch.rand(8) / 50)),
    "paged, soft cap": functools.partial(paged, score=soft_cap(2.0)),
    "paged, documents": functools.partial(paged, mask=document(_IDS)),
    "paged, 4 queries": functools.partial(paged, queries=4, heads=MANY),
    "paged, 8 queries": functools.partial(paged, queries=8, heads=MANY),
    "paged, 8 queries, fp8": functools.partial(paged, queries=8, heads=MANY, cache=FP8),
    "paged, jagged": functools.partial(paged, [70, 37], queries=4, jagged=True),
    "paged, dim 64": functools.partial(paged, heads=Heads(8, 2, 64)),
    "paged, dim 80": functools.partial(paged, heads=Heads(6, 6, 80)),
    "paged, dim 256": functools.partial(paged, heads=Heads(8, 4, 256)),
    "paged, dim 256, 8 queries, fp8": functools.partial(
        paged, heads=Heads(16, 2, 256), queries=8, cache=FP8, page=64
    ),
    "paged, dim 512": functools.partial(paged, heads=Heads(8, 1, 512)),
    "paged, dim 512, 64 lines": functools.partial(paged, heads=Heads(16, 2, 512), queries=8),
    "paged, 192 and 128": functools.partial(paged, heads=Heads(8, 2, 192), value_dim=128),
    "paged, sinks, window, split": functools.partial(
        paged, [300, 0, 37], Heads(8, 1, 64), window=128, workers=7, sinks=True
    ),
    "paged, sinks, fp8": functools.partial(paged, heads=Heads(8, 1, 64), cache=FP8, sinks=True),
    "swapped": swapped,
    "swapped, 8 heads, page 32": functools.partial(swapped, Heads(8, 1, 128), page=32),
    "swapped, page 64, window": functools.partial(swapped, page=64, window=50),
    "swapped, many workers": functools.partial(swapped, lengths=[300, 37], workers=7),
    "swapped, one worker": functools.partial(swapped, workers=1),
    "swapped, 16 lines": functools.partial(swapped, MANY, queries=2),
    "swapped, 32 lines": functools.partial(swapped, MANY, queries=4),
    "swapped, soft cap": functools.partial(swapped, score=soft_cap(2.0)),
    "swapped, documents": functools.partial(swapped, mask=document(_IDS)),
    "swapped, jagged": functools.partial(swapped, lengths=[70, 37], queries=4, jagged=True),
    "swapped, dim 80": functools.partial(swapped, Heads(6, 6, 80)),
    "swapped off": not_swapped,
    "mixed, swapped": mixed_swapped,
    "mla, 16 heads": mla,
    "mla, 16 heads, fp8": functools.partial(mla, coded=True),
    "mla, 16 heads, 4 queries": functools.partial(mla, queries=4),
    "mla, 24 heads, page 16": functools.partial(mla, 24, page=16),
    "mla, 32 heads, page 16, fp8": functools.partial(mla, 32, page=16, coded=True),
    "mla, 40 heads, split": functools.partial(mla, 40, [37, 170, 0], workers=4),
    "mla, 2 heads, split": functools.partial(mla, 2, [1, 258, 0], workers=4, column_merge=False),
    "mla, 128 heads": functools.partial(mla, 128, [70, 37]),
    "mla, 128 heads, fp8": functools.partial(mla, 128, [70, 37], coded=True),
    "mla, 16 heads, 8 queries, fp8": functools.partial(mla, queries=8, coded=True),
    "mla, one scale": functools.partial(mla, kv_scale=0.02),
    "mla, one scale, split": functools.partial(mla, 16, [37, 170, 0], workers=4, kv_scale=0.02),
    "mla, one scale, 32 heads, page 16": functools.partial(mla, 32, page=16, kv_scale=3.0),
    "mla, one scale, 40 heads, 2 queries": functools.partial(mla, 40, queries=2, kv_scale=0.02),
    "mla, one scale, 8 queries, float16": functools.partial(
        mla, 8, queries=8, page=16, kv_scale=0.02, dtype=torch.float16
    ),
    "mla, 24 heads, 5 queries": functools.partial(mla, 24, [70, 3, 37], queries=5),
    "mla, tree": functools.partial(mla, queries=4, tree=True),
    "mla, tree, fp8": functools.partial(mla, 8, queries=4, coded=True, tree=True),
    "mla, tree, 8 queries, fp8, split": functools.partial(
        mla, 16, [300, 9, 37], queries=8, coded=True, tree=True, workers=5
    ),
    "mla, tree, one scale, page 16": functools.partial(
        mla, 4, queries=5, page=16, kv_scale=0.02, tree=True
    ),
    "gluon, tree": functools.partial(gluon, 24, lengths=[70, 6, 137], queries=5, tree=True),
    "mla, chosen": functools.partial(mla, chosen=True),
    "mla, chosen, fp8": functools.partial(mla, chosen=True, coded=True),
    "mla, 128 heads, chosen, fp8": functools.partial(mla, 128, [70, 37], chosen=True, coded=True),
    "mla, 128 heads, page 16": functools.partial(mla, 128, [70, 37], page=16),
    "gluon": gluon,
    "gluon off": functools.partial(gluon, gluon=False),
    "gluon, 128 heads": functools.partial(gluon, 128, lengths=[70, 37], workers=1),
    "gluon, 16 heads, 4 queries": functools.partial(gluon, queries=4),
    "gluon, 24 heads, 2 queries": functools.partial(
        gluon, 24, queries=2, lengths=[322, 0, 0, 66], workers=5
    ),
    "gluon, 96 heads, page 128": functools.partial(gluon, 96, page=128, lengths=[200, 37]),
    "gluon, page 256, split": functools.partial(gluon, 64, page=256, lengths=[700], workers=3),
    "gluon, float16": functools.partial(gluon, 64, dtype=torch.float16),
    "gluon, 24 heads, 5 queries": functools.partial(gluon, 24, lengths=[70, 3, 37], queries=5),
    "gluon, split": functools.partial(gluon, lengths=[400, 100, 0], workers=4),
    "gluon, many tiles": functools.partial(gluon, lengths=[500, 130], workers=1),
    "mixed": mixed_steps,
    "mixed, fp8": functools.partial(mixed_steps, FP8),
    "mixed, ALiBi": functools.partial(mixed_steps, score_mod=alibi(torch.rand(8) / 50)),
    "mixed, documents, fp8": functools.partial(mixed_steps, FP8, mask_mod=document(_IDS)),
    "mixed, soft cap, documents": functools.partial(
        mixed_steps, score_mod=soft_cap(2.0), mask_mod=document(_IDS)
    ),
    "mixed, dim 512": functools.partial(mixed_steps, heads=Heads(16, 2, 512), launches=1),
    "mixed, one processor": functools.partial(
        *(mixed_steps, BF16, 1, False, (40, 20, 30), (5, 1, 3), Heads(32, 1, 128))
    ),
    "mixed, split": functools.partial(
        mixed_steps, BF16, 4, True, (400, 70, 20, 300), (1, 1, 1, 40), Heads(4, 1, 128), 1, 3
    ),
    "mixed, 2 heads, split": functools.partial(
        mixed_steps, BF16, 4, True, (2, 13, 201, 5, 300), (1, 1, 1, 1, 40), Heads(2, 1, 128), 1, 4
    ),
    "merge": functools.partial(merge, 128, 4),
    "merge, 80": functools.partial(merge, 80, 7),
    "plan": functools.partial(plan, 64, 0),
    "plan, window": functools.partial(plan, 17, 100),
    "tile mask": tile_mask,
}


def _whole_lines() -> None:
    with tuned(column_merge=False):
        mla()


DECODES["mla, 16 heads, column_merge off"] = _whole_lines
