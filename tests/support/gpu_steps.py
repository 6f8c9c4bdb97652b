# SPDX-License-Identifier: Apache-2.0
"""Small steps for the tests of `ci/gpu`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from gpu_run.places import environment
from gpu_run.record import Record
from gpu_run.runner import Runner
from gpu_run.step import JSON, Step

SLEEP = "import time; time.sleep(600)"


def step(
    name: str,
    code: str,
    *,
    limit_s: float = 60.0,
    imports: Sequence[str] = (),
    beside: str = "",
) -> Step:
    program = (sys.executable, "-S", "-c", code, JSON)
    return Step(name, "a test", program, limit_s, imports, sources=(), beside=beside)


def runner(folder: Path, out: Path | None = None) -> Runner:
    env = environment(folder, [])
    return Runner(folder, Record(folder, out), env, rehearse=False, say=lambda _: None)


def states(one: Runner) -> dict[str, str]:
    return {name: result.state for name, result in one.record.results.items()}
