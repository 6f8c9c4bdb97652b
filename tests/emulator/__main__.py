# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.emulator [--seed N] [name or part of one ...]`: executes cases; all of them without a name.

A program of its own, because in the process of the tests kernels are interpreted. Prints a line per case, and
at last JSON: for each case, what was wrong with it, "" if nothing.
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from emulator import Emulator

EMULATOR = Emulator()

from cases import CASES  # noqa: E402 - kernels are looked up with the driver in place


def problem(name: str, seed: int) -> str:
    """What a case finds: a fault or a difference."""
    try:
        with EMULATOR.running(seed):
            CASES[name]()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.emulator", description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seed", type=int, default=0)
    told = parser.parse_args()
    exact = all(name in CASES for name in told.names)
    parts = told.names or [""]
    names = [
        n for n in CASES if (n in parts if exact and told.names else any(p in n for p in parts))
    ]
    found = {}
    for name in names:
        began = time.process_time()
        EMULATOR.launched.clear()
        found[name] = problem(name, told.seed)
        steps = sum(count for _, count in EMULATOR.launched)
        seconds = time.process_time() - began
        print(
            f"{name}: {found[name] or 'right'}, {steps} steps, {seconds:.1f} s",
            file=sys.stderr,
            flush=True,
        )
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
