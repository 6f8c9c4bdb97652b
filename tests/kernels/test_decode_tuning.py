# SPDX-License-Identifier: Apache-2.0
"""Both settings of the A/B switch of merges compute the same, and what can be counted without a GPU.

The other switches have tests of their own: test_mla_gluon.py, test_backend_mixed.py,
test_direct_launch.py."""

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

import decode_interpreted  # before what it imports
import pytest
import torch
import triton
from decode_batches import FP8, by_kernel, by_reference, error, mla_batch, paged_batch
from test_decode_schedule import pieces

from pd_kernels.attention import (
    decode_plan,
    operators,
    paged_call,
    paged_decode,
    plan_paged_decode,
)
from pd_kernels.attention.mla_call import MlaCall
from pd_kernels.attention.online_softmax import LOG2E
from pd_kernels.attention.paged_call import PagedCall
from pd_kernels.attention.paged_kernel import launch_paged
from pd_kernels.attention.work_partition import partition, tile_counts
from pd_kernels.tuning import Tuning, tuned, tuning

BOUND = 5e-3


@pytest.fixture(autouse=True, scope="module")
def _bfloat16_products() -> Iterator[None]:
    with decode_interpreted.dots_mended():
        yield


BATCHES = {
    "dim 80": paged_batch([300, 40], heads=8, kv_heads=2, dim=80),
    "FP8 pages": paged_batch([200, 0, 45], dim=80, cache=FP8, key_scale=0.7, value_scale=1.3),
    "80 lines": mla_batch([200, 0, 70], heads=40, queries=2),
    "FP8 latents, 40 lines": mla_batch([150, 70], heads=40, coded=True),
    "FP8 latents, 24 lines": mla_batch([150, 0, 70], heads=24, coded=True),
}


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("name", BATCHES)
def test_both_settings_of_column_merge_equal_the_reference(name: str, merge: bool) -> None:
    batch = BATCHES[name]
    with tuned(column_merge=merge):
        for workers in (1, 5):
            out, lse = by_kernel(batch, workers)
            wanted, sums = by_reference(batch)
            assert error(out, wanted) < BOUND
            assert torch.allclose(lse, sums, atol=2e-3)


CODED = {
    "4 lines": {"heads": 8, "kv_heads": 2},
    "16 lines, window": {"heads": 16, "kv_heads": 2, "queries": 2, "window": 50},
    "32 lines": {"heads": 16, "kv_heads": 2, "queries": 4},
    "dim 80": {"heads": 6, "kv_heads": 2, "dim": 80},
}


@pytest.mark.parametrize("name", CODED)
def test_swapped_operands_give_what_the_reference_gives(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"dim": 128} | CODED[name]
    batch = paged_batch([200, 0, 45], cache=FP8, key_scale=0.7, value_scale=1.3, **shape)
    assert not batch.swapped, "a CPU is not a Hopper GPU"
    monkeypatch.setattr(paged_call, "on_hopper", lambda _: True)
    assert batch.swapped
    assert batch.height == max(8, triton.next_power_of_2(batch.lines))
    for workers in (1, 5):
        out, lse = by_kernel(batch, workers)
        wanted, sums = by_reference(batch)
        assert error(out, wanted) < BOUND
        assert torch.allclose(lse, sums, atol=2e-3)


def test_a_plan_serves_values_that_are_not_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is made of K alone. V at an odd address takes another loop, with 16 lines."""
    monkeypatch.setattr(paged_call, "on_hopper", lambda _: True)
    batch = paged_batch([200, 45], dim=128, cache=FP8)
    plan = batch.plan().fill(batch.lengths)
    odd = torch.zeros(batch.values.numel() + 1, dtype=torch.uint8).view(FP8)[1:]
    moved = odd.view(batch.values.shape).copy_(batch.values)
    changed = dataclasses.replace(batch, values=moved)
    assert (batch.height, changed.height) == (8, 16)
    for each in (batch, changed):
        operators.check_call(each, list(plan.rows), plan.tensors)
        out = torch.zeros(each.query.shape, dtype=each.query.dtype)
        launch_paged(each, out, None, plan.tensors)
        assert error(out, by_reference(each)[0]) < BOUND


def test_weights_far_below_the_largest_count_with_swapped_operands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A token whose score is 20 powers of 2 above 400 others: float16 alone keeps 4 bits of their weights."""
    monkeypatch.setattr(paged_call, "on_hopper", lambda _: True)
    batch = paged_batch([401], heads=4, kv_heads=1, dim=128, cache=FP8, scale=1.0)
    batch.query.zero_()
    batch.query[..., 0] = 20.6 / LOG2E
    batch.keys.zero_()
    page, place = batch.table[0, 3], 5
    batch.keys[page, place, :, 0] = 1.0
    values = torch.ones_like(batch.values.float())
    values[page, place] = 0.0
    batch.values.copy_(values.to(FP8))
    out, _ = by_kernel(batch, 1)
    assert error(out, by_reference(batch)[0]) < BOUND


def test_only_rows_that_fill_a_product_of_hopper_are_swapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paged_call, "on_hopper", lambda _: True)
    shape = {"heads": 16, "kv_heads": 2, "dim": 128}
    assert not paged_batch([9], **shape).swapped, "not FP8"
    assert not paged_batch([9], **shape | {"dim": 64}, cache=FP8).swapped
    assert not paged_batch([9], **shape | {"dim": 256}, cache=FP8).swapped
    assert not paged_batch([9], **shape, queries=8, cache=FP8).swapped, "64 lines"
    with tuned(swapped=False):
        assert not paged_batch([9], **shape, cache=FP8).swapped


