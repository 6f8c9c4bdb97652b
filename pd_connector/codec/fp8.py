# SPDX-License-Identifier: Apache-2.0
"""One byte an element: OCP FP8 E4M3, with one float32 scale per head and block."""

import numpy as np
import torch

from pd_connector.codec.base import check_block, check_bytes, get_scales, put_scales, split
from pd_connector.codec.compiled import loops_for
from pd_connector.codec.elements import convert, largest, torch_dtype, words
from pd_connector.kv.coding import CODINGS, Elements, Part, Shape
from pd_kernels.payload import FP8_SCALE_BYTES, padded

_SMALLEST_EXPONENT = -126  # of a normal float32: a GPU may flush smaller scales to zero


class Fp8E4M3:
    """FP8 with the scale that loses least in each pair of caches.

    Between float caches, the scale of a head is the smallest power of two (from 2^-126 up) that keeps the head within
    ±448, and 1.0 for a head of zeros. FP8 keeps its precision under any power of two, and values that were rounded to
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
        check_block(x, source)
        heads, tokens, dims = x.shape
        check_bytes(out, self.coding.coded_bytes(part, (heads, tokens, dims), source))
        codes = out[padded(FP8_SCALE_BYTES * heads) :].view(torch.float8_e4m3fn).view(x.shape)
        if source.is_fp8 or destination.is_fp8:
            own = source.scale if source.is_fp8 else destination.scale
            scales = torch.full((heads,), own, dtype=torch.float32, device=x.device)
            convert(x, source, Elements(self.coding.name, own), codes)
        else:
            scales = _scale_and_round(x, source, codes)
        put_scales(out, scales)

    def decode(
        self,
        part: Part,
        data: torch.Tensor,
        shape: Shape,
        source: Elements,
        destination: Elements,
    ) -> torch.Tensor:
        scales, codes = split(
            data, FP8_SCALE_BYTES * shape[0], self.coding.coded_bytes(part, shape, source)
        )
        stored = codes.view(torch.float8_e4m3fn).view(shape)
        if destination.is_fp8 and (not source.is_fp8 or source.same_bits(destination)):
            return stored
        out = torch.empty(shape, dtype=torch_dtype(destination), device=data.device)
        if source.is_fp8:
            convert(stored, source, destination, out)
            return out
        found = get_scales(scales, torch.float32, (shape[0],))
        if loops := loops_for(stored, destination):
            loops.fp8_decode(words(stored), found.numpy(), words(out))
            return out
        for head, scale in enumerate(found.tolist()):
            convert(stored[head], Elements(self.coding.name, scale), destination, out[head])
        return out


def _scale_and_round(x: torch.Tensor, source: Elements, codes: torch.Tensor) -> torch.Tensor:
    """Fill the codes of a float block; returns the scales, float32 `[head]`."""
    loops = loops_for(x, source)
    if loops:
        found = np.empty(len(x), np.uint16)
        loops.largest_of_heads(words(x), found)
        magnitudes = torch.from_numpy(found.view(np.int16)).view(torch.bfloat16).float()
    else:
        magnitudes = largest(x, (1, 2)).view(-1)
    if not bool(magnitudes.isfinite().all()):
        loops, x = None, x.masked_fill(x.isinf(), torch.nan)
        magnitudes = largest(x.nan_to_num(0.0), (1, 2)).view(-1)
    powers = powers_of_two(magnitudes)
    if loops:
        loops.fp8_encode(words(x), powers.numpy(), words(codes))
        return powers
    # In bfloat16 the quotient by a power of two is exact, or far below FP8's smallest number.
    wide = x.dtype if x.dtype == torch.bfloat16 else torch.float32
    for head, power in enumerate(powers):  # the temporary fits a CPU's cache
        codes[head].copy_(x[head].to(wide).div(power.to(wide)))
    return powers


def powers_of_two(magnitudes: torch.Tensor) -> torch.Tensor:
    """The scales, float32, for float32 magnitudes of any shape."""
    # magnitude = mantissa * 2^exponent, mantissa in [0.5, 1), and 448 = 0.875 * 2^9
    mantissa, exponent = torch.frexp(magnitudes)
    power = (exponent - 9 + (mantissa > 0.875)).clamp(min=_SMALLEST_EXPONENT)
    scales = ((power + 127) << 23).to(torch.int32).view(torch.float32)
    return torch.where(magnitudes == 0, torch.ones_like(scales), scales)


FP8_E4M3 = Fp8E4M3()
