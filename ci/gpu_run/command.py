# SPDX-License-Identifier: Apache-2.0
"""Run all GPU steps within a time limit, and keep every result at once.

Each step is a separate process with its own time limit, so a step that fails or hangs costs no other step. A second
call continues after the first. Exit code 0: every step succeeded; 1: a step failed (a bench also fails if a bar is
missed); 3: steps are left for another call.
"""

import argparse
import os
from pathlib import Path

from gpu_run.places import STATE, environment
from gpu_run.record import Record
from gpu_run.runner import Runner
from gpu_run.steps import chosen

FAILED = 1
LEFT = 3


def main(arguments: list[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit code.
    """
    options = _parser().parse_args(arguments)
    try:
        steps = chosen([name for told in options.only for name in told.split(",")])
    except ValueError as error:
        raise SystemExit(f"ci/gpu: {error}") from None
    if options.list:
        for step in steps:
            print(f"{step.name:16} {step.limit_s:4.0f} s  {step.why}")
        return 0
    state = options.state / "rehearsal" if options.rehearse else options.state
    record = Record(state, options.out)
    if options.afresh:
        record.forget([step.name for step in steps])
    env = environment(state, options.site)
    runner = Runner(state, record, env, options.rehearse, lambda line: print(line, flush=True))
    left = runner.run(steps, 60 * options.budget_min)
    print("\n" + record.report(), end="")
    print(f"results: {options.out or state}")
    if left:
        print(f"not done: {', '.join(left)}. The same command again goes on with them.")
        return LEFT
    states = {record.results[step.name].state for step in steps}
    return 0 if states == {"ok"} else FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("ci/gpu", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the steps and end")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="STEP",
        help="only this step; may be repeated, or several with commas",
    )
    parser.add_argument(
        "--budget-min", type=float, default=25.0, help="minutes for this call (25)", metavar="MIN"
    )
    out = os.environ.get("OUT")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(out) if out else None,
        metavar="DIR",
        help="gets a copy of results.json, report.txt and steps.log after each step ($OUT)",
    )
    parser.add_argument(
        "--state",
        type=Path,
        default=STATE,
        metavar="DIR",
        help="keeps the results between calls (build/gpu)",
    )
    parser.add_argument(
        "--site",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="folder with further packages, such as vLLM and NIXL; may be repeated",
    )
    parser.add_argument(
        "--afresh",
        action="store_true",
        help="forget the results so far; with --only, of those steps",
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="the same steps without a GPU: on the CPU and in Triton's interpreter",
    )
    return parser
