# SPDX-License-Identifier: Apache-2.0
"""Processes that save and load are killed and stopped at random instants, and files are cut, swapped and deleted.

Nothing wrong is loaded, nothing is left behind, and what was published outlives every process. The suite injects few faults,
the same each time; PD_POOL_FAULTS=1000 in the environment sets their number.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from chunks import content
from store_worker import nbytes_of
from support.waits import until
from whole import problems, sweep

from pd_connector.pool.store.local import LocalStore, Space

pytestmark = pytest.mark.usefixtures("impatient")
FAULTS = int(os.environ.get("PD_POOL_FAULTS", "8"))
WORKERS = 3
SMALL, LARGE = 2 << 20, 64 << 20
FILES = ("cut", "flip", "swap", "delete", "books cut", "books flip", "books delete", "entry")


class Worker:
    """A process of `store_worker.py`, and what it has said."""

    def __init__(self, arguments: list[str]) -> None:
        script = str(Path(__file__).with_name("store_worker.py"))
        self.process = subprocess.Popen(
            [sys.executable, script, *arguments], stdout=subprocess.PIPE, text=True
        )
        self.said: list[str] = []
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        self.said.extend(iter(self.process.stdout.readline, ""))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._listener.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def told(self, word: str) -> set[bytes]:
        """Keys that the process named so. The last line may be half."""
        lines = [line.split() for line in self.said if line.endswith("\n")]
        return {bytes.fromhex(line[1]) for line in lines if line[0] == word}


def harm(what: str, root: Path, dice: random.Random) -> None:
    """Do something to a file of the pool that nobody may do."""
    folder = root / "v1"
    place = {"books": "", "entry": "index"}.get(what.split()[0], "data")
    names = sorted(
        path
        for path in (folder / place).iterdir()
        if what.split()[0] != "books" or path.name.startswith("books.")
    )
    if len(names) < 2:
        return
    one, other = dice.sample(names, 2)
    try:
        if what.endswith("cut"):
            os.truncate(one, dice.randrange(one.stat().st_size + 1))
        elif what.endswith("flip"):
            with one.open("r+b") as file:
                file.seek(dice.randrange(one.stat().st_size or 1))
                file.write(bytes([dice.randrange(256)]))
        elif what == "swap":
            one.rename(folder / "data" / "swapped")
            other.rename(one)
            (folder / "data" / "swapped").rename(other)
        elif what == "entry":
            one.unlink()
            one.symlink_to("1|nonsense")
        else:
            one.unlink()
    except OSError:
        pass  # it is gone already


class Workers:
    """Processes that save and load, some of them at a time."""

    def __init__(self, memory: Space, disk: Space) -> None:
        self._arguments = [str(memory.path), str(disk.path), str(memory.budget), str(disk.budget)]
        self.all: list[Worker] = []
        self.running = [self._started() for _ in range(WORKERS)]

    def _started(self) -> Worker:
        self.all.append(Worker([*self._arguments, str(len(self.all))]))
        return self.all[-1]

    def kill_one(self, dice: random.Random) -> None:
        """Kill one, and start another."""
        place = dice.randrange(WORKERS)
        self.running[place].process.kill()
        self.running[place] = self._started()

    def stop_one(self, dice: random.Random) -> None:
        """Stop one for a while."""
        process = dice.choice(self.running).process
        process.send_signal(signal.SIGSTOP)
        time.sleep(dice.random() * 0.2)
        process.send_signal(signal.SIGCONT)

    def told(self, word: str) -> set[bytes]:
        """Keys that any of them named so."""
        return set().union(*(one.told(word) for one in self.all))

    def end(self) -> None:
        for one in self.all:
            one.end()


@pytest.mark.parametrize("room", ["room for all", "little room"])
def test_processes_killed_and_stopped_at_random(room: str, folder: Path, tmp_path: Path) -> None:
    dice = random.Random(f"{room} {FAULTS}")
    nbytes = (SMALL, 2 * SMALL) if room == "little room" else (LARGE, LARGE)
    memory, disk = Space(folder / "pool", nbytes[0]), Space(tmp_path / "disk", nbytes[1])
    workers = Workers(memory, disk)
    try:
        while sum("ready\n" in one.said for one in workers.all) < WORKERS:
            time.sleep(0.05)
        for _ in range(FAULTS // 2):
            time.sleep(dice.random() * 0.3)
            dice.choice([workers.kill_one, workers.stop_one])(dice)
        while len(workers.told("saved")) <= 10:
            time.sleep(0.05)
    finally:
        workers.end()
    store = LocalStore(memory, disk)
    sweep(store)
    assert not workers.told("wrong")
    assert problems(store) == []
    saved = workers.told("saved")
    for key in saved:
        (found,) = store.find([key])
        if not found and room == "room for all":
            until(
                partial(store.was_stored, key),
                f"{key.hex()} is there, or in the catalog as removed",
            )
        if found:
            with store.read(key, "r0") as reading:
                assert reading.take(0, reading.nbytes) == content(key, "r0", nbytes_of(key))
    store.close()


def test_files_cut_swapped_and_deleted_while_processes_use_them(
    folder: Path, tmp_path: Path
) -> None:
    """A store takes bytes as they are: that they are altered, the record's sums tell. Everything else it must survive."""
    dice = random.Random(FAULTS)
    memory, disk = Space(folder / "pool", 4 * SMALL), Space(tmp_path / "disk", LARGE)
    workers = Workers(memory, disk)
    try:
        while sum("ready\n" in one.said for one in workers.all) < WORKERS:
            time.sleep(0.05)
        for number in range(FAULTS // 2):
            time.sleep(dice.random() * 0.2)
            harm(dice.choice(FILES), dice.choice([memory.path, disk.path]), dice)
            if number % 5 == 0:
                workers.kill_one(dice)
        time.sleep(1)
        assert all(one.process.poll() is None for one in workers.running), (
            "a process ended by itself"
        )
    finally:
        workers.end()
    store = LocalStore(memory, disk)
    sweep(store)
    for folder_of in store._tier_storage.folders:  # what nobody has looked at
        for key in folder_of.entered():
            entry, text = folder_of.entry(key), folder_of.text(key)
            if entry is None or not folder_of.is_whole(key, entry):
                store._tier_storage.forget(folder_of, key, text)
    assert problems(store) == []
    store.close()
