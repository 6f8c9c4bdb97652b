# SPDX-License-Identifier: Apache-2.0
"""The file of earlier days counts only minutes in which the router ran from their beginning to their end."""

from __future__ import annotations

import logging
import time
from math import inf
from pathlib import Path

import pytest

from scheduler_plugins.router.elastic.days import WRITE_S, DaysFile
from scheduler_plugins.router.roles.days import MINUTES, Days
from scheduler_plugins.router.roles.history import History

GROUP = "g"


class Running:
    """A router that notes its requests in the file. Its clock is the test's: seconds since a midnight, local time."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, now_s: float = 0.0) -> None:
        self.now_s = now_s
        monkeypatch.setattr(time, "time", lambda: self.now_s)
        monkeypatch.setattr(time, "localtime", time.gmtime)
        self.history, self.file = History(), DaysFile(path)

    def until(self, end_s: float, per_s: int = 0) -> None:
        """Run until `end_s`, with `per_s` requests each second."""
        while self.now_s < end_s:
            for _ in range(per_s):
                self.history.arrived(self.now_s, GROUP, 1, inf, inf)
            self.file.note(self.history, [GROUP], self.now_s)
            self.now_s += 1


def counted(file: DaysFile) -> dict[int, float]:
    """Requests of each minute that counts."""
    kept = file._days._groups.get(GROUP)
    return {m: kept.sums[m] for m in range(MINUTES) if kept.days[m]} if kept else {}


def test_only_minutes_that_were_seen_whole_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = Running(tmp_path / "days.json", monkeypatch, 30.0)
    router.until(181.0, per_s=2)
    assert counted(router.file) == {1: 120.0, 2: 120.0}, "minute 0 had begun before the router"


@pytest.mark.parametrize("jump_s", [100.0, -100.0])
def test_a_minute_that_the_router_was_stopped_in_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    """The machine slept, or its clock was set."""
    router = Running(tmp_path / "days.json", monkeypatch, 1000 * 60.0)
    router.until(1003 * 60 + 20.0, per_s=1)
    before = counted(router.file)
    router.now_s += jump_s
    began = int(router.now_s // 60)
    router.until((began + 2) * 60 + 1.0, per_s=1)
    new = {m: n for m, n in counted(router.file).items() if before.get(m) != n}
    assert began not in new, "it was seen from its middle on"
    assert began + 1 in new


def test_the_file_is_written_now_and_then_and_a_failure_only_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    path = tmp_path / "folder" / "days.json"
    path.parent.mkdir()
    router = Running(path, monkeypatch)
    router.until(WRITE_S + 61, per_s=1)
    assert counted(DaysFile(path)), "it was written"
    path.unlink()
    path.parent.rmdir()
    router.file.save()
    assert f"days {path}: cannot be written" in caplog.text
    path.parent.mkdir()
    router.file.save()
    assert path.exists(), "the next one is tried again"


def test_a_minute_is_usual_from_the_second_day_on_and_that_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path, days = tmp_path / "days.json", Days()
    for _ in range(2):
        for minute in range(60):
            days.add(GROUP, minute, 180.0)
    days.save(path)
    router = Running(path, monkeypatch, 600.0)
    assert router.file.usual_per_s(GROUP, 60.0) == {GROUP: 3.0}
    assert router.file.usual_per_s(GROUP, 60.0) == {GROUP: 3.0}
    assert router.file.usual_per_s(GROUP, 3600.0) == {}
    assert router.file.usual_per_s("other", 60.0) == {}
    said = [record.getMessage() for record in caplog.records]
    assert sum("now count" in line for line in said) == 1
    assert (
        sum(f"group {GROUP}: earlier days at this minute do not count yet" in line for line in said)
        == 1
    )
