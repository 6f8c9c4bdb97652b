# SPDX-License-Identifier: Apache-2.0
"""The codecs' inner loops for bfloat16 on a CPU. Each makes one pass over a plane; numba compiles them to
vector code.

Importing this module compiles the loops. That takes seconds, unless numba has kept them from an earlier process; see
`compiled`. Elements are passed as bfloat16's bits. Results equal the codecs' torch operations bit by bit, except for
the payload of a decoded NaN.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from pd_connector.codec.elements import Words
from pd_kernels.payload import INT8_MAX, SMALLEST_SCALE, SUPER_PAGE

_U8, _U16, _F32 = (numba.from_dtype(np.dtype(name)) for name in ("u1", "u2", "f4"))
# numba reuses compiled code while this file, constants included, is unchanged.
_SUPER_PAGE = SUPER_PAGE
_MAGNITUDE = np.uint16(0x7FFF)
_INFINITY = np.uint16(0x7F80)
_SMALLEST_SCALE = np.float32(SMALLEST_SCALE)
_INT8_MAX = np.float32(INT8_MAX)
# Adding this rounds a float to an integer, which is then in the sum's last bits.
_TO_INTEGER = np.float32(1.5 * 2**23)
_E4M3_NORMAL = np.uint32(121 << 23)  # bits of 2^-6, the smallest normal number
# Difference of the exponent biases of float32 and E4M3, in units of E4M3's last bit.
_E4M3_BIAS = np.uint32(120 << 3)
_E4M3_UNIT = np.float32(2.0**-9)
# Adding this rounds to a multiple of that unit; the multiple is then in the bits above those of 2^14.
_TO_UNITS = np.float32(2.0**14)
_UNIT_BITS = np.uint32((127 + 14) << 23)
_E4M3_NAN = np.uint32(0x7F)


def compiled(*signature: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Compile for arguments of these types. The function runs without Python's lock. The result is kept for later
    processes if a folder is writable."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        options = {"nogil": True, "error_model": "numpy"}
        try:
            made = numba.njit(numba.void(*signature), cache=True, **options)(function)
        except RuntimeError:  # no writable folder
            made = numba.njit(numba.void(*signature), **options)(function)
        result: Callable[..., None] = made
        return result

    return decorate


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _float(bits: Any) -> Any:
    """The float32 for the bits of a bfloat16."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _bfloat16(value: Any) -> Any:
    """The bits of a float32, rounded to nearest even."""
    bits = np.float32(value).view(np.uint32)
    rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return np.uint16(rounded >> np.uint32(16)) if value == value else np.uint16(0x7FC0)


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _int8_scale(magnitude: Any) -> Any:
    """See `pd_kernels.int8_scale`. `magnitude` is the largest of a group, as bits of bfloat16."""
    exact = np.float32(_float(magnitude) / _INT8_MAX)
    up = np.uint32((exact.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000))
    scale = max(up.view(np.float32), _SMALLEST_SCALE)
    if magnitude == 0:
        scale = np.float32(1.0)
    return np.float32(np.nan) if magnitude >= _INFINITY else np.float32(scale)


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _int8_code(bits: Any, scale: Any) -> Any:
    quotient = np.float32(_float(bits) / scale)
    shifted = np.float32(quotient + _TO_INTEGER)
    code = np.uint8(shifted.view(np.uint32) & np.uint32(0xFF))
    return code if quotient == quotient else np.uint8(0)


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _power_of_two(magnitude: Any) -> Any:
    """See `pd_connector.codec.fp8`. `magnitude` is the largest of a super-page, as bits of bfloat16."""
    exponent = np.int32(magnitude >> np.uint16(7)) - np.int32(127)
    # 448 is 1.75 * 2^8; 0x60 is the mantissa of 1.75.
    above = np.int32(1 if magnitude & np.uint16(0x7F) > np.uint16(0x60) else 0)
    power = max(exponent - np.int32(8) + above, np.int32(-126))
    scale = np.uint32((power + np.int32(127)) << np.int32(23)).view(np.float32)
    if magnitude == 0:
        scale = np.float32(1.0)
    return np.float32(np.nan) if magnitude >= _INFINITY else np.float32(scale)


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _e4m3_code(bits: Any, inverse: Any) -> Any:
    """The code of a finite bfloat16, times a power of two that keeps it within ±448."""
    value = np.float32(_float(bits & _MAGNITUDE) * inverse)
    word = value.view(np.uint32)
    even = np.uint32((word >> np.uint32(20)) & np.uint32(1))
    up = np.uint32(word + np.uint32(0x7FFFF) + even)
    normal = np.uint32((up >> np.uint32(20)) - _E4M3_BIAS)
    units = np.uint32(np.float32(value + _TO_UNITS).view(np.uint32) - _UNIT_BITS)
    code = np.uint8(normal if word >= _E4M3_NORMAL else units)
    return np.uint8(code | np.uint8(np.uint16(bits >> np.uint16(8)) & np.uint16(0x80)))


