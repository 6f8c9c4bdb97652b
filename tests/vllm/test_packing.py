# SPDX-License-Identifier: Apache-2.0
"""Pages that vLLM's CPU attention writes hold K and V where `vllm/packing.py` says so."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.platforms import current_platform

from pd_connector.pages.tiles import is_tiled
from pd_connector.vllm import packing
from pd_connector.vllm.packing import CpuPacking

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM's CPU build is wanted")

needs_amx = pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="needs a processor with AMX"
)
ISAS = ["vec", pytest.param("amx", marks=needs_amx)]


def known(isa: str | None, page_size: int, dim: int, dtype: torch.dtype) -> bool:
    packing._as_expected.cache_clear()
    spec = SimpleNamespace(head_size=dim, head_size_v=dim, dtype=dtype)
    return CpuPacking(f"CPU_ATTN-{isa}", isa).covers(spec, page_size)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("page_size", [32, 64, 128])
@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_pages_look_as_expected(isa: str, page_size: int, dim: int, dtype: torch.dtype) -> None:
    assert known(isa, page_size, dim, dtype)


def test_pages_in_float32_do_so_without_amx() -> None:
    assert known("vec", 32, 64, torch.float32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("part", [0, 1], ids=["K", "V"])
@pytest.mark.parametrize("axis", [1, 2, 3])
def test_pages_that_look_otherwise_are_noticed(
    isa: str, part: int, axis: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads, tokens (or their tiles) or dims (or tokens of a tile) in another order."""
    right = CpuPacking.halves

    def wrong(self: CpuPacking, *args: object) -> tuple[torch.Tensor, ...]:
        halves = list(right(self, *args))
        halves[part] = halves[part].flip(axis)
        return tuple(halves)

    assert is_tiled(right(CpuPacking("", isa), torch.zeros(2, 2, 32, 64), 32, 32)[part]) == (
        isa == "amx"
    )
    monkeypatch.setattr(CpuPacking, "halves", wrong)
    assert not known(isa, 32, 32, torch.bfloat16)


def test_what_is_not_known_is_not_guessed() -> None:
    assert not known(None, 32, 64, torch.bfloat16), "a layer without an instruction set"
    assert not known("vec", 32, 80, torch.float8_e4m3fn), "vLLM does not write such pages"


_HAS_TILES = """
import ctypes
mask = ctypes.c_ulong()
ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(mask))  # arch_prctl
print(mask.value >> 18 & 1)
"""


@needs_amx
@pytest.mark.parametrize(("asks", "wanted"), [(True, "1"), (False, "0")])
def test_an_engine_may_use_amx_before_its_first_large_product(asks: bool, wanted: str) -> None:
    """Linux tells by ARCH_GET_XCOMP_PERM whether a process has asked for tiles."""
    ask = "from pd_connector.vllm.plugin import ask_for_amx; assert ask_for_amx()" if asks else ""
    command = [sys.executable, "-c", ask + _HAS_TILES]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.split()[-1] == wanted
