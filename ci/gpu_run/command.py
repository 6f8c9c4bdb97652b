# SPDX-License-Identifier: Apache-2.0
"""Run all GPU steps within a time limit, and keep every result at once.

Each step is a separate process with its own time limit, so a step that fails or hangs costs no other step. A second
call continues after the first, and tries failed steps again if their sources have changed. Exit code 0: every step
succeeded; 1: a step failed (a bench also fails if a bar is missed); 3: steps are left for another call.
"""

import argparse
import lzma
import os
import tarfile
import time
from pathlib import Path

from gpu_run.parts import MANIFEST, misfit, unpacked
from gpu_run.places import CARRIED, STATE, environment
from gpu_run.record import Record
from gpu_run.runner import Runner
from gpu_run.step import CALL_S
from gpu_run.steps import chosen

FAILED = 1
LEFT = 3


def main(arguments: list[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit code.
    """
    began = time.monotonic()
    options = _parser().parse_args(arguments)
    try:
        steps = chosen([name for told in options.only for name in told.split(",")])
    except ValueError as error:
        raise SystemExit(f"ci/gpu: {error}") from None
    if options.list:
        for step in steps:
            beside = " (side by side)" if step.beside else ""
            print(f"{step.name:16} {step.limit_s:4.0f} s  {step.why}{beside}")
        return 0
    sites = _sites(options)
    state, out = options.state, options.out
    if options.rehearse:
        # A folder of its own: these results are none of a GPU's.
        state, out = state / "rehearsal", out and out / "rehearsal"
    record = Record(state, out)
    if options.afresh or options.rehearse:
        record.forget([step.name for step in steps])
    env = environment(state, sites)
    runner = Runner(state, record, env, options.rehearse, lambda line: print(line, flush=True))
    left = runner.run(steps, 60 * options.budget_min - (time.monotonic() - began))
    print("\n" + record.report(), end="")
    print(f"results: {out or state}")
    if options.rehearse:
        print(_sizes(options.parts, record))
    if left:
        print(f"not done: {', '.join(left)}. The same command again goes on with them.")
        return LEFT
    states = {record.results[step.name].state for step in steps}
    return 0 if states == {"ok"} else FAILED


def _sites(options: argparse.Namespace) -> list[Path]:
    """Folders with further packages: unpacked parts, then those of `--site`."""
    folders = options.parts
    if not folders and (CARRIED / MANIFEST).exists():
        folders = [] if (why := misfit(CARRIED)) else [CARRIED]
        print(f"not used: {why}" if why else f"packages: {CARRIED}", flush=True)
    sites = []
    for folder in folders:
        try:
            found, missing = unpacked([folder])
        except (ValueError, KeyError, OSError, tarfile.TarError, lzma.LZMAError) as error:
            # Steps that need none of it run all the same: time on a GPU is scarce.
            print(f"not used: {error}", flush=True)
            continue
        sites += found
        if missing:
            print(f"not carried yet: {', '.join(missing)}", flush=True)
    return [*sites, *options.site]


def _sizes(folders: list[Path], record: Record) -> str:
    """Bytes that travel in both directions."""
    files = [file for folder in folders or [CARRIED] for file in sorted(folder.glob("*.tar.xz"))]
    there = [f"{file.name} {file.stat().st_size / (1 << 20):.1f} MiB" for file in files]
    back = [f"{name} {size / 1024:.0f} KiB" for name, size in record.sizes().items()]
    carried = ", ".join(there) or "nothing is packed yet: ci/offline_bundle"
    return f"to carry: {carried}\nto bring back: {', '.join(back)}"


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
        "--budget-min",
        type=float,
        default=CALL_S / 60,
        help=f"minutes for this call ({CALL_S / 60:.1f})",
        metavar="MIN",
    )
    out = os.environ.get("OUT")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(out) if out else None,
        metavar="DIR",
        help="gets a copy of results.json, report.txt and steps.log after each step ($OUT); "
        "results that lie there are taken up again",
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
        help="folder with further packages, such as vLLM; may be repeated",
    )
    parser.add_argument(
        "--parts",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="folder of packed packages, unpacked there; may be repeated (build/carry, if there)",
    )
    parser.add_argument(
        "--afresh",
        action="store_true",
        help="forget the results so far; with --only, of those steps",
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="the same steps here, each to the line that there is no GPU, or on the CPU",
    )
    return parser
