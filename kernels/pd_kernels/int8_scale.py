# SPDX-License-Identifier: Apache-2.0
"""The scale of a group of `int8`, in torch: what pd_connector's codec and the kernels' reference compute.

Compiled loops (`pd_connector.codec.loops`, numba) and kernels (`pd_kernels.transfer.numerics`, Triton)
cannot call torch, so they have it in their own languages. A test compares all of them bit by bit.
"""

import torch

from pd_kernels.payload import INT8_MAX, SMALLEST_SCALE


def int8_scales(magnitudes: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of a group / 127, rounded up to a value of bfloat16, so that no code clips.

    It is at least 2^-126. It is 1 for a magnitude of 0, and NaN (bits 0x7FC00000) if the magnitude
    is not finite.

    Args:
        magnitudes: float32 of any shape, without a sign.

    Returns:
        float32 of the same shape.
    """
    exact = magnitudes / torch.full_like(magnitudes, INT8_MAX)
    # Bits of positive floats sort like the floats. Adding 0xFFFF rounds up to the next bfloat16.
    up = ((exact.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
    up = torch.where(magnitudes == 0, torch.ones_like(up), up.clamp(min=SMALLEST_SCALE))
    return torch.where(magnitudes.isfinite(), up, torch.full_like(up, torch.nan))
