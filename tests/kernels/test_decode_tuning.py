# SPDX-License-Identifier: Apache-2.0
"""Both settings of every A/B switch compute the same; and what each is for, where that can be
counted without a GPU."""

import collections
from collections.abc import Iterator

import decode_interpreted  # before what it imports
import pytest
import torch
from decode_batches import FP8, by_kernel, by_reference, error, mla_batch, paged_batch
from test_decode_schedule import pieces

from pd_kernels.attention.mla_call import MlaCall
from pd_kernels.attention.tuning import Tuning, tuned, tuning
from pd_kernels.attention.work_partition import partition, tile_counts

BOUND = 5e-3
SWITCHES = tuple(Tuning.__dataclass_fields__)


@pytest.fixture(autouse=True, scope="module")
def _bfloat16_products() -> Iterator[None]:
    with decode_interpreted.dots_mended():
        yield


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("name", SWITCHES)
def test_both_settings_equal_the_reference(name: str, on: bool) -> None:
    batches = {
        "pairing": mla_batch([200, 0, 70], heads=40, queries=2),
        "column_merge": paged_batch([300, 40], heads=8, kv_heads=2, dim=80),
        "small_tiles": mla_batch([150, 70], coded=True),
        "half_codes": paged_batch([200, 0, 45], dim=80, cache=FP8, key_scale=0.7, value_scale=1.3),
    }
    batch = batches[name]
    with tuned(**{name: on}):
        for workers in (1, 5):
            out, lse = by_kernel(batch, workers)
            wanted, sums = by_reference(batch)
            assert error(out, wanted) < BOUND
            assert torch.allclose(lse, sums, atol=2e-3)


def test_settings_come_back_after_an_error() -> None:
    def fail() -> None:
        with tuned(pairing=False):
            assert not tuning().pairing
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
    with tuned(pairing=False):
        assert reads_from_memory(batch, 132, cached) > 1.9 * queries
