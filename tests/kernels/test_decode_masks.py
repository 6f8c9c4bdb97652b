# SPDX-License-Identifier: Apache-2.0
"""Tiles that a mask mod hides are skipped, and jagged batches: kernels, interpreted, against
attention in float32."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import decode_interpreted
import pytest
import torch
import triton.language as tl
from decode_batches import FP8, by_reference, error, paged_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_kernels.attention import Mod, document, paged_decode, plan_paged_decode
from pd_kernels.attention.decode_plan import DecodePlan, launch_plan
from pd_kernels.attention.paged_call import PagedCall
from pd_kernels.attention.paged_kernel import launch_paged
from pd_kernels.attention.tile_mask import launch_tile_mask

BOUND = 5e-3
PHASES = ((True, False), (False, True))
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")


@pytest.fixture(autouse=True, scope="module")
def _bfloat16_products() -> Iterator[None]:
    with decode_interpreted.dots_mended():
        yield


def planned(batch: PagedCall, workers: int = 5, masked: bool = True) -> DecodePlan:
    """A plan for `workers` workers, filled by the kernels; checked against its definition."""
    own = batch if masked else dataclasses.replace(batch, mask_mod=None)
    few = own.plan()
    plan = dataclasses.replace(
        DecodePlan.of(
            rows=few.rows,
            costs=few.costs,
            batch=few.room,
            workers=workers,
            height=batch.height,
            dim=batch.width,
            device=batch.query.device,
        ),
        mask=few.mask,
    )
    lengths = batch.lengths
    if plan.mask:
        launch_tile_mask(plan.mask, lengths)
        for row, tiles in enumerate(plan.mask.seen_tiles(lengths)):
            assert plan.mask.tokens[row] == len(tiles) * plan.rows.tile
            assert plan.mask.tiles[row, : len(tiles)].tolist() == tiles.tolist()
        lengths = plan.mask.tokens[: len(lengths)]
    launch_plan(plan, lengths)
    assert torch.equal(plan.ranges, plan.defined(batch.lengths))
    return plan


def run(batch: PagedCall, plan: DecodePlan) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = torch.full(batch.query.shape, 7.0), torch.full(batch.query.shape[:3], 7.0)
    launch_paged(batch, out, lse, plan.tensors, PHASES)
    assert not plan.counters.any()
    return out, lse


def check(batch: PagedCall, plan: DecodePlan) -> None:
    found, lse = run(batch, plan)
    wanted, sums = by_reference(batch)
    empty = sums == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    assert not found[empty].any()
    assert error(found, wanted) <= BOUND
    assert torch.allclose(lse[~empty], sums[~empty], atol=1e-5, rtol=1e-5)


def documents(lengths: list[int], size: int) -> Mod:
    ids = (torch.arange(max(lengths)) // size).int()
    return document(ids.repeat(len(lengths), 1))


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(
    "others",
    [{}, {"window": 150}, {"cache": FP8}, {"dim": 80}, {"page": 128}],
    ids=["plain", "window", "fp8", "dim 80", "page 128"],
)
def test_skipped_tiles_change_nothing(queries: int, others: dict[str, Any]) -> None:
    lengths = [900, 0, 40, 511]
    batch = paged_batch(lengths, queries=queries, mask_mod=documents(lengths, 200), **others)
    plan = planned(batch)
    assert plan.mask is not None
    assert plan.mask.tokens.sum() < sum(lengths) / 2, "more than half is skipped"
    check(batch, plan)
    check(batch, planned(batch, masked=False))


def test_tiles_that_a_mask_hides_are_not_read() -> None:
    """Their pages hold NaN here. Negative control: a plan without the mask reads them."""
    batch = paged_batch([900], mask_mod=documents([900], 256))
    wanted, _ = run(batch, planned(batch))
    hidden = batch.table.clone()
    unused = next(page for page in range(len(batch.keys)) if page not in batch.table)
    hidden[:, : 768 // 16] = unused
    assert batch.values[unused].isnan().all()
    holed = dataclasses.replace(batch, table=hidden)
    assert torch.equal(run(holed, planned(holed))[0], wanted)
    assert run(holed, planned(holed, masked=False))[0].isnan().any()


def sinks(b, h, q_idx, kv_idx, args):  # type: ignore[no-untyped-def]
    return (kv_idx < 4) | (kv_idx > q_idx - 100)


def far_heads(b, h, q_idx, kv_idx, args):  # type: ignore[no-untyped-def]
    return ((h == 3) & (kv_idx < 130)) | (kv_idx == q_idx)


def nothing(b, h, q_idx, kv_idx, args):  # type: ignore[no-untyped-def]
    return (kv_idx < 0) & (h >= 0)


@pytest.mark.parametrize(
    ("function", "tiles"), [(sinks, [0, 7]), (far_heads, [0, 1, 7]), (nothing, [])]
)
def test_a_tile_is_kept_if_any_head_and_any_query_sees_it(function: Any, tiles: list[int]) -> None:
    batch = paged_batch([1_000], mask_mod=Mod.of(function))
    plan = planned(batch)
    assert plan.mask is not None
    assert plan.mask.tokens.tolist() == [128 * len(tiles)]
    assert plan.mask.tiles[0, : len(tiles)].tolist() == tiles
    if tiles:
        check(batch, plan)
    else:
        found, lse = run(batch, plan)
        assert not found.any()
        assert (lse == -torch.inf).all()


@given(
    lengths=st.lists(st.integers(0, 900), min_size=1, max_size=4),
    size=st.integers(1, 400),
    workers=st.integers(1, 9),
    queries=st.integers(1, 3),
)
@settings(max_examples=6, deadline=None)
def test_any_documents_and_any_number_of_workers(
    lengths: list[int], size: int, workers: int, queries: int
) -> None:
    lengths = [*lengths, 1]
    batch = paged_batch(lengths, queries=queries, mask_mod=documents(lengths, size))
    check(batch, planned(batch, workers))


def marking(b, h, q_idx, kv_idx, args):  # type: ignore[no-untyped-def]
    tl.store(args[0] + q_idx + 0 * kv_idx, 1)
    return kv_idx <= q_idx


def test_a_mask_is_asked_about_queries_that_exist() -> None:
    """Lines of padding have none: 14 of 16 are padding here."""
    asked = torch.zeros(200, dtype=torch.int32)
    reference = lambda b, h, q_idx, kv_idx, args: kv_idx <= q_idx  # noqa: E731
    batch = paged_batch([150], mask_mod=Mod.of(marking, (asked,), reference))
    check(batch, planned(batch))
    assert asked.nonzero()[:, 0].tolist() == [149]


def test_a_plan_that_skips_serves_its_own_mask_only() -> None:
    batch = paged_batch([300], mask_mod=documents([300], 100))
    arguments = (batch.query, batch.keys, batch.values, batch.table, batch.lengths)
    plan = plan_paged_decode(batch.query, batch.keys, mask_mod=batch.mask_mod, max_tokens=300)
    plan.fill(batch.lengths)
    wanted = by_reference(batch)[0].to(batch.query.dtype)
    assert torch.equal(paged_decode(*arguments, mask_mod=batch.mask_mod, plan=plan), wanted)
    with pytest.raises(ValueError, match="plan for RowShape"):
        paged_decode(*arguments, plan=plan)
    with pytest.raises(ValueError, match="plan for RowShape"):
        paged_decode(*arguments, mask_mod=documents([300], 100), plan=plan)
    with pytest.raises(ValueError, match="mask_mod without max_tokens"):
        plan_paged_decode(batch.query, batch.keys, mask_mod=batch.mask_mod)


def jagged(batch: PagedCall, counts: list[int]) -> PagedCall:
    """The batch with the last `counts` queries of each sequence; NaN and 7 lie between them."""
    starts = torch.tensor([0, *counts]).cumsum(0)
    pairs = zip(batch.query, counts, strict=True)
    query = torch.cat([own[len(own) - count :] for own, count in pairs]).unsqueeze(1)
    return dataclasses.replace(batch, query=query, starts=starts, most_queries=batch.query.shape[1])


@pytest.mark.parametrize(
    "others",
    [{}, {"causal": False}, {"window": 60}, {"cache": FP8}, {"heads": 40, "kv_heads": 2}],
    ids=["plain", "not causal", "window", "fp8", "blocks of lines"],
)
def test_sequences_with_different_numbers_of_queries(others: dict[str, Any]) -> None:
    whole = paged_batch([300, 7, 90, 150, 0], queries=5, **others)
    batch = jagged(whole, [1, 5, 0, 4, 2])
    batch.check()
    batch.check_kernel()
    check(batch, planned(batch))
    results, sums = by_reference(whole)
    own, own_sums = by_reference(batch)
    assert torch.allclose(own[:1, 0], results[0, 4:], atol=1e-6)
    assert torch.allclose(own[6:10, 0], results[3, 1:], atol=1e-6)
    assert torch.allclose(own_sums[6:10, 0], sums[3, 1:], atol=1e-5)


def test_jagged_batches_skip_masked_tiles_too() -> None:
    lengths = [900, 40, 700]
    whole = paged_batch(lengths, queries=4, mask_mod=documents(lengths, 256))
    batch = jagged(whole, [1, 4, 2])
    check(batch, planned(batch))


def test_nested_tensors_go_in_and_come_out() -> None:
    whole = paged_batch([300, 7, 90], queries=5)
    batch = jagged(whole, [1, 5, 3])
    assert batch.starts is not None
    nested = torch.nested.nested_tensor_from_jagged(batch.query[:, 0], batch.starts)
    others = (batch.keys, batch.values, batch.table, batch.lengths)
    out, lse = paged_decode(nested, *others, return_lse=True)
    wanted, sums = by_reference(batch)
    assert out.is_nested
    assert torch.equal(out.offsets(), nested.offsets())
    assert torch.equal(out.values(), wanted[:, 0].to(out.dtype))
    assert torch.equal(lse.values(), sums[:, 0])
    plan = plan_paged_decode(nested, batch.keys).fill(batch.lengths)
    given = torch.empty_like(nested)
    paged_decode(nested, *others, plan=plan, out=given)
    assert torch.equal(given.values(), out.values())
    with pytest.raises(ValueError, match=r"nested q of torch.jagged with 3 axes: must be"):
        paged_decode(
            torch.nested.nested_tensor_from_jagged(batch.query[:, 0, 0], batch.starts), *others
        )


def test_a_nested_batch_with_holes_is_refused() -> None:
    """Its offsets do not say where sequences end: other sequences' queries would be taken along."""
    batch = paged_batch([300, 90], queries=5)
    others = (batch.keys, batch.values, batch.table, batch.lengths)
    counts = torch.tensor([2, 3])
    holes = torch.nested.narrow(batch.query, 1, torch.tensor([0, 1]), counts, layout=torch.jagged)
    with pytest.raises(ValueError, match=r"nested q with holes .*: must be q.contiguous\(\)"):
        paged_decode(holes, *others)
    whole = holes.contiguous()
    assert paged_decode(whole, *others).values().shape == whole.values().shape
