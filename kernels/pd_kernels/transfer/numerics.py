# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The arithmetic that turns elements into codes: device functions for the kernels, and the same in
torch.

Everything is computed in float32. Scales lie between 2^-126 and 448 * 2^120. So each scale and its
reciprocal are normal numbers, which no GPU flushes to zero.
"""

import torch
import triton
import triton.language as tl

from pd_kernels.payload import INT8_MAX, SMALLEST_SCALE

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0

_INFINITE = tl.constexpr(0x7F800000)  # the bits of infinity; the bits of NaN are greater
_HUGE = tl.constexpr(1e30)
_INT8_MAX = tl.constexpr(INT8_MAX)
_127TH = tl.constexpr(0.007874015718698502)  # 1 / INT8_MAX in float32
_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds a float to a whole number


@triton.jit
def magnitude_bits(value):
    """Bits of |value|, int32. They order like the magnitudes, with infinity and NaN last."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def finite_or_nan(value):
    """Turn infinities into NaN. FP8 has no infinity, and a saturated infinity would stay
    unnoticed."""
    return tl.where(magnitude_bits(value) == _INFINITE, float("nan"), value)


@triton.jit
def power_scale(bits):
    """Exponent of the smallest power of two, at least 2^-126, that scales a magnitude to 448 or
    less.

    `bits` are the bits of the magnitude. 448 is 0.875 * 2^9; 0x600000 is the mantissa of 0.875.
    """
    power = (bits >> 23) - 126 - 9 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.where(bits == 0, 0, tl.maximum(power, -126))


@triton.jit
def power_of_two(power):
    """2^power, float32, for a power of -126 to 127."""
    return ((power + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def corrected(near, value, divisor, reciprocal):
    """Correct `near`, an approximation of value / divisor, by its error.

    A product with -1 negates, because Triton's minus would turn -0 into 0.
    """
    error = tl.fma(near, divisor, value * -1.0)
    return tl.fma(error * -1.0, reciprocal, near)


@triton.jit
def near_quotient(value, divisor, reciprocal):
    """value / divisor, rounded to nearest even, if the quotient is neither huge nor tiny.

    `reciprocal` is 1 / divisor, rounded to nearest. One correction of value * reciprocal gives the
    exact result of a division (Markstein 1990), with a third of the instructions.
    """
    near = value * reciprocal
    return corrected(near, value, divisor, reciprocal)


@triton.jit
def int8_scale(bits):
    """`pd_kernels.int8_scale.int8_scales` of a magnitude with these bits."""
    exact = near_quotient(bits.to(tl.float32, bitcast=True), _INT8_MAX, _127TH)
    up = ((exact.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)
    scale = tl.where(bits == 0, 1.0, tl.maximum(up, _SMALLEST_SCALE))
    return tl.where(bits >= _INFINITE, float("nan"), scale)


@triton.jit
def upper_half(scale):
    """The bits of a float32 that is a value of bfloat16, int16. NaN keeps its bits; a conversion's
    NaN differs by processor."""
    return (scale.to(tl.int32, bitcast=True) >> 16).to(tl.int16)


@triton.jit
def int8_codes(quotients):
    """Round quotients of -127 to 127 to nearest even. With `_ROUND` added, the low bits are the
    integer."""
    return (quotients + _ROUND).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def byte_words(codes, VECTORS: tl.constexpr):
    """Pack uint8 `[VECTORS, 8]` into little-endian words, int64 `[VECTORS]`."""
    shifts = (tl.arange(0, 4) * 8)[None, None, :]
    fours = tl.sum(tl.reshape(codes.to(tl.int32), (VECTORS, 2, 4)) << shifts, axis=2)
    low, high = tl.split(fours)
    return (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)


@triton.jit
def stored(value, factor, STEP: tl.constexpr, DTYPE: tl.constexpr):
    """Convert `value`, float32, to the stored form of a cache of DTYPE. FP8 saturates; infinities
    become NaN.

    STEP says how `factor` is used: `times`, `over` (the factor is FP8's scale) or `none`.
    """
    if tl.float8e4nv == DTYPE:
        value = finite_or_nan(value)
    if STEP == "times":
        value = value * factor
    elif STEP == "over":
        reciprocal = tl.div_rn(1.0, factor)
        # Like near_quotient. A huge quotient saturates anyway, but must not be infinite in the
        # correction.
        near = tl.minimum(tl.maximum(value * reciprocal, -_HUGE), _HUGE)
        value = corrected(near, value, factor, reciprocal)
    return value.to(DTYPE)


def store(value: torch.Tensor, factor: float, step: str, dtype: torch.dtype) -> torch.Tensor:
    """Compute `stored` in torch."""
    # The divisor is a tensor, because torch multiplies by the reciprocal of a Python number instead
    # of dividing.
    scale = torch.full((), factor, device=value.device)
    scaled = value * scale if step == "times" else value / scale if step == "over" else value
    if dtype != FP8:
        return scaled.to(dtype)
    return scaled.clamp(-FP8_MAX, FP8_MAX).masked_fill(value.isinf(), torch.nan).to(FP8)


def power_scales(values: torch.Tensor) -> torch.Tensor:
    """Scales of `fp8_e4m3`, one per head of a super-page, float32 `[head, token, dim]`; elements that are not
    finite are ignored. The result is the same as `power_scale`."""
    finite = values.abs().masked_fill(~values.isfinite(), 0.0)
    mantissa, exponent = torch.frexp(finite.amax((1, 2)))
    power = (exponent - 9 + (mantissa > 0.875)).clamp(min=-126)
    scales = ((power + 127) << 23).to(torch.int32).view(torch.float32)
    return torch.where(mantissa == 0, torch.ones_like(scales), scales)
