# SPDX-License-Identifier: Apache-2.0
"""Results of the steps. They are rewritten after each step, so an aborted run loses none."""

import json
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RESULTS = "results.json"
REPORT = "report.txt"
LOG = "steps.log"

DONE = ("ok", "failed", "timeout")
"""States of steps that are not run again."""

TAIL_LINES = 40
LOG_BYTES = 1 << 20
"""The most characters kept of one step's output. The end is kept."""


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
    """

    state: str
    why: str = ""
    seconds: float = 0.0
    returncode: int | None = None
    command: str = ""
    tail: list[str] = field(default_factory=list)
    figures: Any = None

    @property
    def line(self) -> str:
        """State, time and reason as text."""
        return f"{self.state:8} {self.seconds:6.0f} s  {self.why}".rstrip()


class Record:
    """The results of one run.

    Args:
        folder: folder of the results. Results of an earlier call are kept.
        out: a folder that gets a copy of the results after each step; None for no copy.
    """

    def __init__(self, folder: Path, out: Path | None = None) -> None:
        self._folder = folder
        self._out = out
        folder.mkdir(parents=True, exist_ok=True)
        self.results: dict[str, Result] = self._read()

    def done(self, name: str) -> bool:
        """Whether a step has a result that needs no second try."""
        return name in self.results and self.results[name].state in DONE

    def forget(self, names: Iterable[str]) -> None:
        """Drop the results of some steps, which are run again. Other results stay."""
        for name in names:
            self.results.pop(name, None)
        self._write()

    def put(self, name: str, result: Result, log: Path | None = None) -> None:
        """Keep a step's result, and the end of its output."""
        self.results[name] = result
        if log is not None and log.exists():
            self._append(name, result, log.read_bytes()[-LOG_BYTES:])
        self._write()

    def report(self) -> str:
        """All results, a line each, and the end of the output of failed steps."""
        lines = [f"{name:16} {result.line}" for name, result in self.results.items()]
        for name, result in self.results.items():
            if result.state != "ok" and result.tail:
                lines += ["", f"== {name}: {result.command}", *result.tail]
        return "\n".join(lines) + "\n"

    def _append(self, name: str, result: Result, output: bytes) -> None:
        with (self._folder / LOG).open("ab") as file:
            file.write(f"\n==== {name}: {result.command}\n==== {result.line}\n".encode())
            file.write(output)

    def _read(self) -> dict[str, Result]:
        path = self._folder / RESULTS
        if not path.exists():
            return {}
        return {name: Result(**one) for name, one in json.loads(path.read_text()).items()}

    def _write(self) -> None:
        told = {name: asdict(result) for name, result in self.results.items()}
        _replace(self._folder / RESULTS, json.dumps(told, indent=1))
        _replace(self._folder / REPORT, self.report())
        if self._out is None:
            return
        self._out.mkdir(parents=True, exist_ok=True)
        for name in (RESULTS, REPORT, LOG):
            if (self._folder / name).exists():
                shutil.copyfile(self._folder / name, self._out / name)


def _replace(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees the old or the new content."""
    fresh = path.with_suffix(path.suffix + ".new")
    fresh.write_text(text)
    fresh.replace(path)