@compiled(_U16[:, :, ::1], _U16[:, :, ::1], _U8[:, :, ::1])
def int8_encode_keys(x: Words, scales: Words, codes: Words) -> None:
    """`[head, token, dim]`, scales `[head, super-page, dim]`."""
    heads, tokens, dims = x.shape
    largest = np.empty(dims, np.uint16)
    scale = np.empty(dims, np.float32)
    for head in range(heads):
        for page in range(scales.shape[1]):
            first, stop = page * _SUPER_PAGE, min(tokens, (page + 1) * _SUPER_PAGE)
            largest[:] = 0
            for token in range(first, stop):
                for dim in range(dims):
                    largest[dim] = max(largest[dim], x[head, token, dim] & _MAGNITUDE)
            for dim in range(dims):
                scale[dim] = _int8_scale(largest[dim])
                scales[head, page, dim] = _bfloat16(scale[dim])
            for token in range(first, stop):
                for dim in range(dims):
                    codes[head, token, dim] = _int8_code(x[head, token, dim], scale[dim])


@compiled(_U16[:, :, ::1], _U16[:, ::1], _U8[:, :, ::1])
def int8_encode_values(x: Words, scales: Words, codes: Words) -> None:
    """`[head, token, dim]`, scales `[head, token]`."""
    heads, tokens, dims = x.shape
    for head in range(heads):
        for token in range(tokens):
            largest = np.uint16(0)
            for dim in range(dims):
                largest = max(largest, x[head, token, dim] & _MAGNITUDE)
            scale = _int8_scale(largest)
            scales[head, token] = _bfloat16(scale)
            for dim in range(dims):
                codes[head, token, dim] = _int8_code(x[head, token, dim], scale)


@compiled(_U8[:, :, ::1], _U16[:, :, ::1], _U16[:, :, ::1])
def int8_decode_keys(codes: Words, scales: Words, out: Words) -> None:
    """The inverse of `int8_encode_keys`, with the same shapes."""
    heads, tokens, dims = codes.shape
    scale = np.empty(dims, np.float32)
    for head in range(heads):
        for page in range(scales.shape[1]):
            for dim in range(dims):
                scale[dim] = _float(scales[head, page, dim])
            for token in range(page * _SUPER_PAGE, min(tokens, (page + 1) * _SUPER_PAGE)):
                for dim in range(dims):
                    code = np.float32(np.int8(codes[head, token, dim]))
                    out[head, token, dim] = _bfloat16(np.float32(code * scale[dim]))


@compiled(_U8[:, :, ::1], _U16[:, ::1], _U16[:, :, ::1])
def int8_decode_values(codes: Words, scales: Words, out: Words) -> None:
    """The inverse of `int8_encode_values`, with the same shapes."""
    heads, tokens, dims = codes.shape
    for head in range(heads):
        for token in range(tokens):
            scale = _float(scales[head, token])
            for dim in range(dims):
                code = np.float32(np.int8(codes[head, token, dim]))
                out[head, token, dim] = _bfloat16(np.float32(code * scale))


@compiled(_U16[:, :, ::1], _F32[:, ::1], _U8[:, :, ::1])
def fp8_encode(x: Words, scales: Words, codes: Words) -> None:
    """`[head, token, dim]`, scales `[head, super-page]`. The scale is NaN, and codes are not written, where an
    element is not finite."""
    heads, tokens, dims = x.shape
    for head in range(heads):
        for page in range(scales.shape[1]):
            first, stop = page * _SUPER_PAGE, min(tokens, (page + 1) * _SUPER_PAGE)
            largest = np.uint16(0)
            for token in range(first, stop):
                for dim in range(dims):
                    largest = max(largest, x[head, token, dim] & _MAGNITUDE)
            scale = _power_of_two(largest)
            scales[head, page] = scale
            inverse = np.float32(np.float32(1.0) / scale)  # exact, as is the product
            if largest < _INFINITY:
                for token in range(first, stop):
                    for dim in range(dims):
                        codes[head, token, dim] = _e4m3_code(x[head, token, dim], inverse)


@compiled(_U8[:, :, ::1], _F32[:, ::1], _U16[:, :, ::1])
def fp8_decode(codes: Words, scales: Words, out: Words) -> None:
    """The inverse of `fp8_encode`, with the same shapes; NaN where the code is NaN."""
    heads, tokens, dims = codes.shape
    for head in range(heads):
        for token in range(tokens):
            scale = scales[head, token // _SUPER_PAGE]
            for dim in range(dims):
                code = np.uint32(codes[head, token, dim])
                magnitude = code & np.uint32(0x7F)
                normal = np.uint32((magnitude + _E4M3_BIAS) << np.uint32(20)).view(np.float32)
                small = np.float32(np.float32(magnitude) * _E4M3_UNIT)
                value = normal if magnitude >= np.uint32(8) else small
                value = np.float32(-value) if code >= np.uint32(0x80) else value
                decoded = _bfloat16(np.float32(value * scale))
                if magnitude == _E4M3_NAN:
                    decoded = np.uint16(0x7FC0)
                out[head, token, dim] = decoded
