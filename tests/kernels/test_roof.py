# SPDX-License-Identifier: Apache-2.0
"""A kernel cannot become slower, or spill, without a changed table in docs/kernels.md.

`python test_roof.py` compiles and prints: a program of its own, because kernels are interpreted in
the process of the tests.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from compiled_reports import compiled_report

from pd_bench.kernels.roof import BEGIN, END, HEADER, table, write_table
from pd_bench.kernels.roof_cases import DECODES, TRANSFERS
from pd_bench.kernels.sass import Cost, full_path, instructions, product_loops

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
GOALS = {"raw": 0.88, "int8": 0.80, "fp8": 0.80}
"""The least part of a copy's rate on an H200, for transfers by codec; sums are always asked for."""

SLOW = {
    "paged, fp8, 32 lines": "each warp reads all queries, and weights are exchanged; swapped operands do not",
    "mla, 16 heads, 4 queries": "all scores are multiplied in both warpgroups; Gluon, which Hopper takes, does it once",
    "mla, 128 heads": "as above",
    "mla, 128 heads, fp8": "as above; Gluon does not take FP8 latents",
}
"""Decode kernels that the memory does not limit on an H200, and why."""

ODD = "gather raw, rows not aligned"


@pytest.fixture(scope="module")
def report(pytestconfig: pytest.Config) -> dict[str, Any]:
    return compiled_report(pytestconfig, Path(__file__))


@pytest.fixture(scope="module")
def rows(report: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {row[0]: dict(zip(HEADER, row, strict=True)) for row in report["rows"]}


def written_table(page: Path) -> str:
    """The table that a page of the documentation has."""
    return page.read_text().partition(BEGIN)[2].partition(END)[0].strip()


def changed(before: str, after: str) -> list[str]:
    """The lines of a table that another one does not have."""
    kept = set(before.splitlines())
    return [line for line in after.splitlines() if line not in kept]


def test_the_table_of_the_documentation_is_that_of_this_code(report: dict[str, Any]) -> None:
    made = table(tuple(row) for row in report["rows"] if row[0] != ODD)
    assert changed(written_table(PAGE), made) == [], (
        f"{PAGE.name} was made of other code, or by another Triton than {report['triton']}: look "
        "whether it is worse, then run `python -m pd_bench.kernels roof --docs docs/kernels.md`"
    )


@pytest.mark.parametrize("name", [case.name for case in TRANSFERS])
def test_a_transfer_can_be_as_fast_as_its_goal(rows: dict[str, Any], name: str) -> None:
    codec = next((codec for codec in GOALS if codec in name), "raw")
    assert float(rows[name]["H200"]) >= GOALS[codec]


def test_narrow_accesses_are_noticed(rows: dict[str, Any]) -> None:
    """Negative control: rows that are not aligned are read 2 bytes at a time."""
    assert "x16" not in rows[ODD]["loads"]
    assert int(rows[ODD]["instructions"]) > int(rows["gather raw"]["instructions"])


@pytest.mark.parametrize("name", [case.name for case in DECODES])
def test_memory_limits_decode_but_where_it_is_known(rows: dict[str, Any], name: str) -> None:
    assert (float(rows[name]["H200"]) < 1) == (name in SLOW)


@pytest.mark.parametrize("name", [case.name for case in (*TRANSFERS, *DECODES)])
def test_nothing_is_spilled(rows: dict[str, Any], name: str) -> None:
    assert rows[name]["stack"] == "0"


def test_a_page_gets_its_table(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_table(page, "new")
    assert page.read_text() == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    assert written_table(page) == "new"
    assert changed("one\ntwo", "one\nthree") == ["three"]


KERNEL = """
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0010*/              @!P0 BRA 0x50 ;
        /*0020*/                   MUFU.RCP R1, R1 ;
        /*0030*/                   STG.E.U16 desc[UR4][R2.64], R4 ;
        /*0040*/                   EXIT ;
        /*0050*/               @P1 BRA 0x70 ;
        /*0060*/                   SHFL.BFLY PT, R1, R1, 0x1, 0x1f ;
        /*0070*/                   STG.E.128 desc[UR4][R2.64], R4 ;
        /*0080*/               @P2 BRA 0x50 ;
        /*0090*/              @!P1 EXIT ;
        /*00a0*/                   NOP ;
        /*00b0*/                   EXIT ;
        /*00c0*/                   BRA 0xc0;
"""
LOOP = """
        /*0000*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0010*/                   LDSM.16.M88.4 R8, [R2] ;
        /*0020*/              @!P1 BRA 0x40 ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR16], R24 ;
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, R20, gdesc[UR16], R24 ;
        /*0050*/               @P0 BRA 0x10 ;
        /*0060*/                   BRA P3, 0x0 ;
        /*0070*/                   EXIT ;
"""


def test_the_path_of_a_full_tile_stores_the_most_and_is_the_shortest() -> None:
    path = full_path(instructions(KERNEL))
    assert [each.address for each in path] == [0x00, 0x10, 0x50, 0x70, 0x80, 0x90, 0xA0, 0xB0]
    cost = Cost.of(path, warps=8)
    assert (cost.counts["LDG 16"], cost.counts["STG 16"], cost.counts.get("SHFL")) == (1, 1, None)
    assert cost.cycles == {"issue": 7 * 2, "memory": 2 * 16 * 2}


def test_code_without_a_way_out_is_refused() -> None:
    with pytest.raises(ValueError, match="no way leads"):
        full_path(instructions(KERNEL)[:3])


def test_the_innermost_loop_is_counted_with_all_its_products() -> None:
    (turn,) = product_loops(instructions(LOOP))
    assert [each.address for each in turn] == [0x10, 0x20, 0x30, 0x40, 0x50]
    cost = Cost.of(turn, warps=4)
    assert cost.cycles["tensor"] == 2 * 64 * 64 * 16 / 2_048
    both, right = (64 + 64) * 16 * 2 / 128, 64 * 16 * 2 / 128
    assert cost.cycles["operands"] == both + right
    assert cost.cycles["memory"] == 512 / 128 * 4  # 512 bytes for each of four warps


def _main() -> None:
    from dataclasses import replace

    import torch
    import triton

    from pd_bench.kernels.roof import Roof
    from pd_bench.kernels.sample_launches import chunk
    from pd_kernels.transfer.gather import launch_gather

    raw = ("raw", torch.bfloat16, torch.bfloat16, True)
    odd = replace(TRANSFERS[0], name=ODD, launch=lambda: launch_gather(chunk(*raw, odd=True)))
    rows = [Roof.of(case).row for case in (*TRANSFERS, *DECODES, odd)]
    json.dump({"triton": triton.__version__, "rows": rows}, sys.stdout)


if __name__ == "__main__":
    _main()
