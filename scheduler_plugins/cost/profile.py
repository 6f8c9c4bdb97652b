# SPDX-License-Identifier: Apache-2.0
"""The cost model of a profile. It is fitted once from measured steps, and kept in a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from scheduler_plugins.cost.equations import COEFFICIENTS, features, from_coefficients
from scheduler_plugins.cost.model import CostModel, StepLoad
from scheduler_plugins.cost.nnls import Floats, nnls

HELD_OUT_EVERY = 5
"""Divisor: one measurement in five is not fitted. The error is computed from these."""
FEWEST = 20
_PREFILL_STEPS = 2
"""Index of `c` among the coefficients."""


class ProfileError(ValueError):
    """Measurements or a profile file from which no cost model can be made."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One timed step."""

    load: StepLoad
    duration_s: float


def loads(longest_tokens: int, page_size: int, most_batch: int) -> list[StepLoad]:
    """The steps a profile should time: 11 lengths x 3 cached shares, then 6 batches x 7 contexts.

    Args:
        longest_tokens: longest prompt; further lengths fall by a factor of 1.5.
        page_size: tokens in a block: cached prefixes are whole blocks.
        most_batch: largest number of sequences that decode together.
    """
    steps: dict[StepLoad, None] = {}
    lengths = sorted({max(2, round(longest_tokens / 1.5**k)) for k in range(11)})
    for tokens in lengths:
        for share in (0.0, 0.5, 0.9):
            cached = min(int(tokens * share), tokens - 1) // page_size * page_size
            steps[StepLoad.of([(cached, tokens)])] = None
    for batch in sorted({max(1, round(most_batch / 2**k)) for k in range(6)}):
        for context in sorted({max(1, round(longest_tokens / 2.5**k)) for k in range(7)}):
            steps[StepLoad(0, 0, batch, batch * context)] = None
    return list(steps)


def fit(measured: Sequence[Measurement], chunk_tokens: int = 0) -> CostModel:
    """Fit four fifths of the measurements; `error` is the mean relative error on the other fifth.

    Relative errors are fitted, so that short steps count as much as long ones.

    Args:
        measured: steps, or whole prefills.
        chunk_tokens: most prompt tokens in a step. Longer prefills were cut into such steps. 0: no prefill was cut.

    Raises:
        ProfileError: there are fewer than 20 measurements, a duration is not positive, or no measurement has prefill.
    """
    if len(measured) < FEWEST:
        raise ProfileError(
            f"{len(measured)} measurements: at least {FEWEST} are needed; longer prompts, larger batches or more "
            "repeats give more"
        )
    for measurement in measured:
        if not measurement.duration_s > 0:
            raise ProfileError(f"{measurement}: the duration must be a number of seconds > 0")
    # Ordered by duration, so every range of durations is both fitted and held out.
    ordered = sorted(
        measured, key=lambda measurement: (measurement.load.tokens > 0, measurement.duration_s)
    )
    held_out = ordered[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY]
    fitted = [
        measurement
        for n, measurement in enumerate(ordered)
        if n % HELD_OUT_EVERY != HELD_OUT_EVERY // 2
    ]
    if not any(measurement.load.tokens for measurement in fitted):
        raise ProfileError("no measurement contains a prefill: measure some prompts, too")
    rows = np.stack([_row(measurement, chunk_tokens) for measurement in fitted])
    values = nnls(rows.T @ rows, rows.sum(axis=0))
    assert len(values) == COEFFICIENTS
    missed = [abs(float(_row(measurement, chunk_tokens) @ values) - 1) for measurement in held_out]
    return from_coefficients(values, chunk_tokens, sum(missed) / len(missed))


def _row(measurement: Measurement, chunk_tokens: int) -> Floats:
    """The equation of a measurement: `row @ coefficients` should be 1."""
    row: Floats = features([measurement.load])[0]
    if chunk_tokens:
        row[_PREFILL_STEPS] = -(-measurement.load.tokens // chunk_tokens)
    return row / measurement.duration_s


def save(path: Path, model: CostModel) -> None:
    """Write a model as JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(model)) + b"\n")


def load(path: Path) -> CostModel:
    """Read a model that `save` wrote.

    Raises:
        ProfileError: the file cannot be read, or a coefficient is negative.
    """
    try:
        model = msgspec.json.decode(path.read_bytes(), type=CostModel)
    except (OSError, msgspec.MsgspecError) as error:
        raise ProfileError(
            f"{path}: not a cost model ({error}); `pd-connector profile` measures a new one"
        ) from None
    if model.problem:
        raise ProfileError(f"{path}: {model.problem}; `pd-connector profile` measures a new one")
    return model
