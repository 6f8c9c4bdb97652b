# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to whom, no process of a family is left."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.leftovers import survivors

from pd_connector.tools.launch import proc
from pd_connector.tools.launch.family import Census, Family, stop_all

DEADLINE_S = 30.0

# Each writes its pid to a file of its name, so that a test knows when it is there.
CHILD = """
import os, signal, subprocess, sys, time
folder, depth, flags = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if "stubborn" in flags:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "renamed" in flags:
    import setproctitle
    setproctitle.setproctitle("VLLM::" + "Renamed" * 20)
if "regrouped" in flags and depth < 2:
    os.setpgid(0, 0)
if depth:
    subprocess.Popen([sys.executable, __file__, folder, str(depth - 1), flags])
with open(f"{folder}/{depth}.new", "w") as file:
    file.write(str(os.getpid()))
os.rename(f"{folder}/{depth}.new", f"{folder}/{depth}")
if "brief" in flags and depth:
    while not os.path.exists(f"{folder}/0"):
        time.sleep(0.01)
    sys.exit(0)
while True:
    time.sleep(0.05)
"""


def until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def alive(pid: int) -> bool:
    process = proc.read(pid)
    return process is not None and process.alive


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "child.py"
    path.write_text(CHILD)
    return path


@pytest.fixture
def start(script: Path, tmp_path: Path):
    """Start a chain of processes; returns the family and the pids from the root on."""
    families = []

    def start(depth: int = 2, flags: str = "-") -> tuple[Family, list[int]]:
        folder = tmp_path / f"pids{len(families)}"
        folder.mkdir()
        family = Family(
            [sys.executable, str(script), str(folder), str(depth), flags], log=tmp_path / "log"
        )
        families.append(family)
        generations = range(depth, -1, -1)
        until(
            lambda: all((folder / str(n)).exists() for n in generations),
            f"a chain of {depth + 1}: {(tmp_path / 'log').read_text()}",
        )
        return family, [int((folder / str(n)).read_text()) for n in generations]

    yield start
    for family in families:
        family.kill()


def test_stop_ends_children_and_grandchildren(start):
    family, pids = start()
    assert {p.pid for p in family.members()} == set(pids)
    family.stop()
    assert not any(map(alive, pids))
    assert family.members() == []


def test_stop_is_bounded_when_nobody_listens_to_sigterm(start):
    family, pids = start(flags="stubborn")
    family.stop(polite_s=0.2)
    assert not any(map(alive, pids))
    assert family.returncode == -signal.SIGKILL


def test_a_server_that_ends_by_itself_on_sigterm_is_given_the_time(tmp_path):
    code = "import signal,sys,time\nsignal.signal(15, lambda *a: (time.sleep(0.3), sys.exit(7)))"
    family = Family(
        [sys.executable, "-c", f"{code}\nprint('up', flush=True)\ntime.sleep(60)"],
        log=tmp_path / "log",
    )
    until(lambda: "up" in (tmp_path / "log").read_text(), "the server")
    family.stop()
    assert family.returncode == 7


def test_orphans_of_a_killed_parent_are_found_and_ended(start):
    family, (root, child, grandchild) = start()
    os.kill(root, signal.SIGKILL)
    os.kill(child, signal.SIGKILL)
    until(lambda: family.returncode is not None and not alive(child), "two deaths")
    assert survivors(family) == [grandchild]
    family.stop()
    assert not alive(grandchild)


def test_orphans_are_found_though_they_were_never_seen_with_their_parents(start):
    family, pids = start(flags="brief")
    until(lambda: family.returncode is not None, "the parents' end")
    until(lambda: survivors(family) == pids[2:], "one orphan, the grandchild")
    family.kill()
    assert not any(map(alive, pids))


def test_orphans_in_a_group_of_their_own_are_found(start):
    family, pids = start(flags="brief regrouped")
    until(lambda: family.returncode is not None, "the parents' end")
    until(lambda: survivors(family) == pids[2:], "one orphan, the grandchild")
    family.stop()
    assert not any(map(alive, pids))


def test_processes_that_rename_themselves_are_still_recognised(start):
    """setproctitle overwrites the environment that /proc shows, unless it is told not to."""
    pytest.importorskip("setproctitle")
    family, pids = start(flags="brief renamed regrouped")
    until(lambda: survivors(family) == pids[2:], "one orphan, the grandchild")
    family.stop()
    assert not any(map(alive, pids))


def test_without_the_marker_an_orphan_in_a_group_of_its_own_is_lost(start, monkeypatch):
    """The negative control: what the marker is for."""
    family, pids = start(flags="brief regrouped")
    until(lambda: family.returncode is not None, "the parents' end")
    until(lambda: not alive(pids[1]), "the child's end")
    with monkeypatch.context() as patch:
        patch.setattr(proc, "families", lambda pid: [])
        family._seen.clear()
        assert survivors(family) == []
    assert survivors(family) == pids[2:]


