# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Online softmax (Milakov and Gimelshein 2018): over scores that come a few at a time. It uses
powers of 2, which GPUs compute natively."""

import math

import triton
import triton.language as tl

LOG2E = math.log2(math.e)
"""log2(e). Scores are multiplied by this factor. A base-2 log-sum-exp divided by it is a natural
one."""


@triton.jit
def softmax_step(score, top, total, AXIS: tl.constexpr):
    """Add scores to a running softmax along AXIS. Scores of -inf weigh nothing, even if they come
    first.

    Args:
        score: base-2 scores, float32.
        top: the largest score so far; -inf before the first.
        total: the sum of weights so far, relative to `top`.

    Returns:
        share: the weights of `score`, relative to the new `top`.
        before: the factor for earlier results.
        top, total: with `score` included.
    """
    above = tl.maximum(top, tl.max(score, AXIS))
    safe = tl.where(above == float("-inf"), 0.0, above)
    share = tl.exp2(score - tl.expand_dims(safe, AXIS))
    before = tl.exp2(top - safe)
    return share, before, above, total * before + tl.sum(share, AXIS)
