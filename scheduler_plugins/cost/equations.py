# SPDX-License-Identifier: Apache-2.0
"""One step as one linear equation in the coefficients of the cost model."""

from __future__ import annotations

import numpy as np

from scheduler_plugins.cost.model import CostModel, StepLoad
from scheduler_plugins.cost.nnls import Floats

COEFFICIENTS = 6


def features(load: StepLoad) -> Floats:
    """What `a, b, c, d0, d1, d2` are multiplied by in the duration of a step; float64 `[6]`."""
    prefill = load.tokens > 0
    row = (load.tokens, load.pairs, prefill, not prefill, load.batch, load.context)
    return np.array(row, dtype=np.float64)


def from_coefficients(values: Floats, chunk_tokens: int, error: float | None) -> CostModel:
    """The cost model of solved coefficients, float64 `[6]`, in the order of `features`."""
    a, b, c, d0, d1, d2 = (float(value) for value in values)
    return CostModel(a=a, b=b, c=c, d0=d0, d1=d1, d2=d2, chunk_tokens=chunk_tokens, error=error)
