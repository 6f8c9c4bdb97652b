# SPDX-License-Identifier: Apache-2.0
"""Tensors of a cache's elements, and their conversion from any dtype and scale to any other."""

import functools
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pd_connector.kv.coding import Elements

DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
FP8_MAX = 448.0
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32}

Words = npt.NDArray[Any]  # uint8, uint16 or uint32


def torch_dtype(elements: Elements) -> torch.dtype:
    """Torch's dtype of these elements. Raises ValueError for a dtype that no codec knows."""
    assert elements.nbytes
    return DTYPES[elements.dtype]


def convert(x: torch.Tensor, source: Elements, destination: Elements, out: torch.Tensor) -> None:
    """Write `x`, stored as `source` says, into `out` as `destination` stores it.

    The product with FP8's scale, or the quotient, is taken in float32 and rounded to nearest even. Into FP8, finite
    values beyond the range saturate at ±448. NaN and infinities become NaN, so that they stay visible. From FP8
    to FP8 the codes are scaled by the ratio of the scales, which is exact for powers of two without over- or
    underflow. If source and destination are equal, bits are copied unchanged.

    Args:
        x: any shape and strides, of `source`'s dtype.
        source: how `x` is stored.
        destination: how `out` will be stored.
        out: of the shape of `x`, of `destination`'s dtype, dense; any alignment on CPU.

    >>> x = torch.tensor([1.0, -500.0, torch.inf], dtype=torch.bfloat16)
    >>> out = torch.empty(3, dtype=torch.float8_e4m3fn)
    >>> convert(x, Elements("bfloat16"), Elements("fp8_e4m3", scale=0.5), out)
    >>> out.float().tolist()
    [2.0, -448.0, nan]
    """
    if source.same_bits(destination):
        copy_bits(x, out)
    elif is_fast(x) and (source.is_fp8 or (destination.is_fp8 and source.nbytes == 2)):
        # On a CPU faster than torch's own FP8 arithmetic, four times faster into a float cache.
        codes, target = words(x), words(out)
        if source.is_fp8 and destination.nbytes == 2 and _pairs_up(codes) and _pairs_up(target):
            table, codes, target = (
                _pairs(source, destination),
                codes.view("<u2"),
                target.view("<u4"),
            )
        else:
            table = _table(source, destination)
        np.take(table, codes, out=target, mode="clip")
    else:
        out.copy_(_computed(x, source, destination))


def is_fast(x: torch.Tensor) -> bool:
    """Whether numpy can convert the tensor's elements by a table; other tensors use plain torch."""
    return bool(x.device.type == "cpu")


def bits(x: torch.Tensor) -> torch.Tensor:
    """The same memory as signed integers, any strides: numpy has no bfloat16, and torch on a GPU cannot index FP8."""
    return x.view(_SIGNED[x.element_size()])


def words(x: torch.Tensor) -> Words:
    """The bits of a CPU tensor as unsigned integers: a view with the same shape and strides."""
    array: Words = bits(x).numpy()
    return array.view(_UNSIGNED[x.element_size()])


def copy_bits(x: torch.Tensor, out: torch.Tensor) -> None:
    """Copy elements of one dtype bit by bit, NaN payloads included."""
    bits(out).copy_(bits(x))


def as_dtype(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A row of bytes as elements: a view, or a copy if the row starts at an odd address."""
    if data.data_ptr() % dtype.itemsize or data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)


def largest(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """The largest magnitude over `dims`, float32; NaN or infinite if an element is.

    Args:
        x: a float dtype, any strides.
        dims: the reduced dims, kept with extent 1.
    """
    # Without the sign bit, the bits of floats, read as integers, have the order of the floats.
    signed = bits(x)
    magnitude = signed & torch.iinfo(signed.dtype).max
    return magnitude.amax(dims, keepdim=True).view(x.dtype).float()


@functools.lru_cache(maxsize=128)
def _table(source: Elements, destination: Elements) -> Words:
    """The converted value of each code of a one- or two-byte source."""
    codes = torch.arange(1 << (8 * source.nbytes), dtype=torch.int32)
    every = codes.to(_SIGNED[source.nbytes]).view(torch_dtype(source))
    return words(_computed(every, source, destination))


@functools.lru_cache(maxsize=32)
def _pairs(source: Elements, destination: Elements) -> Words:
    """The converted values of each pair of neighbouring one-byte codes. One look-up converts two codes. The table
    has 256 KiB, which fit into a core's cache."""
    each = _table(source, destination).astype("<u4")
    pairs: Words = each[:, None] << 16 | each
    return pairs.reshape(-1)


def _pairs_up(array: Words) -> bool:
    """Whether elements can be looked up two at a time."""
    dense = array.ndim > 0 and array.strides[-1] == array.itemsize and array.shape[-1] % 2 == 0
    return dense and sys.byteorder == "little"


def _computed(x: torch.Tensor, source: Elements, destination: Elements) -> torch.Tensor:
    """`convert` in plain torch."""
    value = x.float()
    if source.is_fp8:
        ratio = source.scale / destination.scale if destination.is_fp8 else source.scale
        value = value * _scalar(ratio, x)
    elif destination.is_fp8:
        value = value / _scalar(destination.scale, x)
    if destination.is_fp8:
        # How a cast treats values beyond the range depends on torch's version.
        value = value.clamp(-FP8_MAX, FP8_MAX).masked_fill(x.float().isinf(), torch.nan)
    return value.to(torch_dtype(destination))


def _scalar(value: float, x: torch.Tensor) -> torch.Tensor:
    """The value as a tensor. A plain number would not do: a GPU divides by it with a rounded reciprocal."""
    return torch.full((), value, dtype=torch.float32, device=x.device)
