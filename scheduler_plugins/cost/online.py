# SPDX-License-Identifier: Apache-2.0
"""The cost model learnt from the engine's own steps while it serves."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from scheduler_plugins.cost.equations import COEFFICIENTS, features, from_coefficients
from scheduler_plugins.cost.model import CostModel, StepLoad
from scheduler_plugins.cost.nnls import nnls

_KEPT = 0.99
"""Weight of a kind's past at each new step of that kind: half is forgotten after 69 steps."""
_FIT_FIRST, _FIT_EVERY = 32, 128
"""Steps before the first fit, and between later fits. The number doubles from the first value to the second."""
_ENOUGH = 24
"""Prefill steps before a fit is trusted."""
_SIZES = 3
"""Powers of two that their token counts must span. Steps of one size cannot separate a from c."""
_BELIEVED_ERROR = 0.3
_ERRORS = 64
_MOVED = 0.05


_Step = tuple[StepLoad, float]
"""The work of a step, and its duration in seconds."""


class _Equations:
    """The least squares problem of all steps of one kind. Older steps have less weight."""

    def __init__(self) -> None:
        self.gram = np.zeros((COEFFICIENTS, COEFFICIENTS))
        self.moment = np.zeros(COEFFICIENTS)

    def add(self, steps: Sequence[_Step]) -> None:
        """Add steps in the order in which they ran, with one matrix product for all."""
        if not steps:
            return
        loads, durations_s = zip(*steps, strict=True)
        # Every equation is divided by its duration. So relative errors count, and a step that took ten times too long
        # weighs at most 1.
        rows = features(loads) / np.array(durations_s)[:, None]
        weighed = rows * _KEPT ** np.arange(len(rows) - 1, -1, -1)[:, None]
        past = _KEPT ** len(rows)
        self.gram = self.gram * past + weighed.T @ rows
        self.moment = self.moment * past + weighed.sum(axis=0)


class OnlineFit:
    """Learns from every step, and publishes a new model when costs have changed.

    `model` is replaced, never changed. Every order must then be computed again. So it is replaced only if the cost of a
    prompt or a step has changed by 5 %, or if trust in the model has changed. Steps are noted when they come, and
    learnt together: 32 at a time, later 128.
    """

    def __init__(self, *, start: CostModel | None = None, chunk_tokens: int = 0) -> None:
        """`start`: a profile's model, used until enough steps are seen (see `profile.load`)."""
        self.model = start or CostModel.token_count()
        self._start = start
        self._chunk_tokens = chunk_tokens
        # Steps with and without prefill are forgotten separately. An hour of decoding must not erase the cost of
        # prefill.
        self._of_prefills, self._of_decodes = _Equations(), _Equations()
        self._candidate = self.model
        self._errors: deque[float] = deque(maxlen=_ERRORS)
        self._sizes: set[int] = set()
        self._new: list[_Step] = []
        self._fit_after = _FIT_FIRST
        self._prefills = self._decodes = 0
        self._tokens = self._seconds = 0.0

    @property
    def error(self) -> float | None:
        """Mean relative error over the last prefill steps. Each was predicted before it was learnt."""
        return sum(self._errors) / len(self._errors) if self._errors else None

    @property
    def knows_prefill(self) -> bool:
        """Whether any step with prefill has been learnt. If so, at least the mean rate is known."""
        return self._seconds > 0

    def note(self, load: StepLoad, duration_s: float) -> None:
        """Note a step that has ended. An empty step, or a step without a duration, is ignored."""
        if duration_s > 0 and (load.tokens or load.batch):
            self._new.append((load, duration_s))

    def catch_up(self) -> None:
        """Learn from the noted steps, if there are enough. Call this after every few steps."""
        if len(self._new) >= self._fit_after:
            self._fit_after = min(2 * self._fit_after, _FIT_EVERY)
            self._learn()
            self._fit()

    def _learn(self) -> None:
        steps, self._new = self._new, []
        prefills = [step for step in steps if step[0].tokens]
        decodes = [step for step in steps if not step[0].tokens]
        for load, duration_s in prefills:
            if self._candidate.known:
                missed = abs(self._candidate.step_s(load) - duration_s) / duration_s
                self._errors.append(missed)
            self._sizes.add(load.tokens.bit_length())
            self._tokens += load.tokens
            self._seconds += duration_s
        self._prefills += len(prefills)
        self._decodes += len(decodes)
        self._of_prefills.add(prefills)
        self._of_decodes.add(decodes)

    def _fit(self) -> None:
        if self._prefills >= _ENOUGH and len(self._sizes) >= _SIZES:
            prefills, decodes = self._of_prefills, self._of_decodes
            values = nnls(prefills.gram + decodes.gram, prefills.moment + decodes.moment)
            self._candidate = from_coefficients(values, self._chunk_tokens, self.error)
        error = self.error
        if self._candidate is self._start:
            believed = True
        else:
            believed = self._candidate.known and error is not None and error <= _BELIEVED_ERROR
        self._publish(self._candidate if believed else self._fallback())

    def _fallback(self) -> CostModel:
        """A model with prefill by token counts, and with the learnt decode costs if there are any."""
        model = self._start or CostModel.token_count()
        if self._seconds:
            model = CostModel.token_count(self._tokens / self._seconds)
        if self._decodes >= _ENOUGH:
            gram, moment = self._of_decodes.gram, self._of_decodes.moment
            decode = from_coefficients(nnls(gram, moment), 0, None)
            model = replace(model, d0=decode.d0, d1=decode.d1, d2=decode.d2)
        return model

    def _publish(self, model: CostModel) -> None:
        moved = max(
            _moved(before_s, after_s)
            for before_s, after_s in zip(_probe(self.model), _probe(model), strict=True)
        )
        if model.known is not self.model.known or moved > _MOVED:
            self.model = model


def _probe(model: CostModel) -> list[float]:
    """Costs of prompts and steps of several sizes."""
    prefill = [model.prefill_s(tokens) for tokens in (256, 2048, 16384)]
    return prefill + [model.decode_step_s(*load) for load in ((1, 1000), (32, 64_000))]


def _moved(before_s: float, after_s: float) -> float:
    return abs(after_s - before_s) / max(before_s, 1e-12)
