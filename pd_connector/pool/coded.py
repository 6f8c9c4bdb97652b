# SPDX-License-Identifier: Apache-2.0
"""Cuts heads and tokens out of coded runs, without decoding them. Pure functions.

An INT8 plane is `[scales][codes]` (docs/codecs.md). All tokens of a chunk share one scale for each channel of K, and each
token has a scale of its own in V. So a part of a plane is a plane of the same codes and scales, and decodes to the same values.
"""

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from pd_connector.kv.coding import Part, Shape
from pd_connector.plan.chunks import Chunk, planes
from pd_connector.plan.route import Route
from pd_connector.pool.chunk_layout import Run
from pd_connector.pool.keys import CHUNK_TOKENS
from pd_kernels.payload import INT8_SCALE_BYTES, SUPER_PAGE, plane_bytes

Words = npt.NDArray[Any]
"""uint8."""

assert CHUNK_TOKENS <= SUPER_PAGE, "K of a chunk has one scale for each channel"


def cut_out(
    run: Run,
    route: Route,
    chunk: Chunk,
    heads: int,
    starts: Mapping[int, int],
    data: Words,
    payload: Words,
) -> None:
    """Write the payload of a chunk of the route, out of a coded run.

    Args:
        chunk: its tokens are held, and lie in one chunk of the pool.
        heads: that the run has.
        starts: where each layer begins in `data`.
        data: only read.
        payload: `chunk.nbytes(route)`. Bytes between scales and codes are never read, and stay as they are.
    """
    which = slice(route.source_head, route.source_head + len(route.heads))
    first = chunk.first_token % CHUNK_TOKENS - run.first_token
    tokens, begin = slice(first, first + chunk.tokens), dict(starts)
    for plane in planes(route, chunk):
        shape = heads, run.tokens, plane.shape[2]
        start, stop = begin[plane.layer], begin[plane.layer] + _nbytes(plane.part, shape)
        begin[plane.layer] = stop
        out = payload[plane.offset : plane.offset + plane.nbytes]
        _cut(plane.part, data[start:stop], shape, which, tokens, out)


def _cut(part: Part, plane: Words, shape: Shape, heads: slice, tokens: slice, out: Words) -> None:
    """Write some heads and tokens of a plane as a plane of their own."""
    scales, codes = _sections(part, plane, shape)
    kept = codes[heads, tokens]
    own_scales, own_codes = _sections(part, out, kept.shape)
    own_scales[...] = scales[heads] if part is Part.KEY else scales[heads, tokens]
    own_codes[...] = kept


def _sections(part: Part, plane: Words, shape: tuple[int, ...]) -> tuple[Words, Words]:
    """Views of the scales, `[head, dim or token, bytes]`, and of the codes, `[head, token, dim]`."""
    heads, tokens, dims = shape
    each = dims if part is Part.KEY else tokens
    scales = plane[: heads * each * INT8_SCALE_BYTES].reshape(heads, each, INT8_SCALE_BYTES)
    return scales, plane[len(plane) - heads * tokens * dims :].reshape(shape)


def _nbytes(part: Part, shape: Shape) -> int:
    return plane_bytes("int8", part is Part.KEY, *shape, 1).total
