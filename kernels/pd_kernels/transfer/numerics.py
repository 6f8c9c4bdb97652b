# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""How elements become codes: device functions of the kernels, and the same in torch.

All of it is done in float32. Scales are never below 2^-126, which is a normal number; none is above
448 * 2^120, so that every reciprocal is a normal number, too.
"""

import torch
import triton
import triton.language as tl

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SMALLEST_SCALE = 2.0**-126

_INFINITE = tl.constexpr(0x7F800000)  # the bits of infinity; those of NaN lie above
_HUGE = tl.constexpr(1e30)
_127TH = tl.constexpr(0.007874015718698502)  # 1 / 127 in float32
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: a sum with it is rounded to a whole number


@triton.jit
def magnitude_bits(value):
    """Bits of |value|, int32: they are in the order of the magnitudes, infinity and NaN last."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def finite_or_nan(value):
    """Infinities become NaN: FP8 has none, and they must stay visible."""
    return tl.where(magnitude_bits(value) == _INFINITE, float("nan"), value)


@triton.jit
def power_scale(bits):
    """The smallest power of two, from 2^-126 up, that brings a magnitude to 448 or less.

    448 is 0.875 * 2^9; 0x600000 is the mantissa of 0.875.
    """
    power = (bits >> 23) - 126 - 9 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.where(bits == 0, 0, tl.maximum(power, -126))


@triton.jit
def power_of_two(power):
    """2^power, float32, for -126 to 127."""
    return ((power + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def corrected(near, value, divisor, reciprocal):
    """`near` less its error, as a quotient of value by divisor. Zeros keep their sign: Triton's
    minus would take it, a product with -1 does not."""
    error = tl.fma(near, divisor, value * -1.0)
    return tl.fma(error * -1.0, reciprocal, near)


@triton.jit
def near_quotient(value, divisor, reciprocal):
    """value / divisor, rounded to nearest even, where that is neither huge nor tiny.

    `reciprocal` is 1 / divisor, rounded to nearest: one correction of the product then gives what
    a division would (Markstein 1990), for a third of its instructions.
    """
    near = value * reciprocal
    return corrected(near, value, divisor, reciprocal)


@triton.jit
def int8_scale(bits):
    """Magnitude / 127, rounded up to bfloat16 and from 2^-126 up; 1 for 0; NaN if not finite."""
    exact = near_quotient(bits.to(tl.float32, bitcast=True), 127.0, _127TH)
    up = ((exact.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)
    scale = tl.where(bits == 0, 1.0, tl.maximum(up, 1.1754943508222875e-38))
    return tl.where(bits >= _INFINITE, float("nan"), scale)


@triton.jit
def int8_codes(quotients):
    """To nearest even, for -127 to 127: with `_ROUND` added, a float's low bits are the number."""
    return (quotients + _ROUND).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def byte_words(codes, VECTORS: tl.constexpr):
    """Eight bytes, uint8 `[VECTORS, 8]`, to a little-endian word: int64 `[VECTORS]`."""
    shifts = (tl.arange(0, 4) * 8)[None, None, :]
    fours = tl.sum(tl.reshape(codes.to(tl.int32), (VECTORS, 2, 4)) << shifts, axis=2)
    low, high = tl.split(fours)
    return (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)


@triton.jit
def stored(value, factor, STEP: tl.constexpr, DTYPE: tl.constexpr):
    """`value`, float32, as a cache of `DTYPE` stores it; FP8 saturates, and has NaN for infinities.

    STEP says what `factor` is for: `times`, `over` (FP8's scale) or `none`.
    """
    if tl.float8e4nv == DTYPE:
        value = finite_or_nan(value)
    if STEP == "times":
        value = value * factor
    elif STEP == "over":
        reciprocal = tl.div_rn(1.0, factor)
        # As near_quotient, of which only what saturates anyway is huge: it must not be infinite.
        near = tl.minimum(tl.maximum(value * reciprocal, -_HUGE), _HUGE)
        value = corrected(near, value, factor, reciprocal)
    return value.to(DTYPE)


def store(value: torch.Tensor, factor: float, step: str, dtype: torch.dtype) -> torch.Tensor:
    """What `stored` does, in torch."""
    scale = torch.full((), factor, device=value.device)  # torch multiplies by a number's reciprocal
    scaled = value * scale if step == "times" else value / scale if step == "over" else value
    if dtype != FP8:
        return scaled.to(dtype)
    return scaled.clamp(-FP8_MAX, FP8_MAX).masked_fill(value.isinf(), torch.nan).to(FP8)


def power_scales(values: torch.Tensor) -> torch.Tensor:
    """Per head of float32 `[head, token, dim]`: what `power_scale` says of the finite ones."""
    finite = values.abs().masked_fill(~values.isfinite(), 0.0)
    mantissa, exponent = torch.frexp(finite.amax((1, 2)))
    power = (exponent - 9 + (mantissa > 0.875)).clamp(min=-126)
    scales = ((power + 127) << 23).to(torch.int32).view(torch.float32)
    return torch.where(mantissa == 0, torch.ones_like(scales), scales)


def int8_scales(values: torch.Tensor, axis: int) -> torch.Tensor:
    """float32 scales, all of them bfloat16 values, of groups along `axis`, which is kept."""
    largest = values.abs().amax(axis, keepdim=True)  # NaN where one is
    exact = largest / torch.full_like(largest, 127.0)
    down = exact.view(torch.int32) & -0x10000
    up = torch.where(down.view(torch.float32) < exact, down + 0x10000, down).view(torch.float32)
    scales = torch.where(largest == 0, torch.ones_like(up), up.clamp(min=SMALLEST_SCALE))
    return torch.where(largest.isfinite(), scales, torch.full_like(scales, torch.nan))
