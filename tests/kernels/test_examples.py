# SPDX-License-Identifier: Apache-2.0
"""The examples in docstrings run, on a CPU and without the interpreter, where the references
compute."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = {
    "pd_kernels.payload": {"plane_bytes"},
    "pd_kernels.transfer.planes": {"Planes.of", "Planes.of_rows"},
    "pd_kernels.transfer.gather": {"gather_pages"},
    "pd_kernels.transfer.scatter": {"scatter_pages"},
    "pd_kernels.transfer.reshard": {"PayloadShape", "reshard"},
    "pd_kernels.transfer.sums": {"finish"},
    "pd_kernels.attention.paged": {"paged_decode", "plan_paged_decode"},
    "pd_kernels.attention.mla": {"mla_decode", "plan_mla_decode"},
    "pd_kernels.attention.decode_plan": {"DecodePlan.fill"},
    "pd_kernels.attention.work_partition": {"partition"},
    "pd_kernels.attention.merge": {"merge_partials"},
    "pd_kernels.attention.mods": {"Mod.of"},
    "pd_kernels.attention.dist": {"dist_attention", "Placement"},
}
"""Modules, and what in them has an example."""

RUN = """
import doctest, importlib, sys
failed = 0
for name in sys.argv[1:]:
    importlib.import_module(name)
    module = sys.modules[name]  # a function of the package may have the same name
    for test in doctest.DocTestFinder().find(module):
        if test.examples:
            print(test.name)
    failed += doctest.testmod(module).failed
sys.exit(failed > 0)
"""


@pytest.fixture(scope="module")
def ran() -> set[str]:
    """Runs all examples, in a process of their own; returns what has one."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(ROOT), str(ROOT / "kernels"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    done = subprocess.run(
        [sys.executable, "-c", RUN, *MODULES],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return set(done.stdout.split())


@pytest.mark.parametrize("module", MODULES)
def test_what_users_call_has_an_example_that_runs(ran: set[str], module: str) -> None:
    assert {f"{module}.{name}" for name in MODULES[module]} <= ran


@pytest.mark.parametrize("command", [[], ["transfer"], ["decode"]])
def test_the_benchmarks_start(command: list[str]) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    done = subprocess.run(
        [sys.executable, "-m", "pd_bench.kernels", *command, "--help"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "{decode,transfer,roof,host}" in done.stdout
