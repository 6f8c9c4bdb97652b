# SPDX-License-Identifier: Apache-2.0
"""Results of the steps. They are rewritten after each step, so an aborted run loses none."""

import json
import shutil
import sys
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpu_run.processes import end_of

RESULTS = "results.json"
REPORT = "report.txt"
LOG = "steps.log"

FAILED = ("failed", "timeout")
"""States of steps that are run again when their sources have changed."""

TAIL_LINES = 40
STEP_BYTES = 1 << 18
LOG_BYTES = 8 << 20
"""The most bytes kept of one step's output, and of all together. The end is kept."""


@dataclass
class Result:
    """The end of one step.

    Args:
        state: `ok`; `failed`: the exit code was not 0, which also means a missed bar of a bench; `timeout`; `missing`:
            something that it needs is missing; `cut`: the run ended during the step.
        why: the missing thing or the failure, in a line.
        seconds: duration of the step.
        returncode: its exit code; None if it did not end by itself.
        command: the command.
        tail: the last lines of its output.
        figures: the JSON that it wrote.
        sources: digest of the step's sources, see `Step.digest`.
    """

    state: str
    why: str = ""
    seconds: float = 0.0
    returncode: int | None = None
    command: str = ""
    tail: list[str] = field(default_factory=list)
    figures: Any = None
    sources: str = ""

    @property
    def line(self) -> str:
        """State, time and reason as text."""
        return f"{self.state:8} {self.seconds:6.0f} s  {self.why}".rstrip()


class Record:
    """The results of one run. Steps that run side by side may put theirs at the same time.

    Args:
        folder: folder of the results. Results of an earlier call are kept.
        out: a folder that gets a copy of the results after each step; None for no copy. If `folder`
            has no results yet, those of an earlier call are taken from here.
    """

    def __init__(self, folder: Path, out: Path | None = None) -> None:
        self._folder = folder
        self._out = out
        self._lock = threading.Lock()
        self._trouble = ""
        folder.mkdir(parents=True, exist_ok=True)
        self._take_up()
        self.results: dict[str, Result] = self._read()

    def done(self, name: str, sources: str) -> bool:
        """Whether a step needs no other try: it succeeded, or it failed with these sources."""
        result = self.results.get(name)
        if result is None:
            return False
        return result.state == "ok" or (result.state in FAILED and result.sources == sources)

    def forget(self, names: Iterable[str]) -> None:
        """Drop the results of some steps, which are run again. Other results stay."""
        with self._lock:
            for name in names:
                self.results.pop(name, None)
            self._write()

    def put(self, name: str, result: Result, log: Path | None = None) -> None:
        """Keep a step's result, and the end of its output."""
        with self._lock:
            self.results[name] = result
            if log is not None and log.exists():
                self._append(name, result, end_of(log, STEP_BYTES))
            self._write()

    def sizes(self) -> dict[str, int]:
        """Bytes of each file that is brought back, by name."""
        files = (self._folder / name for name in (RESULTS, REPORT, LOG))
        return {file.name: file.stat().st_size for file in files if file.exists()}

    def report(self) -> str:
        """All results, a line each, and the end of the output of failed steps."""
        lines = [f"{name:16} {result.line}" for name, result in self.results.items()]
        for name, result in self.results.items():
            if result.state != "ok" and result.tail:
                lines += ["", f"== {name}: {result.command}", *result.tail]
        return "\n".join(lines) + "\n"

    def _append(self, name: str, result: Result, output: bytes) -> None:
        path = self._folder / LOG
        before = path.read_bytes() if path.exists() else b""
        told = f"\n==== {name}: {result.command}\n==== {result.line}\n".encode()
        _replace(path, (before + told + output)[-LOG_BYTES:])

    def _take_up(self) -> None:
        """Copy the results of an earlier call here, which may have been on another machine."""
        if self._out is None or (self._folder / RESULTS).exists():
            return
        for name in (RESULTS, LOG):
            if (self._out / name).exists():
                shutil.copyfile(self._out / name, self._folder / name)

    def _read(self) -> dict[str, Result]:
        path = self._folder / RESULTS
        try:
            return {name: Result(**one) for name, one in json.loads(path.read_text()).items()}
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, AttributeError) as error:
            # A copy that broke off, or another version's. It must not cost a call on a GPU.
            aside = path.with_suffix(".broken")
            path.replace(aside)
            print(f"{path}: not results ({error}): begins afresh, kept as {aside}", file=sys.stderr)
            return {}

    def _write(self) -> None:
        told = {name: asdict(result) for name, result in self.results.items()}
        _replace(self._folder / RESULTS, json.dumps(told, indent=1).encode())
        _replace(self._folder / REPORT, self.report().encode())
        if self._out is None:
            return
        try:
            self._out.mkdir(parents=True, exist_ok=True)
            for name in (RESULTS, REPORT, LOG):
                if (self._folder / name).exists():
                    _replace(self._out / name, (self._folder / name).read_bytes())
        except OSError as error:  # the measurements go on
            if str(error) != self._trouble:
                self._trouble = str(error)
                print(f"--out has no copy: {error}; see {self._folder}", file=sys.stderr)


def _replace(path: Path, content: bytes) -> None:
    """Write a file atomically: a reader sees the old or the new content."""
    fresh = path.with_suffix(path.suffix + ".new")
    fresh.write_bytes(content)
    fresh.replace(path)
