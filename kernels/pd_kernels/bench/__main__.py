# SPDX-License-Identifier: Apache-2.0
"""The command: checks, then measures, prints a table, and says by its exit code what became of it."""

import argparse
import sys
from pathlib import Path

import torch

from pd_kernels.bench.check import check_transfer
from pd_kernels.bench.decode import measure_decode
from pd_kernels.bench.decode_check import check_decode
from pd_kernels.bench.report import print_rows, write_json
from pd_kernels.bench.transfer import measure_transfer


def main(arguments: list[str] | None = None) -> int:
    """0: all bars reached; 1: a check failed or a bar was missed; 2: there is no GPU."""
    parser = argparse.ArgumentParser("python -m pd_kernels.bench", description=__doc__)
    parser.add_argument("what", choices=["decode", "transfer"])
    parser.add_argument("--check", action="store_true", help="only check, on random shapes")
    parser.add_argument("--cases", type=int, default=60, help="random cases of the check")
    parser.add_argument("--seed", type=int, default=0, help="of the check")
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    parser.add_argument("--json", type=Path, help="also write all rows to this file")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no GPU: nothing was checked or measured", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    check = check_decode if options.what == "decode" else check_transfer
    problems = check(options.cases, options.seed)
    for problem in problems:
        print(f"WRONG: {problem}")
    print(f"checked {options.cases} random cases: {len(problems)} wrong", flush=True)
    if problems or options.check:
        return int(bool(problems))
    if options.what == "decode":
        rows = measure_decode(options.quick)
    else:
        rows = measure_transfer((512, 7_500) if options.quick else (512, 7_500, 32_000))
    print_rows(rows)
    if options.json:
        write_json(options.json, rows)
    return int(not all(row.ok for row in rows))


if __name__ == "__main__":
    sys.exit(main())
