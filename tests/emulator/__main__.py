# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.emulator [name or part of one ...]` executes cases; without a name, all of them.

A program of its own, because in the process of the tests kernels are interpreted. Prints a line per case, and
at last JSON: for each case, what was wrong with it, "" if nothing. With `--damage`, for each case and each
instruction that was damaged, what was found, "" if nothing. `--damage event` takes a handoff's waits for streams.

With `--serve` the arguments come as lines of JSON behind the name of a file for the answer. Each line is executed in a
fork, which imports nothing a second time.
"""

import argparse
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import triton  # noqa: E402
from damages import ANY, KINDS, findings, sites_without_waits  # noqa: E402
from emulator import Emulator  # noqa: E402

EMULATOR, EVENT = Emulator(), "event"

from cases import CASES, LAUNCHED, SWITCHES  # noqa: E402 - kernels are looked up with the driver in place
from driver import pass_over_modules  # noqa: E402


def problem_of(name: str, seed: int) -> str:
    """What a case finds: a fault or a difference."""
    try:
        with EMULATOR.running(seed):
            CASES[name]()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def executed(name: str, seed: int) -> str:
    began = time.process_time()
    EMULATOR.launched.clear()
    EMULATOR.settings.clear()
    found = problem_of(name, seed)
    for setting, (case, kernel) in SWITCHES.items():
        if case == name and not found and (*setting, kernel) not in EMULATOR.settings:
            found = f"{kernel} was not launched with {setting[0]}={setting[1]}"
    wanted, ran = LAUNCHED.get(name), {kernel for kernel, _ in EMULATOR.launched}
    if wanted and not found and wanted not in ran:
        found = f"launched {', '.join(sorted(ran))} instead of {wanted}"
    steps = sum(count for _, count in EMULATOR.launched)
    seconds = time.process_time() - began
    tell(f"{name}: {found or 'right'}, {steps} steps, {seconds:.1f} s")
    return found


def damaged(name: str, kind: str, step: int, seed: int) -> dict[str, str]:
    """What is found of damages to the kernels of a case."""
    found = {}
    if kind == EVENT:
        return dict(sites_without_waits(EMULATOR, CASES[name], seed))
    for number, (told, problem) in enumerate(findings(EMULATOR, CASES[name], kind, seed, step)):
        found[f"{number}: {told}"] = problem
        if not problem:
            tell(f"not found: {told}")
    tell(f"{name}, {kind}: {sum(map(bool, found.values()))} of {len(found)} found")
    return found


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def warm_up() -> None:
    """What a first launch imports, and the sum over Triton's files that each compilation asks for, are there in forks."""
    problem_of("transfer raw", 0)
    pass_over_modules()


def serve() -> None:
    warm_up()
    for line in sys.stdin:
        path, *arguments = json.loads(line)
        if (child := os.fork()) == 0:
            answer = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(answer, 1)
            os.dup2(answer, 2)
            sys.argv[1:] = arguments
            os._exit(
                _status_of_main()
            )  # what the process tidies at its end, its parent still needs
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _status_of_main() -> int:
    status = 1
    try:
        main()
        status = 0
    except SystemExit as error:  # argparse has told why
        status = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.emulator", description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seed", type=int, default=0, help="another order of threads; 0: lockstep")
    parser.add_argument(
        "--damage", choices=(*KINDS, ANY, EVENT), help="damage instructions of this kind"
    )
    parser.add_argument("--every", type=int, default=1, help="damage every Nth of them")
    told = parser.parse_args()
    parts = told.names or [""]
    exact = all(part in CASES for part in parts)
    names = [n for n in CASES if (n in parts if exact else any(part in n for part in parts))]
    if told.damage:
        found: Any = {n: damaged(n, told.damage, told.every, told.seed) for n in names}
    else:
        found = {name: executed(name, told.seed) for name in names}
    json.dump({"triton": triton.__version__, "cases": found}, sys.stdout)


if __name__ == "__main__":
    pass_over_modules()
    serve() if sys.argv[1:] == ["--serve"] else main()
