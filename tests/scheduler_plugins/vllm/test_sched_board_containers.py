# SPDX-License-Identifier: Apache-2.0
"""Containers with --ipc=host share /dev/shm and no process numbers: posts of the living stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scheduler_plugins.admission import board as boards
from scheduler_plugins.admission import liveness
from scheduler_plugins.admission.board import Board, BoardWriter
from scheduler_plugins.admission.load import LoadReport
from scheduler_plugins.admission.post import read_post
from scheduler_plugins.cost.model import CostModel

REPORT = LoadReport(CostModel(a=1e-4), 0.25, {})
CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
ENGINE = """
import sys, time
from pathlib import Path
from scheduler_plugins.admission.board import BoardWriter
from scheduler_plugins.admission.load import LoadReport
from scheduler_plugins.cost.model import CostModel

writer = BoardWriter(sys.argv[1], folder=Path(sys.argv[2]))
writer.write(LoadReport(CostModel(a=1e-4), 0.25, {}), time.monotonic(), idle=True)
print(writer.path, flush=True)
sys.stdin.read()
"""


def containers_work() -> bool:
    try:
        return subprocess.run([*CONTAINER, "true"], check=False, timeout=20).returncode == 0
    except OSError:
        return False


needs_containers = pytest.mark.skipif(
    not containers_work(), reason="needs PID namespaces: root, and unshare of util-linux"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "boards"


@contextmanager
def engine_in_a_container(name: str, folder: Path) -> Iterator[Path]:
    """An engine core that has posted. Ends by SIGKILL, as a container does."""
    command = [*CONTAINER, sys.executable, "-c", ENGINE, name, str(folder)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        yield Path(child.stdout.readline().strip())
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()


def post(writer: BoardWriter) -> None:
    writer.write(REPORT, time.monotonic(), idle=True)


@needs_containers
def test_engines_in_two_containers_leave_each_others_posts_alone(folder: Path) -> None:
    mine = BoardWriter("mine", folder=folder)
    post(mine)
    with (
        engine_in_a_container("first", folder) as first,
        engine_in_a_container("second", folder) as second,
    ):
        BoardWriter("another", folder=folder)
        found = {path.name for path in folder.iterdir()}
        assert found == {mine.path.name, first.name, second.name}
        assert Board("mine", folder=folder).read() == REPORT
        Board("first", folder=folder).close()
        assert first.exists()
    mine.close()


@needs_containers
def test_what_a_container_left_is_cleared_away_when_it_is_gone(folder: Path) -> None:
    with engine_in_a_container("first", folder) as first:
        assert liveness.is_held(first)
    deadline = time.monotonic() + 10
    while liveness.is_held(first) and time.monotonic() < deadline:
        time.sleep(0.01)
    BoardWriter("another", folder=folder)
    assert not first.exists()


@needs_containers
def test_a_parent_of_the_same_number_elsewhere_is_no_relation(folder: Path) -> None:
    """In containers nearly every engine core's parent has a small number, often 1."""
    with engine_in_a_container("first", folder) as first:
        number = first.name.split(".")[1].split("-")[1]
        assert first.name.split(".")[1] != f"{liveness.pid_namespace()}-{number}"


def test_without_the_namespace_a_living_engine_would_lose_its_post(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What happened before: a process number from elsewhere is not found here."""
    writer = BoardWriter("elsewhere", folder=folder)
    writer._pid = 2**22 + 1  # no process has it
    post(writer)
    real = liveness.pid_namespace()
    monkeypatch.setattr(boards, "pid_namespace", lambda: real + 1)
    post(writer)
    BoardWriter("another", folder=folder)
    assert writer.path.exists(), "it runs elsewhere, and holds its file"
    monkeypatch.setattr(boards, "pid_namespace", lambda: 0)
    post(writer)
    BoardWriter("another", folder=folder)
    assert not writer.path.exists(), "the harm"


def test_a_process_number_that_is_used_again_is_another_process(folder: Path) -> None:
    writer = BoardWriter("old", folder=folder)
    post(writer)
    assert Board("old", folder=folder).read() == REPORT
    writer._started -= 1  # as if this process had taken over the number of an older one
    post(writer)
    assert Board("old", folder=folder).read() is None
    BoardWriter("new", folder=folder)
    assert not writer.path.exists()


def test_the_start_of_a_process_is_known_by_its_number() -> None:
    assert liveness.start_ticks(os.getpid()) > 0
    assert liveness.start_ticks(2**22 + 1) == 0
    assert liveness.lives(os.getpid(), liveness.pid_namespace(), liveness.start_ticks(os.getpid()))
    assert liveness.lives(os.getpid(), liveness.pid_namespace() + 1, 0) is None


def test_a_post_says_where_it_was_written(folder: Path) -> None:
    writer = BoardWriter("mine", folder=folder)
    post(writer)
    posted = read_post(writer.path)
    assert posted is not None
    assert (posted.pid, posted.namespace) == (os.getpid(), liveness.pid_namespace())
    writer.close()
