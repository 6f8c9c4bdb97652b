# SPDX-License-Identifier: Apache-2.0
"""The kernels of `bench roof`, with the bytes that each moves."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pd_bench.kernels.sample_launches import BF16, chunk, mla_call, paged_call
from pd_kernels.attention.paged_call import FP8
from pd_kernels.transfer.gather import launch_gather
from pd_kernels.transfer.scatter import launch_scatter
from pd_kernels.transfer.sums import launch_payload_sums, new_sums


@dataclass(frozen=True)
class RoofCase:
    """A kernel of the table.

    Attributes:
        name: its row.
        launch: launches it once.
        nbytes: bytes that a full program (transfer) or a turn of the loop (decode) reads and writes.
        loop: whether the loop over tiles is counted, and not the whole program.
        warps: warps that run the loop, if others of the program have loops of their own.
    """

    name: str
    launch: Callable[[], Any]
    nbytes: int
    loop: bool = False
    warps: int = 0


KEYS: dict[str, Any] = {"dims": (128,)}
LATENTS: dict[str, Any] = {"dims": (576,), "heads": 1}
KIB = 1024


def _gather(codec: str, check: bool, **shape: Any) -> Callable[[], None]:
    return lambda: launch_gather(chunk(codec, BF16, BF16, True, check, **shape))


def _scatter(codec: str, check: bool, **shape: Any) -> Callable[[], None]:
    return lambda: launch_scatter(chunk(codec, BF16, BF16, False, check, **shape))


def _payload_sums() -> None:
    payload = torch.zeros(1 << 16, dtype=torch.uint8)
    launch_payload_sums(payload, new_sums(len(payload), payload.device))


# A program has 16 KiB of `raw`. A gather of the others has 64 channels of 128 tokens of int8, with
# 64 scales of 2 bytes, or 128 tokens of a head of fp8, with a scale of 4 bytes; a scatter has 8,192
# elements. The rows of int8 are K's.
TRANSFERS = (
    RoofCase("gather raw", _gather("raw", False), 32 * KIB),
    RoofCase("gather raw, sums", _gather("raw", True), 32 * KIB),
    RoofCase("gather int8", _gather("int8", False, **KEYS), 24 * KIB + 128),
    RoofCase("gather int8, sums", _gather("int8", True, **KEYS), 24 * KIB + 128),
    RoofCase("gather fp8", _gather("fp8_e4m3", False, **KEYS), 48 * KIB + 4),
    RoofCase("gather fp8, sums", _gather("fp8_e4m3", True, **KEYS), 48 * KIB + 4),
    RoofCase("gather fp8, sums, MLA", _gather("fp8_e4m3", True, **LATENTS), 216 * KIB + 4),
    RoofCase("scatter raw", _scatter("raw", False), 32 * KIB),
    RoofCase("scatter raw, sums", _scatter("raw", True), 32 * KIB),
    RoofCase("scatter int8", _scatter("int8", False, **KEYS), 24 * KIB),
    RoofCase("scatter int8, sums", _scatter("int8", True, **KEYS), 24 * KIB),
    RoofCase("scatter fp8", _scatter("fp8_e4m3", False, **KEYS), 24 * KIB),
    RoofCase("scatter fp8, sums", _scatter("fp8_e4m3", True, **KEYS), 24 * KIB),
    RoofCase("payload sums", _payload_sums, 16 * KIB),
)


def _decode(name: str, launch: Callable[[], Any], tokens: int, token: int) -> RoofCase:
    return RoofCase(name, launch, tokens * token, loop=True)


SWAPPED: dict[str, Any] = {"dtype": FP8, "swapped": True}
WIDE: dict[str, Any] = {"heads": 64, "queries": 4}

DECODES = (
    _decode("paged", paged_call, 64, 512),
    _decode("paged, fp8", partial(paged_call, dtype=FP8), 64, 256),
    _decode("paged, fp8, swapped", partial(paged_call, **SWAPPED), 64, 256),
    _decode("paged, fp8, 32 lines", partial(paged_call, dtype=FP8, **WIDE), 64, 256),
    _decode("paged, fp8, 32 lines, swapped", partial(paged_call, **SWAPPED, **WIDE), 64, 256),
    _decode("paged, 4 queries", partial(paged_call, queries=4, heads=64), 64, 512),
    _decode("paged, 8 queries", partial(paged_call, queries=8, heads=64), 64, 512),
    _decode("mla, 16 heads", partial(mla_call, 16), 64, 1_152),
    _decode("mla, 16 heads, 4 queries", partial(mla_call, 16, 4), 32, 1_152),
    _decode("mla, 128 heads", partial(mla_call, 128), 32, 1_152),
    _decode("mla, 16 heads, fp8", partial(mla_call, 16, coded=True), 64, 656),
    _decode("mla, 128 heads, fp8", partial(mla_call, 128, coded=True), 32, 656),
    RoofCase("mla, Gluon", partial(mla_call, 128, gluon=True), 2 * 64 * 1_152, loop=True, warps=4),
)
"""A turn of the loop is a tile; two tiles for Gluon, whose two sides are two loops."""
