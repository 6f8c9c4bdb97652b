# SPDX-License-Identifier: Apache-2.0
"""Predicts time to first token and time per token of a request that arrives now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from scheduler_plugins.admission.load import ClassLoad, LoadReport
from scheduler_plugins.qos.classes import QosClass
from scheduler_plugins.queue.work import bucket_of

_FULL = 0.95
"""Cap of the load by work that keeps coming. At any higher load, 1 - this counts as free."""


class Prediction(NamedTuple):
    """In seconds."""

    wait_s: float  # until its prefill begins
    prefill_s: float
    tpot_s: float
    settled: bool  # sequences have already ended, so the length of a decode is known

    @property
    def ttft_s(self) -> float:
        return self.wait_s + self.prefill_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictor:
    """Predicts from a report, for the policy and classes of one queue."""

    classes: Mapping[str, QosClass]
    by_cost: bool
    """Whether short requests overtake (`QueuePolicy.by_cost`)."""

    def predict(self, report: LoadReport, qos: str, tokens: int, cached: int) -> Prediction:
        """Predict for a prompt of `tokens` tokens, `cached` of which are in the engine's cache.

        `qos` is the name of a class in the report.
        """
        prefill_s = report.model.prefill_s(tokens, cached)
        own = report.classes[qos]
        last = bucket_of(prefill_s)
        ahead_s = _ahead(own, last, self.by_cost)
        wait_s = report.prefill_left_s + self._wait_s(report, qos, ahead_s, last)
        part = ahead_s / max(sum(own.work_s), 1e-9) if own.waiting else 0.0
        tpot_s = _tpot_s(report, own, tokens, min(1.0, part), wait_s + prefill_s)
        return Prediction(wait_s, prefill_s, tpot_s, report.decode_tokens > 0)

    def _wait_s(self, report: LoadReport, qos: str, ahead_s: float, last: int) -> float:
        """Seconds until the engine has done the work before this request and the work that overtakes it.

        The class is served at least at its reserved fraction, or more if other classes leave time. If the class has a
        positive balance, that amount of its work is served before anything else.
        """
        own = report.classes[qos]
        overtaking = sum(own.arriving[:last]) if self.by_cost else 0.0
        first_s = ahead_s / _left(overtaking)
        if first_s <= own.balance_s:
            return first_s
        fraction = self.classes[qos].reserved_fraction
        reserved_s = ahead_s / (fraction * _left(overtaking / fraction))
        others = [load for name, load in report.classes.items() if name != qos]
        others_s = sum(sum(load.work_s) for load in others)
        theirs = sum(sum(load.arriving) for load in others)
        shared_s = (ahead_s + others_s) / _left(overtaking + theirs)
        return min(reserved_s, shared_s)


def _ahead(load: ClassLoad, last: int, by_cost: bool) -> float:
    return sum(load.work_s[: last + 1] if by_cost else load.work_s)


def _left(busy: float) -> float:
    return 1.0 - min(busy, _FULL)


def _tpot_s(report: LoadReport, own: ClassLoad, tokens: int, part: float, ttft_s: float) -> float:
    """Time per token at the moment when this request begins to decode.

    Mooncake's second rule: by then, sequences older than the average decode have ended, and sequences that are
    prefilled before this request have begun. A decision by the present batch would react one prefill too late, and so
    admit in bursts.
    """
    decode_s = report.decode_s
    stay = report.decoding
    still = 1.0
    if decode_s:
        stay = tuple(sequence for sequence in stay if sequence.age_s + ttft_s < decode_s)
        # Requests whose prefill ends before this one. The earliest of them may also have ended by then.
        still = min(1.0, decode_s / ttft_s)
    begun = own.waiting * part * still
    context = sum(sequence.context for sequence in stay) + own.tokens * part * still + tokens
    return report.token_s(round(len(stay) + begun + 1), round(context))
