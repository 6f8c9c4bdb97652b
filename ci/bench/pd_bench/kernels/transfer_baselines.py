# SPDX-License-Identifier: Apache-2.0
"""Baselines of the transfer kernels: torch's own operations, layer by layer."""

import torch

from pd_bench.kernels.caches import CacheViews
from pd_kernels.payload import SUPER_PAGE


def torch_gather(
    cache: CacheViews, pages: torch.Tensor, tokens: int, codec: str, outputs: list[torch.Tensor]
) -> None:
    """Gather, permute and code K and V of each layer into `outputs`, `[head, token, dim]` each."""
    views = [*cache.keys, *cache.values]
    for number, (view, out) in enumerate(zip(views, outputs, strict=True)):
        picked = view.index_select(0, pages).transpose(0, 1).flatten(1, 2)[:, :tokens]
        if codec == "raw":
            out.copy_(picked)
        elif codec == "fp8_e4m3":
            value = picked.float()
            scale = (value.abs().amax((1, 2), keepdim=True) / 448).clamp_min(2.0**-126)
            out.copy_((value / scale).to(torch.float8_e4m3fn))
        else:
            value = picked.float()
            if number < len(cache.keys) and tokens % SUPER_PAGE == 0:
                value = value.unflatten(1, (-1, SUPER_PAGE))
                scale = value.abs().amax(2, keepdim=True) / 127
            else:
                scale = value.abs().amax(2, keepdim=True) / 127
            coded = (value / scale.clamp_min(2.0**-126)).round_().to(torch.int8)
            out.copy_(coded.view(out.shape))


def torch_reshard(
    sources: list[torch.Tensor], destinations: list[torch.Tensor], shape: tuple[int, int, int]
) -> None:
    """Turn `raw` payloads of some ranks into the payloads of other ranks: join them by head, then
    split.

    Args:
        shape: planes of a rank, heads of the whole model, bytes of one head of one plane.
    """
    planes, heads, run = shape
    joined = torch.cat([slab.view(planes, -1, run) for slab in sources], 1)[:, :heads]
    for slab, part in zip(destinations, joined.chunk(len(destinations), 1), strict=True):
        slab.view(planes, -1, run).copy_(part)
