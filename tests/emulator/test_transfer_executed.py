# SPDX-License-Identifier: Apache-2.0
"""The transfer kernels as they are compiled for sm_90a, executed without a GPU."""

import pytest
from executed import executed

SMALL = (
    *(
        "transfer raw, sums",
        "transfer raw, odd rows",
        "transfer raw, bfloat16 to FP8",
        "transfer fp8, sums",
    ),
    *(
        "transfer fp8, two scales",
        "transfer fp8, edges",
        "transfer int8, sums",
        "transfer int8, MLA",
        "transfer verbatim, sums",
    ),
    *("public, reshard", "public, payload sums"),
)
"""`python -m tests.emulator` executes all."""


@pytest.mark.parametrize("seed", [0, 7])
def test_payload_pages_and_sums_are_those_of_the_reference(seed: int) -> None:
    wanted = dict.fromkeys(SMALL, "")
    assert executed(*SMALL, seed=seed) == wanted