def test_settings_come_from_the_environment() -> None:
    assert Tuning.of("") == Tuning()
    assert Tuning.of(" gluon=0, column_merge=0,") == Tuning(gluon=False, column_merge=False)
    for wrong in ("gluon", "gluon=yes", "glue=1"):
        with pytest.raises(
            ValueError, match=f"PD_KERNELS_TUNING: '{wrong}': must be one of column"
        ):
            Tuning.of(wrong)


def test_settings_come_back_after_an_error() -> None:
    def fail() -> None:
        with tuned(column_merge=False):
            assert not tuning().column_merge
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert tuning() == Tuning()


@pytest.mark.parametrize("factor", [1e-30, 1.0, 1e30])
def test_queries_of_any_magnitude_are_multiplied_as_float16(factor: float) -> None:
    """float16 holds no 1e30; a power of two of each line is taken out before."""
    batch = paged_batch([90, 33], cache=FP8, scale=0.1 / factor)
    batch.query.mul_(factor)
    assert batch.words
    out, _ = by_kernel(batch, 3)
    assert error(out, by_reference(batch)[0]) < BOUND


def test_a_call_is_checked_once_and_again_when_anything_it_depends_on_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checks are most of what an eager call costs the host."""
    batch, checked = paged_batch([20, 5]), []
    check = PagedCall.check
    monkeypatch.setattr(PagedCall, "check", lambda self: checked.append(1) or check(self))
    monkeypatch.setattr(operators, "_checked", set())
    given = (batch.query, batch.keys, batch.values, batch.table, batch.lengths)
    first = paged_decode(*given)
    assert torch.equal(paged_decode(*given), first)
    assert len(checked) == 1
    paged_decode(*given, window=7)
    paged_decode(batch.query.clone()[:, :, :2], *given[1:])
    with pytest.raises(ValueError, match="lengths"):
        paged_decode(*given[:4], batch.lengths[:1])
    with pytest.raises(ValueError, match="lengths"):
        paged_decode(*given[:4], batch.lengths[:1])
    assert len(checked) == 5, "what has failed is checked again"


def test_a_batch_of_one_sequence_is_compiled_as_others_are() -> None:
    """torch gives an axis of length 1 any stride: that of a slice of a wider tensor, or its own."""
    wide = torch.zeros(4 * 1536, dtype=torch.bfloat16)
    shapes = ((4, 1, 8, 64), (1536, 512, 64, 1)), ((1, 1, 8, 64), (1536, 1536, 64, 1))
    many, one, own = (
        dataclasses.replace(paged_batch([9]), query=wide.as_strided(*each))
        for each in (*shapes, ((1, 1, 8, 64), (512, 512, 64, 1)))
    )
    assert many.query_strides[1:] == one.query_strides[1:] == own.query_strides[1:]
    assert all(batch.query_strides[0] % 16 == 0 for batch in (many, one, own))


@pytest.mark.parametrize("batch", [1, 3, 200])
def test_every_batch_of_a_plan_takes_one_planning_kernel(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = {}
    kernel = decode_plan.partition_rows

    class Watched:
        def __getitem__(self, grid: object) -> Any:
            return lambda **given: taken.update(given) or kernel[grid](**given)

    monkeypatch.setattr(decode_plan, "partition_rows", Watched())
    query = torch.zeros(256, 1, 8, 64, dtype=torch.bfloat16)
    plan = plan_paged_decode(query, torch.zeros(2, 16, 2, 64), max_batch=256)
    lengths = torch.arange(batch) * 7
    decode_plan.launch_plan(plan, lengths)
    assert taken["BATCH"] == 256
    assert torch.equal(plan.ranges, partition(lengths, plan.rows, plan.workers, plan.costs))


def reads_from_memory(batch: MlaCall, programs: int, cached_tiles: int) -> float:
    """Simulate a launch: how often each tile is read from memory on average.

    Programs advance tile by tile, all at the same speed. The L2 keeps the last `cached_tiles`.
    """
    workers = programs // batch.paired
    ranges = partition(batch.lengths, batch.rows, workers, batch.costs)
    tiles = tile_counts(batch.lengths, batch.rows).tolist()
    heads = batch.rows.heads
    work: list[list[tuple[int, int]]] = [[] for _ in range(workers)]
    for piece in pieces(ranges, tiles, heads):
        sequence = piece.row // heads
        work[piece.worker] += [(sequence, tile) for tile in range(piece.begin, piece.end)]
    cache: collections.OrderedDict[tuple[int, int], None] = collections.OrderedDict()
    reads = 0
    for turn in range(max(map(len, work))):
        for own in work:
            for _ in range(batch.paired if turn < len(own) else 0):
                reads += own[turn] not in cache
                cache[own[turn]] = None
                cache.move_to_end(own[turn])
                if len(cache) > cached_tiles:
                    cache.popitem(last=False)
    return reads / sum(tiles)


@pytest.mark.parametrize("queries", [1, 2])
def test_blocks_of_heads_that_run_side_by_side_read_memory_once(queries: int) -> None:
    """FlashMLA's batch of 128 sequences of 4k with 128 heads, an L2 of 50 MB."""
    cache = torch.empty(1, 64, 576, dtype=torch.bfloat16)
    query = torch.empty(128, queries, 128, 576, dtype=torch.bfloat16)
    lengths = torch.full((128,), 4_096)
    batch = MlaCall(query, cache, lengths, lengths, 0.1, True)
    cached = (50 << 20) // (batch.config.tile * 2 * 576)
    assert reads_from_memory(batch, 132, cached) < 1.05
