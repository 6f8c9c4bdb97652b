# SPDX-License-Identifier: Apache-2.0
"""Random cases of a check."""

import random
import time
from collections.abc import Callable, Iterable, Iterator

import torch

Check = Callable[[random.Random], str]
"""Runs a random case, and returns what was wrong; empty if nothing was wrong."""

Problems = dict[str, list[str]]
"""A line for each wrong case, by kernel. Kernels without wrong cases are not in it."""


def problems(checks: Iterable[tuple[str, int, Check]], seed: int) -> Problems:
    """Run random cases, and return a line for each failed case. Each line is also printed at once,
    so an aborted run shows its failures. A case that raises does not stop the others, unless it has
    cost the process its GPU.

    Args:
        checks: kernel of each check, its number of cases, and the check.
        seed: seed of the random cases; the same seed gives the same cases.
    """
    by_name: Problems = {}
    for name, count, check in checks:
        began = time.monotonic()
        wrong = list(_wrong_cases(name, check, count, seed))
        if wrong:
            by_name.setdefault(name, []).extend(wrong)
        seconds = time.monotonic() - began
        print(f"{name}: {count} cases, {len(wrong)} wrong, {seconds:.0f} s", flush=True)
    return by_name


def _wrong_cases(name: str, check: Check, count: int, seed: int) -> Iterator[str]:
    for case in range(count):
        line = _problem(name, check, case, seed)
        if line:
            print(f"WRONG: {line}", flush=True)
            yield line
            if not _gpu_answers():
                yield f"{name}: {count - case - 1} cases not checked: the GPU takes no more launches"
                return


def _problem(name: str, check: Check, case: int, seed: int) -> str:
    chance = random.Random(seed * 100_003 + case)
    torch.manual_seed(chance.randrange(1 << 30))
    try:
        wrong = check(chance)
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"{name}, case {case} of seed {seed}: {wrong}" if wrong else ""


def _gpu_answers() -> bool:
    """False after an illegal access, for example: then all later calls of the process fail, too."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
