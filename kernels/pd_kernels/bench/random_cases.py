# SPDX-License-Identifier: Apache-2.0
"""Random cases of a check."""

import random
from collections.abc import Callable, Iterable

import torch

Check = Callable[[random.Random], str]
"""Runs a random case, and says what was wrong; empty if nothing was."""


def problems(checks: Iterable[tuple[str, int, Check]], seed: int) -> list[str]:
    """Run random cases, and return a line for each that failed. A case that raises does not stop
    the others.

    Args:
        checks: name of each check, how many cases it gets, and the check.
        seed: of the random cases; the same seed gives the same cases.
    """
    found = []
    for name, count, check in checks:
        for case in range(count):
            chance = random.Random(seed * 100_003 + case)
            torch.manual_seed(chance.randrange(1 << 30))
            try:
                wrong = check(chance)
            except Exception as error:
                wrong = f"{type(error).__name__}: {error}".splitlines()[0]
            if wrong:
                found.append(f"{name}, case {case} of seed {seed}: {wrong}")
    return found
