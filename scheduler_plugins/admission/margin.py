# SPDX-License-Identifier: Apache-2.0
"""A factor that corrects predictions, learnt from their outcomes."""

from __future__ import annotations

_STEP = 0.05
_NEAR = 0.3
"""Predictions below this fraction of the promise never refuse a request, so nothing is learnt from them."""
_LEAST, _MOST = 0.5, 1 / _NEAR
"""Bounds of a margin. A larger margin would refuse the very requests from which it learns to shrink."""


class Margin:
    """A factor for predictions. It is learnt so that only a small fraction of the real times exceeds prediction times
    factor.

    It follows a percentile of the ratio real / predicted in steps: up by nearly 5 % if the ratio was exceeded,
    otherwise down a little. The ratio does not depend on the margin, so late answers cannot make the margin oscillate.
    """

    def __init__(self, misses: float) -> None:
        """`misses`: fraction of the predictions that the real time may exceed, such as 0.01."""
        self._misses = misses
        self.value = 1.0

    def learn(self, real_s: float, predicted_s: float, promised_s: float) -> None:
        """Learn from a request that was predicted to take `predicted_s` and took `real_s`. `promised_s` is infinite if
        nothing is promised."""
        if not _NEAR * promised_s <= predicted_s < float("inf"):
            return
        exceeded = real_s > self.value * predicted_s
        factor = 1 + _STEP * (1 - self._misses) if exceeded else 1 - _STEP * self._misses
        self.value = min(_MOST, max(_LEAST, self.value * factor))
