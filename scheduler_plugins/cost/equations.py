# SPDX-License-Identifier: Apache-2.0
"""Steps as linear equations in the coefficients of the cost model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scheduler_plugins.cost.model import CostModel, StepLoad
from scheduler_plugins.cost.nnls import Floats

COEFFICIENTS = 6


def features(loads: Sequence[StepLoad]) -> Floats:
    """The factors of `a, b, c, d0, d1, d2` in the durations of steps; float64 `[step, 6]`."""
    rows = [
        (load.tokens, load.pairs, load.tokens > 0, not load.tokens, load.batch, load.context)
        for load in loads
    ]
    return np.array(rows, dtype=np.float64)


def from_coefficients(values: Floats, chunk_tokens: int, error: float | None) -> CostModel:
    """The cost model with solved coefficients, float64 `[6]`, in the order of `features`."""
    a, b, c, d0, d1, d2 = (float(value) for value in values)
    return CostModel(a=a, b=b, c=c, d0=d0, d1=d1, d2=d2, chunk_tokens=chunk_tokens, error=error)
