# SPDX-License-Identifier: Apache-2.0
"""Runs the steps that fit into the time limit."""

import importlib.machinery
import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_run.places import ROOT
from gpu_run.processes import Ended, end_of, run_limited
from gpu_run.record import STEP_BYTES, TAIL_LINES, Record, Result
from gpu_run.step import JSON, Step, side_by_side

LEAST_SHARE = 0.5
"""The least part of its time limit that a step begins with. Less would be lost time."""

REHEARSED_SHARE = 4
"""A rehearsed step may take this many times its limit, because a machine without a GPU is slower."""

LINE = 300
"""The most characters of a line that explains a failure."""

NO_GPU = 2
NO_GPU_LINE = "no GPU"
"""Exit code of a benchmark on a machine without a GPU, and the beginning of its last line."""

NO_DEVICE = "Failed to infer device type"
"""vLLM's words where it finds no device of the kind that it was built for."""

DEVICES = Path("/dev")
"""Folder in which the driver has a file for each GPU."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Runner:
    """The settings that all steps of a call share.

    Args:
        state: folder for files of the steps.
        record: takes the results.
        env: the steps' environment.
        rehearse: run each step's version without a GPU.
        say: gets a line when a step begins and when it ends.
    """

    state: Path
    record: Record
    env: Mapping[str, str]
    rehearse: bool
    say: Say

    def run(self, steps: Sequence[Step], budget_s: float) -> list[str]:
        """Run steps until the time limit.

        Args:
            steps: steps in their order. Steps with a result are skipped.
            budget_s: seconds for all of them.

        Returns:
            Names of the steps that did not begin or had too little time.
        """
        deadline = time.monotonic() + budget_s
        left: list[str] = []
        for group in side_by_side(sorted(steps, key=self._ended_a_call)):
            remaining_s = deadline - time.monotonic()
            waiting = [step for step in group if not self._told(step)]
            begun = [step for step in waiting if remaining_s >= LEAST_SHARE * step.limit_s]
            if begun:
                with ThreadPoolExecutor(min(len(begun), os.cpu_count() or 1)) as pool:
                    list(pool.map(lambda step: self._run(step, deadline), begun))
            cut = [step for step in begun if self.record.results[step.name].state == "cut"]
            blind = [step for step in begun if self._found_no_gpu(step)]
            left += [step.name for step in waiting if step not in begun or step in (*cut, *blind)]
            if blind:
                done = [
                    name for name, result in self.record.results.items() if result.state == "ok"
                ]
                return [step.name for step in steps if step.name not in done]
        return left

    def _ended_a_call(self, step: Step) -> bool:
        """Whether an earlier call ended with this step, as a step does that brings the machine down. It comes last."""
        before = self.record.results.get(step.name)
        return before is not None and before.state == "cut" and not before.why

    def _found_no_gpu(self, step: Step) -> bool:
        """Then no other step would find one."""
        result = self.record.results[step.name]
        return result.state == "missing" and result.why.startswith(NO_GPU_LINE)

    def _told(self, step: Step) -> bool:
        """Whether the step needs no run. If so, this says its result."""
        if not self.record.done(step.name, step.digest()):
            return False
        self.say(f"{step.name:16} has a result: {self.record.results[step.name].line}")
        return True

    def _run(self, step: Step, deadline: float) -> None:
        if reason := self._missing(step):
            result = Result("missing", reason)
            self.record.put(step.name, result)
            self.say(f"{step.name:16} {result.line}")
            return
        own_s = step.limit_s * (REHEARSED_SHARE if self.rehearse else 1)
        # Steps side by side may have waited until a processor was free.
        limit_s = min(own_s, max(0.0, deadline - time.monotonic()))
        figures, log = self.state / f"{step.name}.json", self.state / f"{step.name}.out"
        figures.unlink(missing_ok=True)
        told = (step.rehearsal or step.command) if self.rehearse else step.command
        command = [part.replace(JSON, str(figures)) for part in told]
        self.say(f"{step.name:16} begins, at most {limit_s:.0f} s: {step.why}")
        sources = step.digest()
        told_command = shlex.join(command)

        def look() -> None:
            """The recorded state if this program itself is ended during the step."""
            so_far = Result("cut", command=told_command, tail=_tail(log), figures=_figures(figures))
            self.record.put(step.name, so_far)

        look()
        try:
            ended = run_limited(
                command, cwd=ROOT, env=self.env, log=log, limit_s=limit_s, look=look
            )
        except OSError as error:  # a program that is not there, a full disk: the others go on
            result = Result("failed", str(error), command=told_command, sources=sources)
            self.record.put(step.name, result)
            self.say(f"{step.name:16} {result.line}")
            return
        result = Result(
            "ok",
            seconds=round(ended.seconds, 1),
            returncode=None if ended.timed_out else ended.returncode,
            command=told_command,
            tail=_tail(log),
            figures=_figures(figures),
            sources=sources,
        )
        if ended.timed_out:
            # With less than its own time limit the step had no fair chance, and is run again.
            result.state = "timeout" if limit_s >= own_s else "cut"
            result.why = f"ended after {limit_s:.0f} s"
            if ended.returncode is None:
                result.why += ", but a process of it cannot be killed, and may hold the GPU"
        elif reason := _without_gpu(ended, log):
            # Another machine may have one: then the step is tried again.
            result.state = "ok" if self.rehearse else "missing"
            result.why = reason
        elif ended.returncode != 0:
            result.state, result.why = "failed", _failure(ended, result.tail)
        self.record.put(step.name, result, log)
        self.say(f"{step.name:16} {result.line}")

    def _missing(self, step: Step) -> str:
        """Needs of the step that this host does not have; empty if it has all."""
        lacking = [name for name in step.imports if not self._importable(name)]
        if lacking:
            return f"not importable: {', '.join(lacking)} (ci/offline_bundle packs all but the engine, see --parts and --site)"
        if step.program and not self.rehearse and not shutil.which(step.program):
            return f"not on PATH: {step.program}"
        if absent := [name for name in step.files if not (ROOT / name).exists()]:
            return f"not in this tree: {', '.join(absent)} (ci/offline_bundle --with-model)"
        return ""

    def _importable(self, module: str) -> bool:
        paths = self.env.get("PYTHONPATH", "").split(os.pathsep)
        found = importlib.machinery.PathFinder.find_spec(module, [*paths, *sys.path])
        return found is not None


def _failure(ended: Ended, tail: Sequence[str]) -> str:
    """The signal or the exit code, and the last line of the output."""
    code = ended.returncode or 0
    if code < 0:
        return f"ended by {signal.strsignal(-code)} (signal {-code})"
    return ": ".join([f"exit code {code}", *(line[:LINE] for line in tail[-1:])])


def _tail(log: Path) -> list[str]:
    """The last lines of a program's output so far."""
    return _lines(log)[-TAIL_LINES:]


def _lines(log: Path) -> list[str]:
    """The end of a program's output, as much of it as is kept."""
    return end_of(log, STEP_BYTES).decode(errors="replace").splitlines() if log.exists() else []


def _without_gpu(ended: Ended, log: Path) -> str:
    """The line that says that a step failed because there is no GPU; empty if it did not.

    Where a GPU is, an engine that finds no device has failed: its build does not fit the driver, say.
    """
    lines = _lines(log)
    if ended.returncode == NO_GPU and lines and lines[-1].startswith(NO_GPU_LINE):
        return lines[-1]
    if not ended.returncode or any(DEVICES.glob("nvidia[0-9]*")):
        return ""
    blind = any(NO_DEVICE in line for line in lines)
    return f"{NO_GPU_LINE}: vLLM: {NO_DEVICE}" if blind else ""


def _figures(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
