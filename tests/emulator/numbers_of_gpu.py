# SPDX-License-Identifier: Apache-2.0
"""Numbers that numpy does not have: bfloat16, FP8, and pairs in one register."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from memory import Array

TINY = np.float32(2.0**-126)
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float16).numpy()


def bfloat16_of(values: Any) -> Array:
    """Bits of the nearest bfloat16, ties to even."""
    values = np.asarray(values, np.float32)
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded.astype(np.uint16))


def float_of_bfloat16(bits: Any) -> Array:
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def saturated_e4m3(values: Any) -> Array:
    """Bits of the nearest FP8 (E4M3), at most 448; uint16."""
    values = np.atleast_1d(np.asarray(values, np.float32))
    near = torch.from_numpy(np.clip(np.nan_to_num(values, nan=0.0), -448, 448))
    bits = near.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return np.where(np.isnan(values), np.uint8(0x7F), bits).astype(np.uint16)


def halves_of_e4m3(pairs: Any) -> Array:
    """Two float16 of two FP8 codes."""
    low, high = (E4M3[np.asarray(pairs) >> 8 * n & 255].view(np.uint16) for n in range(2))
    return two(high, low, np.dtype("u4"))


def two(high: Array, low: Array, dtype: Any) -> Array:
    """A pair in one number."""
    shift = dtype.type(4 * dtype.itemsize)
    return np.asarray(high).astype(dtype) << shift | np.asarray(low).astype(dtype)


def joined(function: Callable[..., Any], half: Any, values: Sequence[Any]) -> Array:
    """A function of halves, for both halves of numbers of 32 bits."""
    split = [
        [(np.asarray(value) >> np.uint32(16 * n)).astype(np.uint16).view(half) for value in values]
        for n in range(2)
    ]
    low, high = (np.asarray(function(*each)).astype(half).view(np.uint16) for each in split)
    return two(high, low, np.dtype("u4"))


def flushed(values: Any) -> Any:
    """Without subnormal numbers."""
    return np.where(np.abs(values) < TINY, np.copysign(np.float32(0), values), values)
