# SPDX-License-Identifier: Apache-2.0
"""Objects put by one process and got by another: the pool's store beside Mooncake's, plain files and a copy."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from pd_bench.peer_environment import how_to_make, installed_version
from pd_bench.pool import raw_party
from pd_bench.pool.raw_party import OBJECT_BYTES
from pd_bench.report import BenchError, Compared, Comparison, Say
from pd_bench.sample import Sample
from pd_connector.pool.settings import memory_folder
from pd_connector.tools.launch.family import Family
from pd_connector.tools.launch.ports import Port

RIVAL_PACKAGE = "mooncake-transfer-engine-non-cuda"
RIVAL_VERSION = "0.3.13.post1"
OURS, FILES, COPY = "ours", "files", "copy"
RIVAL, RIVAL_INSIDE = "mooncake", "mooncake inside"
BASELINES = {
    RIVAL: "Mooncake",
    RIVAL_INSIDE: "Mooncake, in the putter",
    FILES: "plain files",
    COPY: "a copy",
}
"""The name of each way in the report. Mooncake's memory is either in a process of its own, so objects outlive the process that
put them, as ours do; or in that process, and is lost with it."""
BARS = {"put": 1.0, "get": 2.0}
_RIVALS = (RIVAL, RIVAL_INSIDE)


class RawFindings(NamedTuple):
    """Tables, each with the name of its baseline."""

    tables: list[Compared]
    notes: list[str]


class RawPair:
    """A process that puts, and another one that gets, with one way to store.

    Args:
        settings: one entry per process. The third and later processes only lend memory.
    """

    def __init__(self, way: str, count: int, settings: Sequence[Mapping[str, Any]]) -> None:
        self.way = way
        self._count = count
        self._settings = settings
        self._processes: list[subprocess.Popen[str]] = []

    def open(self, python: str = "") -> Self:
        """Start both processes.

        Args:
            python: of another environment.
        """
        program = (
            [python, "-I", raw_party.__file__]
            if python
            else [sys.executable, "-m", raw_party.__name__]
        )
        for settings in self._settings:
            command = [*program, self.way.split()[0], str(self._count), json.dumps(settings)]
            self._processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )
            self._answer(self._processes[-1])
        return self

    def run(self, number: int) -> dict[str, float]:
        """GB/s of a put and of a get of all objects. What is got is compared with what was put."""
        putter, getter = self._processes[:2]
        nbytes = self._count * OBJECT_BYTES
        rates = {
            "put": nbytes / self._call(putter, "put", number) / 1e9,
            "get": nbytes / self._call(getter, "get", number) / 1e9,
        }
        self._call(putter, "forget", number)
        return rates

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe:
                    pipe.close()

    def _call(self, process: subprocess.Popen[str], verb: str, number: int) -> float:
        assert process.stdin
        process.stdin.write(json.dumps([verb, number]) + "\n")
        process.stdin.flush()
        return self._answer(process)

    def _answer(self, process: subprocess.Popen[str]) -> float:
        assert process.stdout
        line = process.stdout.readline()
        error, took_s = json.loads(line) if line else ("its process has ended", 0.0)
        if error:
            raise BenchError(f"{self.way}: {error}")
        return float(took_s)


@dataclass(frozen=True)
class RawBench:
    """One comparison.

    Args:
        peer_env: virtual environment that has Mooncake; it is compared only if it is there.
        objects: of one run.
        runs: measured runs of each way.
        warm_ups: runs before them, not counted.
    """

    peer_env: Path
    objects: int
    runs: int
    warm_ups: int
    _tables: list[Compared] = field(default_factory=list, init=False)

    def measure(self, say: Say) -> RawFindings:
        """Measure all ways in turn.

        Raises:
            BenchError: a process has failed, or got wrong bytes.
        """
        with contextlib.ExitStack() as stack:
            pairs = list(self._pairs(stack))
            rates = self._rounds(pairs, say)
        tables = [
            (words, [self._compared(verb, rates[OURS], rates[way], way) for verb in ("put", "get")])
            for way, words in BASELINES.items()
            if way in rates
        ]
        return RawFindings(tables, self._notes())

    def _rounds(self, pairs: Sequence[RawPair], say: Say) -> dict[str, list[dict[str, float]]]:
        rates: dict[str, list[dict[str, float]]] = {pair.way: [] for pair in pairs}
        for number in range(self.warm_ups + self.runs):
            turn = number % len(pairs)  # each way is first, and last, in turn
            said = []
            for pair in (*pairs[turn:], *pairs[:turn]):
                run = pair.run(number)
                said.append(f"{pair.way} put {run['put']:.2f} get {run['get']:.2f}")
                if number >= self.warm_ups:
                    rates[pair.way].append(run)
            warming = "warm-up" if number < self.warm_ups else "run"
            say(f"raw, {warming}, GB/s: {', '.join(said)}")
        return rates

    def _compared(
        self,
        verb: str,
        ours: Sequence[Mapping[str, float]],
        theirs: Sequence[Mapping[str, float]],
        way: str,
    ) -> Comparison:
        mine, other = (Sample(tuple(run[verb] for run in side)) for side in (ours, theirs))
        params = {"MiB": OBJECT_BYTES >> 20, "objects": self.objects}
        return Comparison(
            f"raw {verb}", params, mine, other, "GB/s", BARS[verb] if way in _RIVALS else None, True
        )

    def _pairs(self, stack: contextlib.ExitStack) -> Iterator[RawPair]:
        """Both processes of each way, started."""
        memory = memory_folder()
        shm = memory.parents[1]
        folder = Path(tempfile.mkdtemp(prefix="pd-bench-", dir=shm))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        budget = 4 * self.objects * (OBJECT_BYTES + (1 << 20))
        for way in (OURS, FILES, COPY):
            own = folder / way
            own.mkdir(mode=0o700)
            settings = {"folder": str(own), "budget": budget}
            pair = RawPair(way, self.objects, [settings] * 2)
            stack.callback(pair.close)
            yield pair.open()
        if installed_version(self.peer_env, RIVAL_PACKAGE):
            for way in _RIVALS:
                log = folder / f"{way}.log"
                master = stack.enter_context(mooncake_master(self.peer_env, log))
                lends, lends_not = ({"master": master, "segment": n} for n in (budget, 0))
                inside = [lends, lends_not]
                settings_of = inside if way == RIVAL_INSIDE else [lends_not, lends_not, lends]
                pair = RawPair(way, self.objects, settings_of)
                stack.callback(pair.close)
                yield pair.open(str(self.peer_env / "bin" / "python"))

    def _notes(self) -> list[str]:
        version = installed_version(self.peer_env, RIVAL_PACKAGE)
        if version:
            return [f"Mooncake {version}: batches of all objects over TCP, and it verifies nothing"]
        how = how_to_make(self.peer_env, f"{RIVAL_PACKAGE}=={RIVAL_VERSION}", "numpy")
        return [
            f"NOT COMPARED: Mooncake is not in {self.peer_env}: {how} (its wheel needs libibverbs1 and libnl-3-200)"
        ]


@contextlib.contextmanager
def mooncake_master(environment: Path, log: Path) -> Iterator[str]:
    """Mooncake's master; yields its address."""
    with Port() as port, Port() as metrics:
        numbers = int(port), int(metrics)
    program = [str(environment / "bin" / "mooncake_master"), "--rpc_address=127.0.0.1"]
    family = Family([*program, f"--rpc_port={numbers[0]}", f"--metrics_port={numbers[1]}"], log=log)
    try:
        time.sleep(2.0)
        if family.returncode is not None:
            raise BenchError(f"Mooncake's master has ended: {log.read_text()[-500:]}")
        yield f"127.0.0.1:{numbers[0]}"
    finally:
        family.stop()
