# SPDX-License-Identifier: Apache-2.0
"""Least squares with non-negative coefficients, from sums alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_Flags = NDArray[np.bool_]

_TOLERANCE = 1e-10
_RIDGE = 1e-12


def nnls(gram: Floats, moment: Floats) -> Floats:
    """The `x >= 0` that minimises `|Ax - y|`, given `gram = A'A` and `moment = A'y`.

    With sums, a fit can add one observation at a time and forget old ones. This is the active-set method of Lawson and
    Hanson ("Solving Least Squares Problems", chapter 23). It ends after finitely many steps.

    Args:
        gram: float64 `[k, k]`, symmetric, positive semidefinite.
        moment: float64 `[k]`.

    Returns:
        float64 `[k]`. A column of zeros gets the coefficient 0.
    """
    scale = np.sqrt(np.diag(gram))
    seen = scale > 0
    scale = np.where(seen, scale, 1.0)
    scaled, target = gram / np.outer(scale, scale), moment / scale
    x = np.zeros(len(target))
    free = np.zeros(len(target), dtype=bool)
    for _ in range(3 * len(target)):
        gain = np.where(free | ~seen, -np.inf, target - scaled @ x)
        best = int(np.argmax(gain))
        if gain[best] <= _TOLERANCE * max(1.0, float(np.abs(target).max())):
            break
        free[best] = True
        x = _descend(scaled, target, x, free)
    solved: Floats = x / scale
    return solved


def _descend(gram: Floats, moment: Floats, x: Floats, free: _Flags) -> Floats:
    """Go from `x` to the best point of the free coordinates. Coordinates that reach 0 are no longer free."""
    while free.any():
        target = np.zeros(len(x))
        chosen = np.flatnonzero(free)
        # The ridge is needed because two features may have moved together in all steps seen.
        part = gram[np.ix_(chosen, chosen)] + _RIDGE * np.eye(len(chosen))
        target[chosen] = np.linalg.solve(part, moment[chosen])
        negative = free & (target <= 0)
        if not negative.any():
            return target
        reach = x[negative] / np.maximum(x[negative] - target[negative], 1e-300)
        x = x + float(reach.min()) * (target - x)
        free &= x > _TOLERANCE
        x = np.where(free, x, 0.0)
    return x
