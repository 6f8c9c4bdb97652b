# SPDX-License-Identifier: Apache-2.0
"""What the compiler makes of the decode kernels for sm_90a: no GPU is needed.

What is asserted here is what a kernel needs to run at the speed of the memory, not that it does.
"""

from pathlib import Path
from typing import Any

import pytest
from compiled_reports import compiled_report

REGISTERS = 65_536  # of a multiprocessor
SHARED = 227 * 1024  # of a multiprocessor, for all programs, each of which costs 1 KiB more
COMMAND = Path(__file__).with_name("decode_aot.py")
MANY_HEADS = "mla, 128 heads"
FEW_CODED = "mla, 16 heads, fp8"
KERNELS = [
    "paged",
    "paged, page 64, window and mods",
    "paged, fp8",
    "paged, fp8, swapped",
    "paged, 4 queries",
    "paged, 8 queries",
    "mla, 16 heads",
    "mla, 16 heads, 4 queries",
    MANY_HEADS,
    "mla, 128 heads, fp8",
    "mla, 128 heads, page 16",
    FEW_CODED,
    "paged, dim 256, 8 queries, fp8",
    "paged, dim 80",
    "paged, jagged",
    "paged, listed tiles",
]
PLANNED_PRODUCTS = [
    *("paged, 8 queries", "paged, dim 256, 8 queries, fp8", "mla, 16 heads, 4 queries"),
    "paged, fp8, swapped",
    *(name for name in KERNELS if MANY_HEADS in name),
]
"""Kernels with rows of 64 lines, or with tokens as lines, which asynchronous products (wgmma) take."""

EXPOSED = ("paged, 8 queries", "paged, dim 256, 8 queries, fp8")
"""Known to be slow: with wgmma, Triton's loop over two stages waits for all loads before it
computes."""


@pytest.fixture(scope="module")
def report(pytestconfig: pytest.Config) -> dict[str, Any]:
    return compiled_report(pytestconfig, COMMAND)


