# SPDX-License-Identifier: Apache-2.0
"""One byte an element: symmetric INT8. K is scaled per channel, V per token (KIVI, arXiv 2402.02750).

K has a few channels that are large in every token; V has none. A scale per channel keeps the large channels from
costing K's other channels their precision.
"""

import math

import torch

from pd_connector.codec.base import check_bytes, check_plane, get_scales, put_scales, split
from pd_connector.codec.compiled import loops_for
from pd_connector.codec.elements import convert, largest, torch_dtype, words
from pd_connector.codec.super_pages import grouped, runs, scales_of
from pd_connector.kv.coding import CODINGS, Elements, Part, Shape
from pd_kernels.int8_scale import int8_scales
from pd_kernels.payload import padded, super_pages


class Int8:
    """INT8 with bfloat16 scales, rounded up so that no code clips.

    A group with a NaN or an infinity has the scale NaN (`int8_scales`): all of it then decodes as NaN.
    """

    coding = CODINGS["int8"]

    def encode(
        self,
        part: Part,
        x: torch.Tensor,
        source: Elements,
        destination: Elements,
        out: torch.Tensor,
    ) -> None:
        if source.is_fp8:
            raise ValueError("int8 of an fp8_e4m3 cache: use raw, which is one byte an element too")
        check_plane(x, source)
        shape = (x.shape[0], x.shape[1], x.shape[2])
        check_bytes(out, self.coding.coded_bytes(part, shape, source))
        scales = torch.empty(_scale_shape(part, shape), dtype=torch.bfloat16, device=x.device)
        codes = out[padded(scales.nbytes) :].view(torch.int8).view(shape)
        if loops := loops_for(x, source):
            keys, values = loops.int8_encode_keys, loops.int8_encode_values
            (keys if part is Part.KEY else values)(words(x), words(scales), words(codes))
        else:
            _quantise(part, x, scales, codes)
        put_scales(out, scales)

    def decode(
        self,
        part: Part,
        data: torch.Tensor,
        shape: Shape,
        source: Elements,
        destination: Elements,
    ) -> torch.Tensor:
        scale_shape = _scale_shape(part, shape)
        coded_bytes = self.coding.coded_bytes(part, shape, source)
        raw, codes = split(data, 2 * math.prod(scale_shape), coded_bytes)
        scales = get_scales(raw, torch.bfloat16, scale_shape)
        codes = codes.view(torch.int8).view(shape)
        out = torch.empty(shape, dtype=torch_dtype(destination), device=data.device)
        if loops := loops_for(codes, destination):
            keys, values = loops.int8_decode_keys, loops.int8_decode_values
            (keys if part is Part.KEY else values)(words(codes), words(scales), words(out))
            return out
        for first, stop in runs(shape):
            _dequantise(
                _grouped(part, codes[:, first:stop]),
                _scales_of(part, scales, first, stop),
                destination,
                _grouped(part, out[:, first:stop]),
            )
        return out


def _quantise(part: Part, x: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> None:
    """Fill scales and codes, run by run."""
    for first, stop in runs((x.shape[0], x.shape[1], x.shape[2])):
        values = _grouped(part, x[:, first:stop])
        scale = int8_scales(largest(values, (_axis(part),)))
        scaled = values.to(torch.float32, copy=True).div_(scale).round_()
        _grouped(part, codes[:, first:stop]).copy_(scaled)
        _scales_of(part, scales, first, stop).view(torch.int16).copy_(_bfloat16_bits(scale))


def _dequantise(
    codes: torch.Tensor, scale: torch.Tensor, destination: Elements, out: torch.Tensor
) -> None:
    if destination.dtype == "bfloat16":
        torch.mul(codes, scale, out=out)  # one pass; rounds once, like the other branch
        return
    # 7 bits of code by 8 of scale are exact in float32
    convert(codes.float() * scale.float(), Elements("float32"), destination, out)


def _bfloat16_bits(scales: torch.Tensor) -> torch.Tensor:
    """The upper halves of float32 scales. Not converted by torch, whose bits for NaN depend on the CPU (0xFFFF or
    0x7FC0)."""
    return scales.view(torch.int32) >> 16


def _axis(part: Part) -> int:
    """The axis of `_grouped` whose elements share a scale."""
    return -2 if part is Part.KEY else -1


def _grouped(part: Part, x: torch.Tensor) -> torch.Tensor:
    """A view of a run: `[head, token, dim]` for V, `[head, super-page, token, dim]` for K."""
    return x if part is Part.VALUE else grouped(x)


def _scales_of(part: Part, scales: torch.Tensor, first: int, stop: int) -> torch.Tensor:
    """The scales of a run, in a shape that broadcasts over `_grouped`. A view."""
    if part is Part.VALUE:
        return scales[:, first:stop, None]
    return scales_of(scales, first, stop)[:, :, None]


def _scale_shape(part: Part, shape: Shape) -> tuple[int, ...]:
    """Shape of a plane's bfloat16 scales: K has one per channel and super-page, V one per token."""
    heads, tokens, dims = shape
    return (heads, super_pages(tokens), dims) if part is Part.KEY else (heads, tokens)


INT8 = Int8()
