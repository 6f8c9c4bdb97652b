# SPDX-License-Identifier: Apache-2.0
"""One byte an element: OCP FP8 E4M3, with one float32 scale per head and 128 tokens."""

import math

import torch

from pd_connector.codec.base import check_bytes, check_plane, get_scales, put_scales, split
from pd_connector.codec.compiled import loops_for
from pd_connector.codec.elements import convert, largest, torch_dtype, words
from pd_connector.codec.super_pages import grouped, runs, scales_of
from pd_connector.kv.coding import CODINGS, Elements, Part, Shape
from pd_kernels.payload import FP8_SCALE_BYTES, padded, super_pages

_SMALLEST_EXPONENT = -126  # of a normal float32: a GPU may flush smaller scales to zero


class Fp8E4M3:
    """FP8 with the scale that loses least in each pair of caches.

    Between float caches, a scale is the smallest power of two (from 2^-126 up) that keeps a head's super-page within
    ±448, and 1.0 for zeros. FP8 keeps its precision under any power of two, and values that were rounded to
    FP8 before survive unchanged. An FP8 cache sends its codes and its scale unchanged. A float cache that sends to an
    FP8 cache uses the scale of that cache, so the codes are those that the cache stores.
    """

    coding = CODINGS["fp8_e4m3"]

    def encode(
        self,
        part: Part,
        x: torch.Tensor,
        source: Elements,
        destination: Elements,
        out: torch.Tensor,
    ) -> None:
        check_plane(x, source)
        shape = (x.shape[0], x.shape[1], x.shape[2])
        check_bytes(out, self.coding.coded_bytes(part, shape, source))
        scales = torch.empty(_scale_shape(shape), dtype=torch.float32, device=x.device)
        codes = out[padded(scales.nbytes) :].view(torch.float8_e4m3fn).view(shape)
        if source.is_fp8 or destination.is_fp8:
            own = source.scale if source.is_fp8 else destination.scale
            scales.fill_(own)
            convert(x, source, Elements(self.coding.name, own), codes)
        else:
            _scale_and_round(x, source, scales, codes)
        put_scales(out, scales)

    def decode(
        self,
        part: Part,
        data: torch.Tensor,
        shape: Shape,
        source: Elements,
        destination: Elements,
    ) -> torch.Tensor:
        scale_shape = _scale_shape(shape)
        coded_bytes = self.coding.coded_bytes(part, shape, source)
        raw, codes = split(data, FP8_SCALE_BYTES * math.prod(scale_shape), coded_bytes)
        stored = codes.view(torch.float8_e4m3fn).view(shape)
        if destination.is_fp8 and (not source.is_fp8 or source.same_bits(destination)):
            return stored
        out = torch.empty(shape, dtype=torch_dtype(destination), device=data.device)
        if source.is_fp8:
            convert(stored, source, destination, out)
            return out
        scales = get_scales(raw, torch.float32, scale_shape)
        if loops := loops_for(stored, destination):
            loops.fp8_decode(words(stored), scales.numpy(), words(out))
            return out
        for first, stop in runs(shape):
            value = torch.empty_like(stored[:, first:stop], dtype=torch.float32)
            convert(stored[:, first:stop], Elements(self.coding.name), Elements("float32"), value)
            scaled = grouped(value).mul_(scales_of(scales, first, stop)[:, :, None, None])
            grouped(out[:, first:stop]).copy_(scaled)
        return out


def _scale_and_round(
    x: torch.Tensor, source: Elements, scales: torch.Tensor, codes: torch.Tensor
) -> None:
    """Fill the scales and the codes of a float plane."""
    if loops := loops_for(x, source):
        loops.fp8_encode(words(x), scales.numpy(), words(codes))
        if bool(scales.isfinite().all()):
            return
    # In bfloat16 the quotient by a power of two is exact, or far below FP8's smallest number.
    wide = x.dtype if x.dtype == torch.bfloat16 else torch.float32
    for first, stop in runs((x.shape[0], x.shape[1], x.shape[2])):
        values = grouped(x[:, first:stop])
        magnitudes = largest(values, (-2, -1))
        if not bool(magnitudes.isfinite().all()):
            values = values.masked_fill(values.isinf(), torch.nan)
            magnitudes = largest(values.nan_to_num(0.0), (-2, -1))
        powers = powers_of_two(magnitudes)
        grouped(codes[:, first:stop]).copy_(values.to(wide).div(powers.to(wide)))
        scales_of(scales, first, stop).copy_(powers[:, :, 0, 0])


def _scale_shape(shape: Shape) -> tuple[int, int]:
    """Shape of a plane's float32 scales: head, super-page."""
    return shape[0], super_pages(shape[1])


def powers_of_two(magnitudes: torch.Tensor) -> torch.Tensor:
    """The scales, float32, for float32 magnitudes of any shape."""
    # magnitude = mantissa * 2^exponent, mantissa in [0.5, 1), and 448 = 0.875 * 2^9
    mantissa, exponent = torch.frexp(magnitudes)
    power = (exponent - 9 + (mantissa > 0.875)).clamp(min=_SMALLEST_EXPONENT)
    scales = ((power + 127) << 23).to(torch.int32).view(torch.float32)
    return torch.where(magnitudes == 0, torch.ones_like(scales), scales)


FP8_E4M3 = Fp8E4M3()
