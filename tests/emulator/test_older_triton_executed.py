# SPDX-License-Identifier: Apache-2.0
"""Kernels as the oldest Triton that they are for compiles them."""

import sys
from pathlib import Path

import pytest
from executed import executed

FOLDER = Path(sys.prefix, "triton-3.6.0")
NAMES = (
    *("transfer fp8, edges", "transfer int8, sums", "paged, fp8", "paged, 8 queries", "gluon"),
    *("swapped", "swapped, 32 lines", "mla, 40 heads, split"),
)
"""Each loop over tiles, and each way to products of `wgmma`."""

pytestmark = pytest.mark.skipif(
    not FOLDER.exists(), reason=f"no Triton in {FOLDER.name} of the environment (ci/setup-tests)"
)


def test_kernels_are_right_by_the_oldest_triton() -> None:
    assert executed(*NAMES, triton=FOLDER) == dict.fromkeys(NAMES, "")


def test_the_fence_that_the_oldest_triton_leaves_out_is_missed() -> None:
    """Triton 3.9 puts one between copies and products. Without the kernels' own (`load_fence.py`) a GPU may multiply
    what was in shared memory before."""
    name = "paged, 8 queries"
    found = executed(name, arguments=["--damage=order", "--every=1"], triton=FOLDER)[name]
    assert any("no fence.proxy.async since" in problem for problem in found.values())
