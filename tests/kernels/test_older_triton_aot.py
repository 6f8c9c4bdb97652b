# SPDX-License-Identifier: Apache-2.0
"""The most telling kernels, compiled by the oldest Triton that they are for: what a newer one
compiles well, it may refuse, or spill."""

import sys
from pathlib import Path
from typing import Any

import pytest
import test_decode_aot
import test_transfer_aot
from compiled_reports import compiled_report
from test_decode_aot import REGISTERS, SHARED
from test_transfer_aot import TILE_BYTES, programs, wide

OLDEST = "3.6.0"
FOLDER = Path(sys.prefix, f"triton-{OLDEST}")
NAMES = [
    "paged, fp8",
    "paged, fp8, swapped",
    "mla, 16 heads, fp8",
    "mla, 128 heads",
    "mla, gluon",
    "mixed",
]
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
    not FOLDER.exists(),
    reason=f"no Triton {OLDEST} in {FOLDER.name} of the environment (ci/setup-tests)",
)


def compiled(config: pytest.Config, command: Path, names: list[str]) -> dict[str, Any]:
    report = compiled_report(config, command, names, FOLDER)
    assert report["triton"] == OLDEST
    assert list(report["kernels"]) == names
    kernels: dict[str, Any] = report["kernels"]
    return kernels


def test_decode_kernels_are_as_good_by_the_oldest_triton(pytestconfig: pytest.Config) -> None:
    kernels = compiled(pytestconfig, test_decode_aot.COMMAND, NAMES)
    for name, kernel in kernels.items():
        assert kernel["spills in the loop"] == 0, name
        # It keeps two words for after the loop.
        assert kernel["stack"] <= (8 if name == "mla, 16 heads, fp8" else 0), name
        registers = -(-kernel["registers"] // 8) * 8 * kernel["threads"]
        assert kernel["programs"] * registers <= REGISTERS, name
        assert kernel["programs"] * (kernel["shared"] + 1024) <= SHARED, name
        if name != "mla, gluon":  # whose loads are the TMA's
            assert kernel["groups under way"] > 0, name
            assert kernel["threads"] * kernel["wide loop loads"] >= kernel["tile bytes"], name
    assert kernels["mla, gluon"]["product waits"] == [0, 0, 0, 0, 1, 1]


def test_transfer_kernels_are_as_good_by_the_oldest_triton(pytestconfig: pytest.Config) -> None:
    for name, kernel in compiled(pytestconfig, test_transfer_aot.COMMAND, TRANSFER_NAMES).items():
        assert kernel["stack"] == kernel["flushes"] == 0, name
        assert wide(kernel, "LDG") >= TILE_BYTES[name], name
        assert programs(kernel) >= 1, name