def test_kill_leaves_nobody(start):
    family, pids = start(depth=3, flags="stubborn")
    family.kill()
    assert not any(map(alive, pids))


def test_shared_memory_of_killed_processes_is_removed(tmp_path):
    """A crash leaves it to Python's resource tracker, which a kill must therefore let finish."""
    code = """
import time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
print(memory.name, flush=True)
time.sleep(60)
"""
    family = Family([sys.executable, "-c", code], log=tmp_path / "log")
    until(lambda: (tmp_path / "log").read_text().endswith("\n"), "its shared memory")
    memory = Path("/dev/shm") / (tmp_path / "log").read_text().strip()
    assert memory.exists()
    family.kill()
    assert not memory.exists()


def test_a_paused_family_stands_still_and_can_be_resumed(start):
    family, pids = start()
    family.pause()
    until(lambda: {proc.read(pid).state for pid in pids} == {"T"}, "all stopped")
    family.resume()
    until(lambda: all(proc.read(pid).state in "RS" for pid in pids), "all running")


def test_a_paused_family_can_be_stopped(start):
    family, pids = start()
    family.pause()
    until(lambda: {proc.read(pid).state for pid in pids} == {"T"}, "all stopped")
    family.stop()
    assert not any(map(alive, pids))
    assert family.returncode == -signal.SIGTERM


def test_two_families_do_not_touch_each_other(start):
    first, pids = start()
    second, others = start()
    first.stop()
    assert not any(map(alive, pids))
    assert all(map(alive, others))
    assert {p.pid for p in second.members()} == set(others)


def test_several_stubborn_families_end_in_the_time_of_one(start):
    families = [start(flags="stubborn") for _ in range(3)]
    stop_all([family for family, _ in families], polite_s=0.2)
    assert not any(alive(pid) for _, pids in families for pid in pids)


def test_an_interrupted_stop_still_kills(start, monkeypatch):
    """A second Ctrl-C while waiting politely must not leave anybody behind."""
    family, pids = start(flags="stubborn")

    def interrupted(timeout_s: float) -> bool:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(family, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        family.stop(polite_s=0.1)
    assert not any(map(alive, pids))


def test_a_family_stays_in_our_session_and_has_its_own_group(start):
    _, pids = start()
    for pid in pids:
        assert os.getsid(pid) == os.getsid(0)
        assert os.getpgid(pid) == pids[0]


def test_a_census_counts_the_whole_family(start):
    family, _ = start()
    census = Census.of(family)
    assert census.processes == census.threads == 3
    assert census.files >= 3 * 3
    family.kill()
    assert Census.of(family) == (0, 0, 0)


LAUNCHER = """
import os, subprocess, sys, time
from pd_connector.tools.launch.family import Family
script, folder, flags = sys.argv[1:]
family = Family([sys.executable, script, folder, "2", flags])
print("up", flush=True)
try:
    time.sleep(60)
finally:
    if "tidy" in flags:
        family.stop()
        print("stopped", flush=True)
"""


@pytest.fixture
def launcher(script: Path, tmp_path: Path):
    """Start a process that launches a chain; returns it and the pids of the chain."""
    started = []

    def launch(flags: str = "-") -> tuple[subprocess.Popen[str], list[int]]:
        folder = tmp_path / "pids"
        folder.mkdir()
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(LAUNCHER), str(script), str(folder), flags],
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        started.append(process)
        assert process.stdout.readline() == "up\n", "from now on it ends its family"
        until(lambda: all((folder / str(n)).exists() for n in range(3)), "the chain")
        return process, [int((folder / str(n)).read_text()) for n in range(3)]

    yield launch
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_nobody_outlives_the_launcher_however_it_dies(launcher, number):
    process, pids = launcher()
    process.send_signal(number)
    process.wait(DEADLINE_S)
    until(lambda: not any(map(alive, pids)), f"the end of {pids}")


def test_nobody_outlives_a_launcher_whose_whole_group_is_killed(launcher):
    process, pids = launcher()
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(DEADLINE_S)
    until(lambda: not any(map(alive, pids)), f"the end of {pids}")


def test_nobody_outlives_the_launcher_though_everybody_ignores_sigterm(launcher):
    process, pids = launcher("stubborn")
    process.kill()
    process.wait(DEADLINE_S)
    until(lambda: not any(map(alive, pids)), f"the end of {pids}")


def test_ctrl_c_reaches_the_launcher_alone_which_ends_its_family(launcher):
    process, pids = launcher("tidy")
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert "stopped" in said
    assert not any(map(alive, pids))


def test_a_reaper_ends_with_its_launcher(launcher):
    process, pids = launcher("tidy")
    reapers = {p.pid for p in proc.table().values() if p.parent == process.pid} - {pids[2]}
    assert len(reapers) == 1
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=DEADLINE_S)
    until(lambda: not any(map(alive, reapers)), "the reaper's end")