@pytest.fixture(scope="module")
def kernels(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = report["kernels"]
    return found


MIXED = ["mixed", "mixed, fp8"]
"""Prefills and decodes in one launch: two loops over tiles, of which the smaller one is counted."""


@pytest.mark.parametrize("name", ["plan", "tile mask", *KERNELS, *MIXED])
def test_nothing_is_spilled(report: dict[str, Any], name: str) -> None:
    """But for one number a row, outside the loop over tiles, where tiles are those of a list."""
    kernel = report["kernels"][name]
    if name == "paged, listed tiles":
        assert kernel["spills in the loop"] == 0
        assert kernel["stack"] <= 8
    else:
        assert kernel["stack"] == kernel["spills"] == 0


@pytest.mark.parametrize("name", KERNELS)
def test_each_turn_of_the_loop_loads_a_whole_tile_asynchronously(
    kernels: dict[str, dict[str, Any]], name: str
) -> None:
    """The loop only: loads of its prologue do not count."""
    kernel = kernels[name]
    assert kernel["threads"] * kernel["loop loads"] >= kernel["tile bytes"]
    assert kernel["threads"] * kernel["wide loop loads"] >= kernel["tile bytes"]


@pytest.mark.parametrize("name", KERNELS)
def test_a_tile_is_under_way_while_another_one_is_computed(
    kernels: dict[str, dict[str, Any]], name: str
) -> None:
    if name in EXPOSED and not kernels[name]["groups under way"]:
        pytest.xfail("each turn of the loop waits for the tile that it has just begun to load")
    assert kernels[name]["groups under way"] > 0


@pytest.mark.parametrize("name", [*KERNELS, *MIXED])
def test_kv_that_is_read_once_gives_way_in_the_l2(
    kernels: dict[str, dict[str, Any]], name: str
) -> None:
    assert kernels[name]["evict first"] > 0


def test_a_loop_that_waits_for_each_tile_is_noticed(kernels: dict[str, dict[str, Any]]) -> None:
    """Negative control of the test above."""
    assert kernels["paged, two stages"]["groups under way"] == 0


def test_fp8_codes_are_read_in_wide_words_and_converted_once(
    kernels: dict[str, dict[str, Any]],
) -> None:
    """A tile of FP8 is half as many bytes as one of bfloat16, and costs less than twice as many
    instructions."""
    assert kernels["paged, fp8"]["loop instructions"] < 2 * kernels["paged"]["loop instructions"]


def test_swapped_operands_leave_room_for_one_program_more(
    kernels: dict[str, dict[str, Any]],
) -> None:
    """Results of 8 lines instead of 16 take fewer registers."""
    assert kernels["paged, fp8, swapped"]["programs"] > kernels["paged, fp8"]["programs"]
    assert set(kernels["paged, fp8, swapped"]["products"]) == {"m64n8k16"}


def test_fp8_latents_of_few_lines_are_not_written_once_more(
    kernels: dict[str, dict[str, Any]],
) -> None:
    """With more lines, the codes of a tile go back to shared memory as matrices of bfloat16 for 64
    lines, and each product is waited for."""
    words, plain = kernels[FEW_CODED], kernels["mla, 128 heads, fp8"]
    assert words["product waits"] == []
    assert len(plain["product waits"]) > 4
    assert words["wide loop stores"] == 0
    assert 16 * plain["threads"] * plain["wide loop stores"] >= plain["tile bytes"]


@pytest.mark.parametrize("name", [*KERNELS, *MIXED])
def test_as_many_programs_fit_on_a_multiprocessor_as_are_launched(
    kernels: dict[str, dict[str, Any]], name: str
) -> None:
    kernel = kernels[name]
    registers = -(-kernel["registers"] // 8) * 8 * kernel["threads"]
    assert kernel["programs"] * registers <= REGISTERS
    assert kernel["programs"] * (kernel["shared"] + 1024) <= SHARED


@pytest.mark.parametrize("name", KERNELS)
def test_products_are_the_tensor_cores(kernels: dict[str, dict[str, Any]], name: str) -> None:
    kernel = kernels[name]
    if name in PLANNED_PRODUCTS:
        assert kernel["wgmma"] > 0
        assert kernel["mma"] == 0
    else:
        assert kernel["mma"] > 0
        assert kernel["wgmma"] == 0


def test_slices_of_a_latent_do_not_wait_for_each_other(kernels: dict[str, dict[str, Any]]) -> None:
    """A slice of 128 elements is 8 products. A chain of all slices is 36."""
    assert kernels["mla, 16 heads"]["product chain"] == 8


@pytest.mark.parametrize("name", MIXED)
def test_prefills_take_asynchronous_products_and_decodes_those_of_few_lines(
    kernels: dict[str, dict[str, Any]], name: str
) -> None:
    kernel = kernels[name]
    assert kernel["wgmma"] > 0
    assert kernel["mma"] > 0
    assert kernel["groups under way"] > 0
    assert kernel["threads"] * kernel["wide loop loads"] >= kernel["tile bytes"]


@pytest.mark.parametrize("name", KERNELS)
def test_enough_bytes_are_under_way_to_keep_the_memory_busy(
    kernels: dict[str, dict[str, Any]], name: str
) -> None:
    """4.3 TB/s for a microsecond, which a load takes, on 132 multiprocessors: 33 kB each."""
    kernel = kernels[name]
    tiles = max(1, kernel["groups under way"] // max(1, kernel["groups a turn"]))
    assert kernel["programs"] * tiles * kernel["tile bytes"] >= 4.3e12 * 1e-6 / 132


def test_a_kernel_that_needs_more_registers_than_there_are_is_noticed(
    kernels: dict[str, dict[str, Any]],
) -> None:
    """Negative control of the tests above."""
    assert kernels["paged, few registers"]["spills"] > 0
    assert kernels["paged, few registers"]["spills in the loop"] > 0


def test_the_gluon_kernel_multiplies_each_tile_once(report: dict[str, Any]) -> None:
    """64 x 64 scores of a tile are 36 products (576 of depth), for each of two sides and their own
    tiles; weights times latents are 4 for each half of two tiles."""
    kernel = report["kernels"]["mla, gluon"]
    assert kernel["products"] == {"m64n64k16": 2 * 36, "m64n256k16": 2 * 2 * 4}


def test_the_gluon_kernel_waits_for_products_one_tile_at_a_time(report: dict[str, Any]) -> None:
    """A side gives its first tile back while the second is multiplied. The assembler adds no waits
    of its own, as it does where products cannot overlap. The Triton kernel waits for each product."""
    kernel = report["kernels"]["mla, gluon"]
    assert kernel["product waits"] == [0, 0, 0, 0, 1, 1]
    assert kernel["hardware waits"] == len(kernel["product waits"])
    assert max(report["kernels"][MANY_HEADS]["product waits"]) == 0


def test_the_gluon_kernel_loads_by_tma_and_fits(report: dict[str, Any]) -> None:
    """Boxes are 64 elements wide, at most: 18 for two tiles of 576. Three warpgroups have all
    registers."""
    kernel = report["kernels"]["mla, gluon"]
    assert kernel["tma"] == 18
    assert kernel["stack"] == kernel["spills"] == 0
    assert kernel["threads"] * kernel["registers"] <= REGISTERS
    assert kernel["shared"] + 1024 <= SHARED
