# SPDX-License-Identifier: Apache-2.0
"""What the compiler makes of the merge for sm_90a, without a GPU.

`python test_merge_aot.py` compiles and prints: a program of its own, because kernels are
interpreted in the process of the tests.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from compiled_reports import compiled_report

SHAPES = {
    "2 shards of 128": (2, 128),
    "8 shards of 128": (8, 128),
    "3 shards of 80": (3, 80),
    "8 shards of 512": (8, 512),
    "4 shards of 256": (4, 256),
}
NARROW = "shards that lie oddly"
ROWS = 100


@pytest.fixture(scope="module")
def kernels(pytestconfig: pytest.Config) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = compiled_report(pytestconfig, Path(__file__))
    return found


@pytest.mark.parametrize("name", SHAPES)
def test_nothing_is_spilled(kernels: dict[str, dict[str, Any]], name: str) -> None:
    assert kernels[name]["stack"] == 0
    assert not [a for a in kernels[name]["accesses"] if a.startswith(("LDL", "STL"))]


@pytest.mark.parametrize("name", SHAPES)
def test_partials_are_read_and_written_16_bytes_at_a_time(
    kernels: dict[str, dict[str, Any]], name: str
) -> None:
    shards = SHAPES[name][0]
    accesses = kernels[name]["accesses"]
    wide = {kind: accesses.get(f"{kind}.E.128", 0) for kind in ("LDG", "STG")}
    assert wide["STG"] == 4
    assert wide["LDG"] == 4 * shards


def test_shards_that_lie_oddly_are_read_in_small_pieces(
    kernels: dict[str, dict[str, Any]],
) -> None:
    """All but the first, which lies at a distance of 0: so that the test above would see it."""
    assert kernels[NARROW]["accesses"]["LDG.E.128"] == 4


@pytest.mark.parametrize("name", SHAPES)
def test_several_programs_fit_on_a_multiprocessor(
    kernels: dict[str, dict[str, Any]], name: str
) -> None:
    kernel = kernels[name]
    assert 65_536 // (-(-kernel["registers"] // 8) * 8 * kernel["threads"]) >= 4
    assert kernel["shared"] <= 8 * 1024


def _main() -> None:
    import torch
    from kernel_aot import report

    from pd_bench.kernels.compiled import compiled
    from pd_kernels.attention.merge import launch_merge

    def launch(shards: int, dim: int, odd: int = 0) -> dict[str, Any]:
        slab = torch.zeros(shards, ROWS * dim + odd)
        outs = slab[:, : ROWS * dim].view(shards, ROWS, dim)
        lses, out = torch.zeros(shards, ROWS), torch.zeros(ROWS, dim)
        kernel: dict[str, Any] = report(compiled(partial(launch_merge, outs, lses, out))[0])
        return kernel

    found = {name: launch(*shape) for name, shape in SHAPES.items()}
    json.dump(found | {NARROW: launch(2, 128, odd=1)}, sys.stdout)


if __name__ == "__main__":
    _main()
