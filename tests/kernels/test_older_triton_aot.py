# SPDX-License-Identifier: Apache-2.0
"""The most telling kernels, compiled by the oldest Triton that they are for: what a newer one
compiles well, it may refuse, or spill."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import test_decode_aot
import test_transfer_aot
from test_decode_aot import REGISTERS, SHARED
from test_transfer_aot import TILE_BYTES, programs, wide

from pd_kernels.transfer.gather_fp8_kernel import PROGRAMS

OLDEST = "3.6.0"
FOLDER = Path(sys.prefix, f"triton-{OLDEST}")
NAMES = ["paged, fp8", "mla, 16 heads, fp8", "mla, 128 heads", "mla, gluon", "mixed"]
"""One for each loop over tiles."""
TRANSFER_NAMES = [
    "gather raw, sums",
    "gather verbatim, sums",
    "gather fp8, sums",
    "gather int8, sums",
    "scatter raw, sums",
    "scatter fp8, sums",
    "scatter int8, sums",
    "reshard",
]

pytestmark = pytest.mark.skipif(
    not FOLDER.exists(), reason=f"no Triton {OLDEST} in {FOLDER.name} of the environment (ci/setup)"
)


def compiled(command: Path, names: list[str]) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    environment["PYTHONPATH"] = os.pathsep.join([str(FOLDER), str(root), str(root / "kernels")])
    done = subprocess.run(
        [sys.executable, str(command), *names],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["triton"] == OLDEST
    assert list(report["kernels"]) == names
    kernels: dict[str, Any] = report["kernels"]
    return kernels


def test_decode_kernels_are_as_good_by_the_oldest_triton() -> None:
    kernels = compiled(test_decode_aot.COMMAND, NAMES)
    for name, kernel in kernels.items():
        assert kernel["stack"] == kernel["spills"] == 0, name
        registers = -(-kernel["registers"] // 8) * 8 * kernel["threads"]
        assert kernel["programs"] * registers <= REGISTERS, name
        assert kernel["programs"] * (kernel["shared"] + 1024) <= SHARED, name
        if name != "mla, gluon":  # whose loads are the TMA's
            assert kernel["groups under way"] > 0, name
            assert kernel["threads"] * kernel["wide loop loads"] >= kernel["tile bytes"], name
    assert kernels["mla, gluon"]["product waits"] == [0, 0, 0, 0, 1, 1]


def test_transfer_kernels_are_as_good_by_the_oldest_triton() -> None:
    for name, kernel in compiled(test_transfer_aot.COMMAND, TRANSFER_NAMES).items():
        assert kernel["stack"] == kernel["flushes"] == 0, name
        assert wide(kernel, "LDG") >= TILE_BYTES[name], name
        assert programs(kernel) >= (PROGRAMS if name.startswith("gather fp8") else 1), name
