# SPDX-License-Identifier: Apache-2.0
"""The most telling decode kernels, compiled by the oldest Triton that they are for: what a newer one
compiles well, it may refuse, or spill."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_decode_aot import COMMAND, REGISTERS, SHARED

OLDEST = "3.6.0"
FOLDER = Path(sys.prefix, f"triton-{OLDEST}")
NAMES = ["paged, fp8", "mla, 16 heads, fp8", "mla, 128 heads", "mla, gluon", "mixed"]
"""One for each loop over tiles."""


@pytest.mark.skipif(
    not FOLDER.exists(), reason=f"no Triton {OLDEST} in {FOLDER.name} of the environment (ci/setup)"
)
def test_kernels_are_as_good_by_the_oldest_triton() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    environment["PYTHONPATH"] = os.pathsep.join([str(FOLDER), str(root), str(root / "kernels")])
    done = subprocess.run(
        [sys.executable, str(COMMAND), *NAMES],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["triton"] == OLDEST
    assert list(report["kernels"]) == NAMES
    for name, kernel in report["kernels"].items():
        assert kernel["stack"] == kernel["spills"] == 0, name
        registers = -(-kernel["registers"] // 8) * 8 * kernel["threads"]
        assert kernel["programs"] * registers <= REGISTERS, name
        assert kernel["programs"] * (kernel["shared"] + 1024) <= SHARED, name
        if name != "mla, gluon":  # whose loads are the TMA's
            assert kernel["groups under way"] > 0, name
            assert kernel["threads"] * kernel["wide loop loads"] >= kernel["tile bytes"], name
    assert report["kernels"]["mla, gluon"]["product waits"] == [0, 0, 0, 0, 1, 1]
