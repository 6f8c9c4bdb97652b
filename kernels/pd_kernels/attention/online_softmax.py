# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""A softmax over scores that come a few at a time, in powers of 2, which is what processors have."""

import math

import triton
import triton.language as tl

LOG2E = math.log2(math.e)
"""Scores are multiplied by it; sums' logarithms are natural again when divided by it."""


@triton.jit
def weigh(score, top, total, AXIS: tl.constexpr):
    """Of scores along AXIS, float32: their weights, and how much those of earlier scores are now worth;
    then the largest score and the sum of weights so far, which were `top` and `total`.

    Scores of -inf weigh nothing, even if there has been no other.
    """
    above = tl.maximum(top, tl.max(score, AXIS))
    safe = tl.where(above == float("-inf"), 0.0, above)
    share = tl.exp2(score - tl.expand_dims(safe, AXIS))
    before = tl.exp2(top - safe)
    return share, before, above, total * before + tl.sum(share, AXIS)
