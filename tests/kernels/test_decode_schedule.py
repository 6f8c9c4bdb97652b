# SPDX-License-Identifier: Apache-2.0
"""Schedules: every tile of every row is somebody's, once, and nobody has much more than others."""

from typing import NamedTuple

import decode_interpreted  # noqa: F401 - before what it imports
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_kernels.attention.decode_plan import DecodePlan, launch_plan
from pd_kernels.attention.work_partition import (
    FIELDS,
    UNIT,
    RowShape,
    TileCosts,
    WorkRange,
    partition,
    tile_counts,
)

COSTS = TileCosts(16, 1)


class Piece(NamedTuple):
    worker: int
    row: int
    begin: int
    end: int


def pieces(ranges: torch.Tensor, tiles: list[int], heads: int) -> list[Piece]:
    """What each worker does, as the kernels read its own_range."""
    found = []
    for worker, fields in enumerate(ranges[:, :7].tolist()):
        own = WorkRange(*fields)
        for row in range(own.row, own.end_row + (own.end_tile > 0)):
            begin = own.tile if row == own.row else 0
            end = own.end_tile if row == own.end_row else tiles[row // heads]
            found.append(Piece(worker, row, begin, end))
    return found


def misplaced(found: list[Piece], tiles: list[int], heads: int) -> list[int]:
    """Rows whose pieces do not have each of their tiles once, or that nobody writes."""
    wrong = []
    for row in range(len(tiles) * heads):
        own = sorted((piece.begin, piece.end) for piece in found if piece.row == row)
        ends = [0] + [end for _, end in own]
        begins = [begin for begin, _ in own] + [tiles[row // heads]]
        if not own or ends != begins or (len(own) > 1 and any(b >= e for b, e in own)):
            wrong.append(row)
    return wrong


BATCHES = st.lists(
    st.one_of(st.integers(0, 300), st.integers(0, 5_000), st.just(0), st.just(100_000)),
    min_size=1,
    max_size=12,
)
ROWS = st.builds(
    RowShape,
    heads=st.integers(1, 9),
    tile=st.sampled_from([16, 32, 64, 128]),
    queries=st.integers(1, 8),
    window=st.sampled_from([0, 0, 1, 100, 4_096]),
)
PRICES = st.builds(TileCosts, row=st.integers(1, 64), partial=st.integers(0, 8))


@given(BATCHES, ROWS, st.integers(1, 300), PRICES)
@settings(max_examples=300, deadline=None)
def test_every_tile_is_done_once_and_the_work_is_balanced(
    lengths: list[int], rows: RowShape, workers: int, costs: TileCosts
) -> None:
    number = torch.tensor(lengths)
    tiles = tile_counts(number, rows).tolist()
    ranges = partition(number, rows, workers, costs)
    assert ranges.shape == (workers, FIELDS)
    found = pieces(ranges, tiles, rows.heads)
    assert not misplaced(found, tiles, rows.heads)

    shares: dict[int, int] = {}
    for piece in found:
        cost = costs.row + UNIT * (piece.end - piece.begin)
        shares[piece.worker] = shares.get(piece.worker, 0) + cost
    total = rows.heads * sum(costs.row + UNIT * count for count in tiles)
    used = len(shares)
    # A cut is moved by half a tile or to the end of the row's start-up, and a piece has its own.
    assert max(shares.values()) <= total / used + 2 * costs.row + 2 * UNIT


@given(BATCHES, ROWS, st.integers(1, 300))
@settings(max_examples=200, deadline=None)
def test_pieces_of_a_row_belong_to_the_workers_that_their_records_name(
    lengths: list[int], rows: RowShape, workers: int
) -> None:
    """Each worker has at most one row that it continues and one that it leaves to others: its
    two slots, and its counters, are enough."""
    number = torch.tensor(lengths)
    tiles = tile_counts(number, rows).tolist()
    ranges = partition(number, rows, workers, COSTS)
    found = pieces(ranges, tiles, rows.heads)
    owners: dict[int, list[int]] = {}
    for piece in found:
        owners.setdefault(piece.row, []).append(piece.worker)
    slots = set()
    for piece in found:
        own = owners[piece.row]
        if len(own) == 1:
            assert (piece.begin, piece.end) == (0, tiles[piece.row // rows.heads])
            continue
        own_range = WorkRange(*ranges[piece.worker, :7].tolist())
        if piece.begin > 0:
            assert (own_range.row, own_range.first_worker, own_range.last_worker) == (
                piece.row,
                own[0],
                own[-1],
            )
        else:
            assert (own_range.end_row, own_range.end_last_worker) == (piece.row, own[-1])
            assert piece.worker == own[0]
        assert own == list(range(own[0], own[-1] + 1))
        slot = (piece.worker, piece.begin == 0)
        assert slot not in slots
        slots.add(slot)


def test_one_long_sequence_among_short_ones_is_spread_over_most_workers() -> None:
    lengths = torch.tensor([131_072] + [1_024] * 63)
    rows = RowShape(heads=8, tile=64, queries=1, window=0)
    found = pieces(partition(lengths, rows, 396, COSTS), tile_counts(lengths, rows).tolist(), 8)
    assert len({piece.worker for piece in found if piece.row < 8}) > 250
    assert len({piece.worker for piece in found}) == 396


def test_a_merge_that_costs_more_than_it_saves_is_not_begun() -> None:
    lengths = torch.tensor([64 * 400])
    rows = RowShape(heads=1, tile=64, queries=1, window=0)

    def used(partial: int) -> int:
        ranges = partition(lengths, rows, 400, TileCosts(16, partial))
        return len({piece.worker for piece in pieces(ranges, [400], 1)})

    assert used(0) >= 399  # the first cut may fall within the row's start-up
    assert used(16) <= 21  # 400 / sqrt(400), and the row's own cost
    assert used(16 * 400) == 1


def test_what_lies_before_the_window_is_nobodys() -> None:
    rows = RowShape(heads=1, tile=64, queries=2, window=100)
    # The first of two queries sees 9,899 to 9,998 of 10,000 tokens: tiles 154 to 156.
    assert tile_counts(torch.tensor([10_000, 0, 60]), rows).tolist() == [3, 0, 1]


def test_a_moved_cut_is_noticed() -> None:
    """Negative control of the tests above."""
    lengths, rows = torch.tensor([640, 640]), RowShape(1, 64, 1, 0)
    ranges = partition(lengths, rows, 4, COSTS)
    assert not misplaced(pieces(ranges, [10, 10], 1), [10, 10], 1)
    ranges[1, 1] += 1
    assert misplaced(pieces(ranges, [10, 10], 1), [10, 10], 1) == [0]


@given(BATCHES, ROWS, st.integers(1, 300), st.sampled_from([torch.int32, torch.int64]))
@settings(max_examples=40, deadline=None)
def test_the_kernel_plans_as_the_definition_does(
    lengths: list[int], rows: RowShape, workers: int, dtype: torch.dtype
) -> None:
    number = torch.tensor(lengths, dtype=dtype)
    plan = DecodePlan.of(rows, COSTS, 12, workers, 16, 8, number.device)
    launch_plan(plan, number)
    assert torch.equal(plan.ranges, partition(number, rows, workers, COSTS))


def test_a_plan_is_filled_again_in_place() -> None:
    rows = RowShape(2, 64, 1, 0)
    plan = DecodePlan.of(rows, COSTS, 4, 6, 16, 8, torch.device("cpu"))
    for lengths in ([100, 5_000], [3, 0, 900, 77]):
        number = torch.tensor(lengths)
        assert plan.fill(number) is plan
        assert torch.equal(plan.ranges, partition(number, rows, 6, COSTS))


@pytest.mark.parametrize("count", [0, 5])
def test_a_plan_says_for_how_many_sequences_it_has_room(count: int) -> None:
    plan = DecodePlan.of(RowShape(2, 64, 1, 0), COSTS, 4, 6, 16, 8, torch.device("cpu"))
    with pytest.raises(ValueError, match=f"{count} lengths: the plan has room for 1 to 4"):
        plan.fill(torch.ones(count, dtype=torch.int32))
