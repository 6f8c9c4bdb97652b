# SPDX-License-Identifier: Apache-2.0
"""By how much predictions are too small, learnt from what became of them."""

from __future__ import annotations

_STEP = 0.05
_NEAR = 0.3
"""Predictions below this part of the promise never refuse a request, so nothing is learnt from them."""
_LEAST, _MOST = 0.5, 1 / _NEAR
"""Bounds of a margin. A larger one would refuse the very requests from which it learns to shrink."""


class Margin:
    """A factor for predictions, learnt so that reality exceeds only a part of the products.

    It follows a percentile of reality / prediction in steps: up by nearly 5 % when that was exceeded, and
    down a little when not. The ratio does not depend on the margin, so late answers cannot make it oscillate.
    """

    def __init__(self, misses: float) -> None:
        """`misses`: part of the predictions that reality may exceed, as 0.01."""
        self._misses = misses
        self.value = 1.0

    def learn(self, real_s: float, predicted_s: float, promised_s: float) -> None:
        """A request of which `predicted_s` was expected took `real_s`; `promised_s`: infinite where nothing is promised."""
        if not _NEAR * promised_s <= predicted_s < float("inf"):
            return
        exceeded = real_s > self.value * predicted_s
        factor = 1 + _STEP * (1 - self._misses) if exceeded else 1 - _STEP * self._misses
        self.value = min(_MOST, max(_LEAST, self.value * factor))
