# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Device functions with which gathers code elements of 16 bits, two at a time.

A word holds two elements, the even element in its low half. Results are bit for bit the same as in
`numerics.py`.
"""

import triton
import triton.language as tl

_GRID = tl.constexpr(1536.0)  # 1.5 * 2^10: adding it rounds to a multiple of 2^-13
_ROUND_GRID = tl.constexpr(12582912.0 - 1536.0)  # together 1.5 * 2^23, see `numerics.int8_codes`


@triton.jit
def larger_halves(a, b):
    """The larger of each half of two words, as unsigned 16-bit numbers: one instruction."""
    return tl.inline_asm_elementwise(
        "max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def magnitudes(words):
    """Bits of both elements' magnitudes. They order like the magnitudes, with infinity and NaN
    last."""
    return words & 0x7FFF7FFF


@triton.jit
def infinite(SOURCE: tl.constexpr):
    """The 16 bits of infinity."""
    return 0x7F80 if tl.bfloat16 == SOURCE else 0x7C00


@triton.jit
def wide_bits(bits, SOURCE: tl.constexpr):
    """The float32 bits of elements whose 16 bits are `bits`, int32 without a sign."""
    if tl.bfloat16 == SOURCE:
        return bits << 16
    value = bits.to(tl.int16).to(SOURCE, bitcast=True).to(tl.float32)
    return value.to(tl.int32, bitcast=True)


@triton.jit
def two_floats(words, SOURCE: tl.constexpr):
    """The even and the odd elements of words, float32."""
    if tl.bfloat16 == SOURCE:
        even, odd = words << 16, words & -0x10000
        return even.to(tl.float32, bitcast=True), odd.to(tl.float32, bitcast=True)
    even, odd = words.to(tl.int16), (words >> 16).to(tl.int16)
    even, odd = even.to(SOURCE, bitcast=True), odd.to(SOURCE, bitcast=True)
    return even.to(tl.float32), odd.to(tl.float32)


@triton.jit
def larger_magnitudes(bits, words):
    """The larger of each half of `bits`, and of the magnitudes of words. In assembler, so that a
    compiler does not keep magnitudes in registers for later."""
    return tl.inline_asm_elementwise(
        "and.b32 $0, $2, 0x7FFF7FFF; max.u16x2 $0, $0, $1;", "=&r,r,r", [bits, words],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def finite_magnitudes(words, SOURCE: tl.constexpr):
    """`magnitudes`, with 0 for elements that are not finite."""
    bits = magnitudes(words)
    # Bit 15 of each half where it is infinity or more, and then all bits of these halves.
    more = (bits + (0x8000 - infinite(SOURCE)) * 0x10001) >> 15 & 0x10001
    return bits & ~(more * 0xFFFF)


@triton.jit
def finite_or_nan_words(words, SOURCE: tl.constexpr):
    """Words with NaN for infinities. One more bit turns an infinity into a NaN."""
    even, odd = magnitudes(words) & 0xFFFF, magnitudes(words) >> 16
    words = words | (even == infinite(SOURCE)).to(tl.int32)
    return words | ((odd == infinite(SOURCE)).to(tl.int32) << 16)


@triton.jit
def fp8_words(words, factor, SOURCE: tl.constexpr):
    """FP8 codes of the elements of words `[VECTORS, 4, 2]`, times `factor`, as 8-byte words int64
    `[VECTORS, 2]`. One instruction converts two elements."""
    VECTORS: tl.constexpr = words.shape[0]
    even, odd = two_floats(words, SOURCE)
    pairs = tl.inline_asm_elementwise(
        "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [even * factor, odd * factor],
        dtype=tl.int16, is_pure=True, pack=1,
    )  # fmt: skip
    first, second = tl.split(pairs.to(tl.int32) & 0xFFFF)
    return tl.join(joined_pairs(first, VECTORS), joined_pairs(second, VECTORS))


@triton.jit
def joined_pairs(pairs, VECTORS: tl.constexpr):
    """Join four pairs of codes, int32 `[VECTORS, 4]`, below 2^16, into 8-byte words, int64
    `[VECTORS]`."""
    low, high = tl.split(tl.reshape(pairs, (VECTORS, 2, 2)))
    low, high = tl.split(low | (high << 16))
    return (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)


@triton.jit
def int8_pairs(words, even_reciprocal, odd_reciprocal, SOURCE: tl.constexpr):
    """Codes of both elements of words: their quotients by the scales whose reciprocals are given,
    rounded to nearest even; int32 below 2^16.

    The two numbers of a quotient have 11 and 8 bits. If the quotient is not a tie between two
    codes, it is at least 2^-12 away from the tie. A product with the reciprocal is at most 2^-17
    away from the quotient, and is rounded to a multiple of 2^-13. So ties stay ties, and nothing
    else becomes a tie: no correction is needed.
    """
    even, odd = two_floats(words, SOURCE)
    even = tl.fma(even, even_reciprocal, _GRID) + _ROUND_GRID
    odd = tl.fma(odd, odd_reciprocal, _GRID) + _ROUND_GRID
    even, odd = even.to(tl.int32, bitcast=True), odd.to(tl.int32, bitcast=True)
    return (even & 0xFF) | ((odd & 0xFF) << 8)
