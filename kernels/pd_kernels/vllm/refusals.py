# SPDX-License-Identifier: Apache-2.0
"""The cases that our backends refuse, by name. On a GPU vLLM asks before it selects a backend. On a
CPU vLLM does not ask, so each layer asks."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

FP8_NAMES = ("fp8", "fp8_e4m3")


class LayerOptions(NamedTuple):
    """The features that a layer's attention needs.

    Attributes:
        cache_dtype: vLLM's name for the cache dtype, such as `auto` or `fp8`.
    """

    head_size: int
    dtype: torch.dtype
    cache_dtype: str | None = None
    attn_type: str = "decoder"
    alibi: bool = False
    soft_cap: bool = False


def refusals(
    layer: LayerOptions, head_sizes: Sequence[int], dtypes: Sequence[torch.dtype]
) -> list[str]:
    """The reasons why our kernels cannot decode a layer; empty if they can."""
    reasons = []
    if layer.head_size not in head_sizes:
        reasons.append(f"head size {layer.head_size}: must be one of {list(head_sizes)}")
    if layer.dtype not in dtypes:
        reasons.append(f"dtype {layer.dtype}: must be one of {list(dtypes)}")
    same = {None, "auto", str(layer.dtype).removeprefix("torch.")}
    if layer.cache_dtype not in (*same, *FP8_NAMES):
        reasons.append(
            f"cache dtype {layer.cache_dtype}: must be that of the model ({layer.dtype}), or fp8_e4m3"
        )
    if layer.attn_type != "decoder":
        reasons.append(f"attention type {layer.attn_type}: only decoders")
    if layer.alibi and layer.soft_cap:
        reasons.append("ALiBi together with a soft cap")
    return reasons


def refuse(where: str, reasons: Sequence[str]) -> None:
    """Raise NotImplementedError with the reasons, if there are any."""
    if reasons:
        raise NotImplementedError(
            f"{where} does not support: {'; '.join(reasons)}. Leave out --attention-backend CUSTOM"
        )
