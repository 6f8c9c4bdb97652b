# SPDX-License-Identifier: Apache-2.0
"""A reader of the board sees what the engine wrote last, or nothing."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler_plugins.admission.board import EVERY_S, STALE_S, Board, BoardError, BoardWriter
from scheduler_plugins.admission.load import ClassLoad, Decoding, LoadReport
from scheduler_plugins.admission.post import TTFT_BUCKETS_S, ClassRecord, Histogram
from scheduler_plugins.cost.model import CostModel

REPORT = LoadReport(
    CostModel(a=1e-4, b=1e-9),
    0.25,
    {"default": ClassLoad(2, 300, (0.0, 1.5), (0.0, 0.1), -0.5)},
    (Decoding(1.0, 400),),
    decode_tokens=16.0,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "boards"


@pytest.fixture
def writer(folder: Path) -> Iterator[BoardWriter]:
    writer = BoardWriter("17", folder=folder)
    yield writer
    writer.close()


def post(
    writer: BoardWriter, *, age_s: float = 0.0, idle: bool = False, step_s: float = 0.0
) -> None:
    writer.write(REPORT, time.monotonic() - age_s, idle=idle, step_s=step_s)


def test_posts_in_a_folder_that_others_can_write_to_are_not_believed(
    folder: Path, writer: BoardWriter
) -> None:
    """Another user who made the folder first could have every request turned away."""
    post(writer)
    folder.chmod(0o777)
    board = Board("17", folder=folder)
    assert board.read() is None
    folder.chmod(0o700)
    assert board.read() == REPORT


def test_what_was_written_is_read(folder: Path, writer: BoardWriter) -> None:
    board = Board("17", folder=folder)
    assert board.read() is None
    post(writer)
    assert board.read() == REPORT


def test_a_later_post_replaces_the_earlier_one(folder: Path, writer: BoardWriter) -> None:
    board = Board("17", folder=folder)
    post(writer)
    board.read()
    record = ClassRecord()
    record.ttft.observe(0.3)
    writer.write(REPORT, time.monotonic(), idle=True, classes={"default": record})
    posted = board.posted()
    assert posted is not None
    assert posted.idle
    assert posted.classes["default"].ttft.sum_s == 0.3


def test_a_late_post_of_a_busy_engine_is_void(folder: Path, writer: BoardWriter) -> None:
    post(writer, age_s=STALE_S + 0.1)
    assert Board("17", folder=folder).read() is None


def test_an_idle_engine_may_be_silent(folder: Path, writer: BoardWriter) -> None:
    post(writer, age_s=STALE_S + 60, idle=True)
    assert Board("17", folder=folder).read() == REPORT


def test_a_post_holds_for_as_long_as_the_step_that_was_announced(
    folder: Path, writer: BoardWriter
) -> None:
    post(writer, age_s=STALE_S + 1, step_s=5.0)
    assert Board("17", folder=folder).read() == REPORT
    post(writer, age_s=STALE_S + 6, step_s=5.0)
    assert Board("17", folder=folder).read() is None


def _write_and_die(folder: Path) -> None:
    writer = BoardWriter("17", folder=folder)
    post(writer, idle=True)
    os._exit(0)


def test_a_dead_writer_counts_for_nothing_and_the_next_one_clears_it_away(folder: Path) -> None:
    child = multiprocessing.get_context("fork").Process(target=_write_and_die, args=(folder,))
    child.start()
    child.join()
    (left,) = folder.iterdir()
    assert Board("17", folder=folder).read() is None
    BoardWriter("18", folder=folder)
    assert not left.exists()


def test_a_reader_that_ends_takes_a_dead_writers_post_down_and_no_other(
    folder: Path, writer: BoardWriter
) -> None:
    board = Board("17", folder=folder)
    post(writer)
    board.read()
    board.close()
    assert writer.path.exists()
    writer.close()
    child = multiprocessing.get_context("fork").Process(target=_write_and_die, args=(folder,))
    child.start()
    child.join()
    assert len(list(folder.iterdir())) == 1
    board = Board("17", folder=folder)
    assert board.read() is None
    board.close()
    assert list(folder.iterdir()) == []


def test_a_living_writer_is_not_cleared_away(folder: Path, writer: BoardWriter) -> None:
    post(writer)
    BoardWriter("18", folder=folder)
    assert writer.path.exists()


def test_closing_takes_the_post_down(folder: Path, writer: BoardWriter) -> None:
    board = Board("17", folder=folder)
    post(writer)
    board.read()
    writer.close()
    assert list(folder.iterdir()) == []
    assert board.read() is None


def test_an_api_server_with_an_instance_id_of_its_own_finds_its_sibling(
    folder: Path, writer: BoardWriter
) -> None:
    post(writer)
    assert Board("another", folder=folder).read() == REPORT
    elsewhere = writer.path.with_name("17.1-1.dp0")
    writer.path.rename(elsewhere)
    assert Board("another", folder=folder).read() is None
    elsewhere.unlink()


def test_ranks_have_boards_of_their_own(folder: Path, writer: BoardWriter) -> None:
    post(writer)
    assert Board("17", 1, folder=folder).read() is None
    second = BoardWriter("17_dp1", 1, folder=folder)
    post(second)
    assert Board("17", 1, folder=folder).read() == REPORT


@pytest.mark.parametrize("kept", [0, 4, 20, -3])
def test_a_broken_file_is_no_report(folder: Path, writer: BoardWriter, kept: int) -> None:
    post(writer)
    writer.path.write_bytes(writer.path.read_bytes()[:kept])
    assert Board("17", folder=folder).read() is None


def test_a_post_half_of_which_is_an_earlier_one_is_no_report(
    folder: Path, writer: BoardWriter
) -> None:
    post(writer, step_s=1.0)
    earlier = writer.path.read_bytes()
    post(writer, step_s=2.0)
    later = writer.path.read_bytes()
    assert len(earlier) == len(later)
    assert earlier[8:] != later[8:]
    writer.path.write_bytes(later[:8] + earlier[8:])  # the seal of one, the post of the other
    assert Board("17", folder=folder).read() is None


def test_a_post_may_be_shorter_than_the_one_before(folder: Path, writer: BoardWriter) -> None:
    writer.write(REPORT, time.monotonic(), idle=True, classes={"free": ClassRecord()})
    post(writer)
    assert Board("17", folder=folder).read() == REPORT


def test_an_instance_id_cannot_lead_out_of_the_folder(folder: Path) -> None:
    assert BoardWriter("../17", folder=folder).path.parent == folder


def test_a_folder_that_others_may_enter_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    BoardWriter("17", folder=folder)
    folder.chmod(0o750)
    with pytest.raises(BoardError, match="mode 0700"):
        BoardWriter("17", folder=folder)


def test_a_link_in_place_of_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir(mode=0o700)
    folder.symlink_to(target)
    with pytest.raises(BoardError):
        BoardWriter("17", folder=folder)


def test_a_busy_engine_posts_now_and_then_and_an_idle_one_once(writer: BoardWriter) -> None:
    assert writer.due(1.0, idle=False)
    writer.write(REPORT, 1.0, idle=False)
    assert not writer.due(1.0 + EVERY_S / 2, idle=False)
    assert writer.due(1.0 + EVERY_S, idle=False)
    assert writer.due(1.0, idle=True)
    writer.write(REPORT, 1.0, idle=True)
    assert not writer.due(9.0, idle=True)
    assert writer.due(1.0, idle=False), "work begins: a short burst must be seen"


def test_a_histogram_counts_each_duration_once() -> None:
    histogram = Histogram()
    for duration_s in (0.001, TTFT_BUCKETS_S[0], 0.3, 1e6):
        histogram.observe(duration_s)
    assert sum(histogram.counts) == 4
    assert histogram.counts[0] == 2
    assert histogram.counts[-1] == 1
