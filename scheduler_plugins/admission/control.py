# SPDX-License-Identifier: Apache-2.0
"""The decision to admit or refuse a request."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Literal, NamedTuple

from scheduler_plugins.admission.load import LoadReport
from scheduler_plugins.admission.margin import Margin
from scheduler_plugins.admission.predict import Prediction, Predictor
from scheduler_plugins.qos.classes import QosClass, Slo, default_class

MISSES = 0.01
"""Fraction of predictions that the real time may exceed. It is small, because sequences that decode together miss a
promised TPOT together. If the margin is too small, a whole batch misses it."""


class Decision(NamedTuple):
    """The decision on a request. The HTTP side turns a refusal into 429."""

    admit: bool
    cause: Literal["", "ttft", "tpot"]  # the promise that would be broken
    retry_after_s: int  # value of Retry-After; 0 if admitted
    prediction: Prediction | None  # None if nothing is promised


ADMITTED = Decision(True, "", 0, None)


class AdmissionControl:
    """Admits a request if the promise to its class would be kept. A class without an SLO has all requests admitted.

    Each class has margins, learnt from the errors of its predictions. So a bias of the predictions
    costs a few dozen requests, not the promise.
    """

    def __init__(self, classes: Sequence[QosClass], *, by_cost: bool) -> None:
        """`by_cost`: the attribute of the queue's policy (`QueuePolicy.by_cost`)."""
        self._classes = {qos_class.name: qos_class for qos_class in classes}
        self._default = default_class(classes).name
        self._predictor = Predictor(classes=self._classes, by_cost=by_cost)
        self._ttft = {name: Margin(MISSES) for name in self._classes}
        self._tpot = {name: Margin(MISSES) for name in self._classes}

    def decide(self, report: LoadReport, qos: str, tokens: int, cached: int) -> Decision:
        """Admit or refuse a prompt of `tokens` tokens, `cached` of which are in the cache.

        Changes nothing. `Retry-After` is the time after which the same request would be admitted if
        nothing else came.
        """
        name = self._name(qos)
        slo = self._classes[name].slo
        if slo == Slo():
            return ADMITTED
        prediction = self._predictor.predict(report, name, tokens, cached)
        if slo.ttft_ms is not None:
            late_s = prediction.ttft_s * self._ttft[name].value - slo.ttft_ms / 1e3
            if late_s > 0:
                return Decision(False, "ttft", max(1, ceil(late_s)), prediction)
        if slo.tpot_ms is not None:
            tpot_ms = prediction.tpot_s * self._tpot[name].value * 1e3
            if tpot_ms > slo.tpot_ms:
                again_s = ceil(report.decode_s * (1 - slo.tpot_ms / tpot_ms))
                return Decision(False, "tpot", max(1, again_s), prediction)
        return Decision(True, "", 0, prediction)

    def first_token(self, qos: str, predicted: Prediction, ttft_s: float) -> None:
        """Note that an admitted request got its first token. `predicted` is the prediction behind its decision."""
        name = self._name(qos)
        self._ttft[name].learn(ttft_s, predicted.ttft_s, self._classes[name].slo.ttft_s)

    def last_token(self, qos: str, predicted: Prediction, tpot_s: float) -> None:
        """Note that it got its last token, at `tpot_s` per token after the first."""
        if not predicted.settled:
            return
        name = self._name(qos)
        self._tpot[name].learn(tpot_s, predicted.tpot_s, self._classes[name].slo.tpot_s)

    def _name(self, qos: str) -> str:
        return qos if qos in self._classes else self._default
