# SPDX-License-Identifier: Apache-2.0
"""What the interpreter gets wrong without the patches of this folder: they are needed, and enough.

bfloat16 arithmetic is wrong, too, and cannot be corrected: kernels take float32 instead.
"""

from typing import Any

import kernel_traps
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from pd_kernels.attention.paged_codes import two_halves
from pd_kernels.transfer.numerics import near_quotient


def test_a_numpy_that_the_interpreter_cannot_use_is_named() -> None:
    def refused() -> None:
        raise TypeError("only 0-dimensional arrays can be converted to Python scalars")

    told = kernel_traps.problem(refused)
    assert np.__version__ in told
    assert "install numpy<2.5, or triton>=3.9" in told
    assert not kernel_traps.problem()


@triton.runtime.interpreter.InterpretedFunction
def cast(source, target, COUNT: tl.constexpr, DTYPE: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(target + place, tl.load(source + place).to(DTYPE))


@triton.runtime.interpreter.InterpretedFunction
def double(source, target, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(target + place, tl.load(source + place) * 2)


@triton.runtime.interpreter.InterpretedFunction
def divide(value, divisor, target, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    x, y = tl.load(value + place), tl.load(divisor + place)
    tl.store(target + place, near_quotient(x, y, tl.div_rn(1.0, y)))


@triton.runtime.interpreter.InterpretedFunction
def take_apart(source, low, high, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    even, odd = two_halves(tl.load(source + place))
    tl.store(low + place, even)
    tl.store(high + place, odd)


def test_words_of_two_codes_are_taken_apart() -> None:
    """By the instructions that the kernel names, for all words: with its selector of bytes."""
    words = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    low, high = (torch.empty(1 << 16, dtype=torch.float16) for _ in range(2))
    take_apart[(1,)](words, low, high, COUNT=1 << 16)
    codes = words.view(torch.uint8).view(torch.float8_e4m3fn).half().view(-1, 2)
    for found, wanted in zip((low, high), codes.unbind(1), strict=True):
        assert torch.allclose(found, wanted, rtol=0, atol=0, equal_nan=True)


NUMBERS = torch.cat(
    [
        torch.randn(3000, generator=torch.Generator().manual_seed(1)) * 60,
        torch.tensor(
            [31.4, 127.9, 17.0, 19.0, 460.0, 1e9, -1e9, 2.0**-10, 3 * 2.0**-10, 0.0, -0.0]
        ),
    ]
).repeat(2)[:4096]
"""Numbers with codes that round up into the next power of two, ties, saturation and subnormal codes."""


def as_fp8(numbers: torch.Tensor) -> torch.Tensor:
    found = torch.empty(len(numbers), dtype=torch.uint8)
    cast[(1,)](numbers, found.view(torch.float8_e4m3fn), COUNT=len(numbers), DTYPE=tl.float8e4nv)
    return found


def test_casts_to_fp8_are_right_with_the_patch_and_wrong_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = NUMBERS.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(as_fp8(NUMBERS), wanted)
    monkeypatch.setattr(interpreter, "_convert_float", kernel_traps._theirs)
    assert (as_fp8(NUMBERS) != wanted).any(), "the interpreter is right: the patch can go"


def test_arithmetic_in_bfloat16_is_wrong_so_that_no_kernel_may_use_it() -> None:
    x = torch.tensor([1.0, 1.5, 3.0, -2.0], dtype=torch.bfloat16)
    found = torch.empty_like(x)
    try:
        double[(1,)](x, found, COUNT=4)
    except Exception:
        return  # which is fine: nothing is silently wrong
    assert not torch.equal(found, x * 2), "the interpreter is right: say so in docs/kernels.md"


def quotients(value: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    found = torch.empty(4096)
    divide[(1,)](value, divisor, found, COUNT=4096)
    return found


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(2)
    divisor = (torch.rand(4096, generator=source) + 0.01).to(torch.bfloat16).float()
    return (torch.randn(4096, generator=source) * 50).to(dtype).float(), divisor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_fused_multiply_add_rounds_once(dtype: torch.dtype) -> None:
    """Else a quotient by its reciprocal would be off here and right on a GPU."""
    value, divisor = operands(dtype)
    assert torch.equal(quotients(value, divisor), value / divisor)


@pytest.mark.skipif(not kernel_traps.FMA_IS_WRONG, reason="Triton 3.9 rounds once by itself")
def test_a_fused_multiply_add_is_wrong_without_the_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(_: Any, x: Any, y: Any, z: Any) -> Any:
        return interpreter.TensorHandle(x.data * y.data + z.data, z.dtype.scalar)

    value, divisor = operands(torch.float32)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", twice)
    assert not torch.equal(quotients(value, divisor), value / divisor)
