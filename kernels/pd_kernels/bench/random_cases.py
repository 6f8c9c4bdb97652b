# SPDX-License-Identifier: Apache-2.0
"""Random cases of a check."""

import random
from collections.abc import Callable, Iterable

import torch

Check = Callable[[random.Random], str]
"""Makes a case by chance, and says what was wrong with it; empty when all was right."""


def problems(checks: Iterable[tuple[str, int, Check]], seed: int) -> list[str]:
    """What went wrong, a line each. A case that raises hides no other.

    Args:
        checks: of each its name, and how many cases are made.
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
