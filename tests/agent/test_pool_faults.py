# SPDX-License-Identifier: Apache-2.0
"""Agents that save and load are killed and stopped at random moments, and files are cut, flipped, swapped and deleted under them.

No load ends well with a wrong byte, every command is answered, and nothing is left. The suite injects no faults;
PD_POOL_FAULTS=300 in the environment sets their number.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pool_worker
import pytest
from whole import sweep

from chaos.pool_files import KINDS, harm
from pd_connector.pool.store.local import LocalStore
from pd_connector.pool.store.tier_storage import Space

FAULTS = int(os.environ.get("PD_POOL_FAULTS", "0"))
pytestmark = [
    pytest.mark.quiet,  # other tests would take its processes' time
    pytest.mark.skipif(
        not FAULTS, reason="agents that are killed and stopped: set PD_POOL_FAULTS to how many"
    ),
]
WORKERS = 3
BUDGET = 512 << 10
"""Bytes of the memory tier. All prompts need more, so chunks are evicted, and come back from the disk."""
START_S = 600.0
"""A machine with much other work takes minutes."""


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="pd-test-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


class Workers:
    """Some agents at a time, each in a process of its own, and what all have said."""

    def __init__(self, folder: Path, seed: int, *, blind: bool = False) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["pool_worker"])
        self._told = str(folder / "memory"), str(folder / "disk"), BUDGET
        self._seed, self._blind = 1000 * seed, blind
        self.said = Counter[str]()
        self._running = [self._started() for _ in range(WORKERS)]

    def _started(self) -> tuple[multiprocessing.Process, multiprocessing.connection.Connection]:
        self._seed += 1
        here, there = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=pool_worker.start, args=(there, *self._told, self._seed, self._blind)
        )
        process.start()
        there.close()
        assert here.poll(START_S), "a worker did not start"
        assert here.recv() == "ready"
        return process, here

    def kill(self, dice: random.Random) -> None:
        place = dice.randrange(WORKERS)
        self._end(place)
        self._running[place] = self._started()

    def stop(self, dice: random.Random) -> None:
        process, _ = dice.choice(self._running)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(dice.choice((0.05, 0.3, 1.0, 4.0)))
        os.kill(process.pid, signal.SIGCONT)

    def listen(self) -> None:
        for _, here in self._running:
            with contextlib.suppress(EOFError, OSError):
                while here.poll():
                    self.said[here.recv()] += 1

    def close(self) -> None:
        self.listen()
        for place in range(WORKERS):
            self._end(place)

    def _end(self, place: int) -> None:
        process, here = self._running[place]
        process.kill()
        process.join()
        with contextlib.suppress(EOFError, OSError):  # the last word may be half
            while here.poll():
                self.said[here.recv()] += 1
        here.close()


def files(root: Path) -> list[Path]:
    return sorted(root.glob("*/v1/data/*"))


def run(
    workers: Workers,
    root: Path,
    faults: int,
    kinds: tuple[str, ...],
    seed: int,
    done: Counter[str] | None = None,
) -> None:
    """Inject faults, and count them in `done`."""
    dice, done = random.Random(seed), Counter() if done is None else done
    calls: dict[str, Callable[[], None]] = {
        "kill -9": lambda: workers.kill(dice),
        "SIGSTOP": lambda: workers.stop(dice),
        **{kind: lambda kind=kind: harm(files(root), kind, dice) for kind in KINDS},  # type: ignore[misc]
    }
    for _ in range(faults):
        time.sleep(dice.random() * 0.1)
        kind = dice.choice(kinds)
        calls[kind]()
        done[kind] += 1
        workers.listen()


def test_no_fault_gives_a_wrong_byte_loses_an_answer_or_leaves_anything(folder: Path) -> None:
    workers, done = Workers(folder, seed=1), Counter[str]()
    try:
        run(workers, folder, FAULTS, ("kill -9", "kill -9", "SIGSTOP", *KINDS), seed=1, done=done)
        time.sleep(2.0)
    finally:
        workers.close()
        print(dict(done), dict(workers.said), file=sys.stderr)
    assert workers.said["wrong"] == 0
    assert workers.said["lost"] == 0
    assert workers.said["right"] > FAULTS / 4, "loads went on"
    assert workers.said["saved"] > FAULTS / 4, "saves went on"
    store = LocalStore(Space(folder / "memory", BUDGET), Space(folder / "disk", 2 * BUDGET))
    try:
        sweep(store)
        for tier in ("memory", "disk"):
            held = folder / tier / "v1"
            assert list((held / "staged").iterdir()) == []
            nbytes = sum(one.stat().st_blocks * 512 for one in (held / "data").iterdir())
            assert nbytes <= (1 + (tier == "disk")) * BUDGET
    finally:
        store.close()


def test_without_sums_flipped_bytes_would_be_found(folder: Path) -> None:
    workers = Workers(folder, seed=2, blind=True)
    try:
        ends = time.monotonic() + 120
        while not workers.said["wrong"] and time.monotonic() < ends:
            run(workers, folder, 10, ("flip",), seed=workers.said.total())
    finally:
        workers.close()
    assert workers.said["wrong"] > 0
