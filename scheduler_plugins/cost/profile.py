# SPDX-License-Identifier: Apache-2.0
"""The cost model of a profile. It is fitted once from measured steps, and kept in a file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from scheduler_plugins.cost.engine_profile import EngineProfile, Errors
from scheduler_plugins.cost.equations import COEFFICIENTS, features, from_coefficients
from scheduler_plugins.cost.model import CostModel, MixedCosts, StepLoad
from scheduler_plugins.cost.nnls import Floats, nnls

HELD_OUT_EVERY = 5
"""Divisor: one measurement in five is not fitted. The error is computed from these."""
FEWEST = 20
_PREFILL_STEPS = 2
"""Index of `c` among the coefficients."""
_BARE_EXPONENT = re.compile(r"(?<=[\s\[,])(-?\d+)e")


class ProfileError(ValueError):
    """Measurements or a profile file from which no cost model can be made."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One timed step."""

    load: StepLoad
    duration_s: float


def loads(longest_tokens: int, page_size: int, most_batch: int) -> list[StepLoad]:
    """The steps of one kind that a profile should time: 11 lengths x 3 cached shares, then 6 batches x 7 contexts.

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


def mixed_loads(longest_tokens: int, most_batch: int, chunk_tokens: int) -> list[StepLoad]:
    """The steps with both prompt tokens and decoding sequences that a profile should time: 3 batches x 2 contexts x 4 prompts.

    Args:
        longest_tokens: longest context, and longest prompt.
        most_batch: largest number of sequences that decode.
        chunk_tokens: most tokens of a step, decoding sequences included; 0: prompts are not cut. No prompt is longer
            than the tokens that are left in such a step.
    """
    steps: dict[StepLoad, None] = {}
    for batch in sorted({max(1, most_batch // 4**k) for k in range(3)}):
        most = min(longest_tokens, chunk_tokens - batch) if chunk_tokens else longest_tokens
        for context in sorted({max(1, longest_tokens // 4**k) for k in range(1, 3)}):
            for tokens in sorted({max(2, most // 2**k) for k in range(4)}) if most > 1 else ():
                steps[StepLoad(tokens, tokens**2, batch, batch * context)] = None
    return list(steps)


def fit(measured: Sequence[Measurement], chunk_tokens: int = 0) -> CostModel:
    """Fit four fifths of the measurements; `error` is the mean relative error on the other fifth.

    Relative errors are fitted, so that short steps count as much as long ones.

    Args:
        measured: steps, or whole prefills. Steps with both prompt tokens and decoding sequences give `mixed`; it is None
            without any.
        chunk_tokens: most prompt tokens in a step. Longer prefills were cut into such steps. 0: no prefill was cut.

    Raises:
        ProfileError: there are fewer than 20 measurements, a duration is not positive, or no measurement has prefill.
    """
    return fitted(measured, chunk_tokens)[0]


def fitted(measured: Sequence[Measurement], chunk_tokens: int = 0) -> tuple[CostModel, Errors]:
    """The result of `fit`, and the mean relative errors of each kind of step on measurements that were not fitted."""
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
        measured, key=lambda measurement: (_kind(measurement.load), measurement.duration_s)
    )
    held_out = ordered[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY]
    rest = [
        measurement
        for n, measurement in enumerate(ordered)
        if n % HELD_OUT_EVERY != HELD_OUT_EVERY // 2
    ]
    if not any(measurement.load.tokens for measurement in rest):
        raise ProfileError("no measurement contains a prefill: measure some prompts, too")
    rows = np.stack([_row(measurement, chunk_tokens) for measurement in rest])
    values = nnls(rows.T @ rows, rows.sum(axis=0))
    missed: dict[str, list[float]] = {"decode": [], "mixed": [], "prefill": []}
    for measurement in held_out:
        error = abs(float(_row(measurement, chunk_tokens) @ values) - 1)
        missed[_kind(measurement.load)].append(error)
    model = from_coefficients(
        values[:COEFFICIENTS],
        chunk_tokens,
        _mean([error for errors in missed.values() for error in errors]),
    )
    if any(_kind(measurement.load) == "mixed" for measurement in rest):
        m0, m1, m2 = (float(value) for value in values[COEFFICIENTS:])
        model = replace(model, mixed=MixedCosts(m0=m0, m1=m1, m2=m2))
    return model, Errors(**{kind: _mean(errors) for kind, errors in missed.items()})


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _kind(load: StepLoad) -> str:
    if not load.tokens:
        return "decode"
    return "mixed" if load.batch else "prefill"


def _row(measurement: Measurement, chunk_tokens: int) -> Floats:
    """The equation of a measurement: `row @ coefficients` should be 1. The coefficients are those of `features`, then
    `m0, m1, m2`; float64 `[9]`."""
    load = measurement.load
    row: Floats = np.concatenate([features([load])[0], np.zeros(3)])
    if load.tokens and load.batch:
        row[_PREFILL_STEPS:COEFFICIENTS] = 0.0
        row[COEFFICIENTS:] = 1.0, load.batch, load.context
    elif chunk_tokens:
        row[_PREFILL_STEPS] = -(-load.tokens // chunk_tokens)
    return row / measurement.duration_s


def save(path: Path, model: CostModel | EngineProfile) -> None:
    """Write a model, or the profile of a whole engine, as JSON that YAML's readers read, too."""
    text = msgspec.json.format(msgspec.json.encode(model)).decode()
    # YAML takes 3e-05 for a word, and 3.0e-05 for a number.
    path.write_text(_BARE_EXPONENT.sub(r"\1.0e", text) + "\n")


def load(path: Path) -> CostModel:
    """Read the costs that `save` wrote: a model, or those of a profile.

    Raises:
        ProfileError: the file cannot be read, or a coefficient is negative.
    """
    try:
        content = msgspec.json.decode(path.read_bytes())
        if isinstance(content, dict) and "costs" in content:
            content = content["costs"]
        model = msgspec.convert(content, CostModel)
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise ProfileError(
            f"{path}: not a cost model ({error}); `pd-connector profile` measures a new one"
        ) from None
    if model.problem:
        raise ProfileError(f"{path}: {model.problem}; `pd-connector profile` measures a new one")
    return model
