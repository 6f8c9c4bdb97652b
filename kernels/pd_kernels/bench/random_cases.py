# SPDX-License-Identifier: Apache-2.0
"""Random cases of a check."""

import random
import time
from collections.abc import Callable, Iterable

import torch

Check = Callable[[random.Random], str]
"""Runs a random case, and returns what was wrong; empty if nothing was wrong."""


def problems(checks: Iterable[tuple[str, int, Check]], seed: int) -> list[str]:
    """Run random cases, and return a line for each failed case. Each line is also printed at once,
    so an aborted run shows its failures. A case that raises does not stop the others.

    Args:
        checks: name of each check, its number of cases, and the check.
        seed: seed of the random cases; the same seed gives the same cases.
    """
    found = []
    for name, count, check in checks:
        began = time.monotonic()
        wrong = [line for case in range(count) if (line := _problem(name, check, case, seed))]
        found += wrong
        seconds = time.monotonic() - began
        print(f"{name}: {count} cases, {len(wrong)} wrong, {seconds:.0f} s", flush=True)
    return found


def _problem(name: str, check: Check, case: int, seed: int) -> str:
    chance = random.Random(seed * 100_003 + case)
    torch.manual_seed(chance.randrange(1 << 30))
    try:
        wrong = check(chance)
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}".splitlines()[0]
    if not wrong:
        return ""
    told = f"{name}, case {case} of seed {seed}: {wrong}"
    print(f"WRONG: {told}", flush=True)
    return told
