# SPDX-License-Identifier: Apache-2.0
"""What the compiler makes of each kernel for sm_90a: registers, spills, and how wide memory is
read.

No GPU is needed. What is asserted here is what a kernel needs to run at the speed of the memory,
not that it does.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from compiled_reports import compiled_report

REGISTERS = 65_536  # of a multiprocessor
LOAD_S = 1.5e-6  # how long a load takes while the memory is busy
COPY_BYTES_PER_S = 4.3e12  # of an H200, reads and writes together
MULTIPROCESSORS = 132

COMMAND = Path(__file__).with_name("kernel_aot.py")
WIDE = r"\.E(\.EF)?\.128"
"""An access of 16 bytes, in its name. EF says `evict_first`."""


# Bytes that one program reads of the cache or the payload, where that is what it waits for.
TILE_BYTES = {
    "gather raw": 16_384,
    "gather raw, sums": 16_384,
    "gather raw, MLA": 16_384,
    "gather raw, 192 and 128": 16_384,
    "gather verbatim": 16_384,
    "gather verbatim, sums": 16_384,
    "gather fp8": 32_768,  # 128 tokens of a head
    "gather fp8, sums": 32_768,
    "gather fp8, MLA": 147_456,
    "gather fp8, scale given": 32_768,
    "gather fp8, 192 and 128": 49_152,
    "gather fp8, float16": 32_768,
    "gather fp8, float32": 65_536,
    "gather int8": 12_288,  # K and V
    "gather int8, sums": 12_288,
    "gather int8, MLA": 16_384,
    "gather int8, float32": 24_576,
    "scatter raw": 16_384,
    "scatter raw, sums": 16_384,
    "scatter fp8": 8_192,
    "scatter fp8, sums": 8_192,
    "scatter int8": 8_192,
    "scatter int8, sums": 8_192,
    "scatter int8, MLA": 8_192,
    "scatter int8, 192 and 128": 8_192,
    "scatter int8 to FP8, sums": 8_192,
    "scatter raw to FP8": 16_384,
    "scatter raw FP8 to bfloat16": 8_192,
    "reshard": 16_384,
    "payload sums": 16_384,
}

# Kernels whose rows, in memory or in a program, are too short for that.
SLOWER = (
    "gather raw, odd rows",
    "gather int8, 80",
    "scatter raw, odd rows",
    "scatter int8, odd rows",
)


@pytest.fixture(scope="module")
def kernels(pytestconfig: pytest.Config) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = compiled_report(pytestconfig, COMMAND)["kernels"]
    return found


def wide(kernel: dict[str, Any], kind: str) -> int:
    """Bytes that the program's threads together read or write 16 at a time, in the code as it
    lies."""
    found = sum(n for name, n in kernel["accesses"].items() if re.match(kind + WIDE, name))
    return 16 * found * int(kernel["threads"])


def programs(kernel: dict[str, Any]) -> int:
    """Programs that fit on a multiprocessor by their registers, which are allocated by eights."""
    return REGISTERS // (-(-kernel["registers"] // 8) * 8 * kernel["threads"])


@pytest.mark.parametrize("name", [*TILE_BYTES, *SLOWER])
def test_nothing_is_spilled(kernels: dict[str, dict[str, Any]], name: str) -> None:
    kernel = kernels[name]
    assert kernel["stack"] == 0
    assert not [access for access in kernel["accesses"] if access.startswith(("LDL", "STL"))]


@pytest.mark.parametrize("name", TILE_BYTES)
def test_rows_are_read_and_written_16_bytes_at_a_time(
    kernels: dict[str, dict[str, Any]], name: str
) -> None:
    kernel = kernels[name]
    assert wide(kernel, "LDG") >= TILE_BYTES[name]
    if name != "payload sums":
        written = 1
        if name.startswith(("gather fp8", "gather int8")):
            written = TILE_BYTES[name] // (4 if "float32" in name else 2)
        assert wide(kernel, "STG") >= max(written, 16 * kernel["threads"])


def test_an_odd_row_is_read_in_small_pieces(kernels: dict[str, dict[str, Any]]) -> None:
    """Negative control of the test above."""
    assert wide(kernels["gather raw, odd rows"], "LDG") == 0


def read_share(name: str) -> float:
    """The part of the bytes that a kernel moves which it reads."""
    if name == "payload sums":
        return 1.0
    if "float32" in name:
        return 4 / 5
    if "fp8" in name or "int8" in name or "FP8" in name:
        return 2 / 3 if name.startswith("gather") else 1 / 3
    return 1 / 2


@pytest.mark.parametrize("name", TILE_BYTES)
def test_enough_loads_are_under_way_to_keep_the_memory_busy(
    kernels: dict[str, dict[str, Any]], name: str
) -> None:
    """A third of the programs on a multiprocessor is not loading, because it codes or writes."""
    kernel = kernels[name]
    wanted = COPY_BYTES_PER_S * read_share(name) * LOAD_S / MULTIPROCESSORS
    assert programs(kernel) * TILE_BYTES[name] * 2 / 3 >= wanted
    assert programs(kernel) * kernel["shared"] <= 200 * 1024


@pytest.mark.parametrize("name", [*TILE_BYTES, *SLOWER])
def test_what_is_read_once_gives_way_in_the_l2(
    kernels: dict[str, dict[str, Any]], name: str
) -> None:
    """So that a transfer does not displace what the engine's own kernels keep there."""
    assert (kernels[name]["evict first"] > 0) == name.startswith(("gather", "scatter"))


@pytest.mark.parametrize("name", ["gather fp8", "gather fp8, sums", "gather int8", "gather raw"])
def test_a_thread_has_several_loads_under_way(
    kernels: dict[str, dict[str, Any]], name: str
) -> None:
    """64 bytes and more, before it waits for the first of them."""
    assert kernels[name]["loads at once"] >= 4


@pytest.mark.parametrize("codec", ["fp8", "int8"])
def test_elements_are_compared_and_coded_two_at_a_time(
    kernels: dict[str, dict[str, Any]], codec: str
) -> None:
    """Where they have 16 bits."""
    packed, plain = kernels[f"gather {codec}"], kernels[f"gather {codec}, float32"]
    assert packed["packed"]["max.u16x2"] > 0
    assert plain["packed"]["max.u16x2"] == 0
    if codec == "fp8":
        assert packed["packed"]["cvt.rn.satfinite.e4m3x2.f32"] == 32  # of 64 elements of a thread


@pytest.mark.parametrize("name", [*TILE_BYTES, *SLOWER])
def test_subnormal_numbers_are_not_flushed(kernels: dict[str, dict[str, Any]], name: str) -> None:
    assert kernels[name]["flushes"] == 0
