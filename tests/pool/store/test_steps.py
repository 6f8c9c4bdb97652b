# SPDX-License-Identifier: Apache-2.0
"""A process that is killed or stopped at any line of the store's code costs saves, never look-ups, and needs no repair.

The suite tries one line of each action, the same each time; PD_POOL_FAULTS in the environment sets the number of faults.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chunks import content, loads, save, there
from store_steps import ALIEN, NBYTES, NEW, OLD, ROOM, opened
from whole import problems, sweep

from pd_connector.errors import Miss, PoolError
from pd_connector.pool.store.local import LocalStore

pytestmark = pytest.mark.usefixtures("impatient")
ACTIONS = ("save", "save parts", "load", "remove", "copy", "cancel", "sweep", "rebuild the catalog")
LINES = max(1, int(os.environ.get("PD_POOL_FAULTS", "0")) // (2 * len(ACTIONS)))
"""At which children are hit, of each action."""
MOST_LINES = 450
"""Lines that an action takes, about."""


class Children:
    """The process that forks, see `store_steps.py`."""

    def __init__(self, folder: Path) -> None:
        self.stopped = 0
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("store_steps.py")), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, action: str, name: str, line: int) -> list[str]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{action}|{name}|{line}\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> list[str]:
        assert self.process.stdout is not None
        answer = self.process.stdout.readline().split()
        self.stopped = int(answer[1]) if answer[0] == "stopped" else 0
        return answer

    def close(self) -> None:
        """At once: on a busy machine a process may take long to end by itself."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def prepare(folder: Path) -> Iterator[Callable[[], LocalStore]]:
    """Opens a store whose memory is full of the chain `OLD`, and nothing else."""
    stores: list[LocalStore] = []

    def prepares() -> LocalStore:
        while stores:
            stores.pop().close()
        for tier in ("pool", "disk"):
            shutil.rmtree(folder / tier, ignore_errors=True)
        stores.append(opened(folder))
        assert save(stores[0], OLD) == ROOM
        return stores[0]

    yield prepares
    while stores:
        stores.pop().close()


@pytest.fixture
def children(folder: Path) -> Iterator[Children]:
    started = Children(folder)
    yield started
    if started.stopped:
        os.kill(started.stopped, signal.SIGKILL)
    started.close()


def lines(action: str, name: str) -> list[int]:
    """Lines at which children are hit."""
    return sorted(random.Random(action + name).sample(range(1, MOST_LINES), LINES))


def check_look_ups(store: LocalStore) -> None:
    """Whatever is found is right, or gone: the store's thread removes meanwhile what the child was removing."""
    for keys in (OLD, NEW):
        for key, found in zip(keys, store.find(keys), strict=True):
            for part in found.parts if found else ():
                try:
                    reading = store.read(key, part)
                except PoolError as error:
                    if error.cause is Miss.EVICTED:
                        continue
                    raise
                with reading:
                    assert reading.take(0, NBYTES) == content(key, part, NBYTES)


@pytest.mark.parametrize("action", ACTIONS)
def test_killed_at_any_line(
    action: str, prepare: Callable[[], LocalStore], folder: Path, children: Children
) -> None:
    for line in lines(action, "SIGKILL"):
        store = prepare()
        ended = children.start(action, "SIGKILL", line)
        assert ended in (["ended", "killed"], ["ended", "0"]), ended
        check_look_ups(store)
        sweep(store)
        assert problems(store) == [], f"{action} killed at line {line}"
        assert save(store, ALIEN) == 2
        assert all(loads(store, key) for key in ALIEN)


@pytest.mark.parametrize("action", ACTIONS)
def test_stopped_at_any_line(
    action: str, prepare: Callable[[], LocalStore], folder: Path, children: Children
) -> None:
    for line in lines(action, "SIGSTOP"):
        store = prepare()
        answer = children.start(action, "SIGSTOP", line)
        if answer[0] == "stopped":
            check_look_ups(store)
            save(store, ALIEN, patience_s=0)
            check_look_ups(store)
            os.kill(int(answer[1]), signal.SIGCONT)
            answer = children.answer()
        assert answer == ["ended", "0"], f"{action} stopped at line {line}"
        check_look_ups(store)
        sweep(store)
        assert problems(store) == [], f"{action} stopped at line {line}"
        assert save(store, [ALIEN[1]], parent=ALIEN[0]) + there(store, ALIEN[1:]) >= 1
