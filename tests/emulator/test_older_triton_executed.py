# SPDX-License-Identifier: Apache-2.0
"""Kernels as the oldest Triton that they are for compiles them."""

import sys
from pathlib import Path

import pytest
from executed import executed

FOLDER = Path(sys.prefix, "triton-3.6.0")
SMALL = ("transfer fp8, edges", "transfer int8, sums", "paged, fp8", "paged, 8 queries", "gluon")
FENCED = ("swapped", "gluon")
"""Kernels that need no `--no-proxies`: what `wgmma` reads, threads or the TMA have written."""

pytestmark = pytest.mark.skipif(
    not FOLDER.exists(), reason=f"no Triton in {FOLDER.name} of the environment (ci/setup)"
)


def test_kernels_are_right_by_the_oldest_triton() -> None:
    found = executed(*SMALL, arguments=["--no-proxies"], triton=FOLDER)
    assert found == dict.fromkeys(SMALL, "")


def test_products_whose_operands_threads_have_written_are_fenced() -> None:
    assert executed(*FENCED, triton=FOLDER) == dict.fromkeys(FENCED, "")


def test_the_oldest_triton_puts_no_fence_between_copies_and_products() -> None:
    """Triton 3.9 does. Without the fence a GPU may multiply what was in shared memory before (docs/kernels.md)."""
    name = "paged, 8 queries"
    assert "no fence.proxy.async" in executed(name, triton=FOLDER)[name]


def test_the_oldest_triton_sets_a_constant_operand_behind_the_fence() -> None:
    """A product's left operand of ones: its register is written between `wgmma.fence` and the product. Triton 3.9 writes
    it before (docs/kernels.md)."""
    name = "swapped, 32 lines"
    assert "no wgmma.fence" in executed(name, triton=FOLDER)[name]
