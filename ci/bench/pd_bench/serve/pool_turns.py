# SPDX-License-Identifier: Apache-2.0
"""The rounds of `bench serve --pool`, and what they are compared with."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pd_bench.report import Comparison
from pd_bench.sample import Sample
from pd_bench.serve.sending import Answer
from pd_bench.serve.trace import TimedRequest

POOL, PLAIN, AGAIN = "with the pool", "no pool", "after kill -9"
BARS = {PLAIN: 1.1, POOL: 0.5}
"""Most mean TTFT, as a multiple of that on the other side: with the pool beside no pool, and after the engines have died
beside the time before."""


class Round(NamedTuple):
    """Requests of one load that are sent at their times."""

    load: float
    number: int
    requests: Sequence[TimedRequest]


@dataclass
class Turns:
    """The answers of one load, by contender. Each figure is over all rounds: rounds have unlike requests, so a median of
    rounds would be the figure of one round."""

    answers: dict[str, list[Answer]] = field(default_factory=dict)

    def add(self, name: str, answers: Sequence[Answer]) -> None:
        """One round has been served."""
        self.answers.setdefault(name, []).extend(answers)

    def ttft_s(self, name: str) -> float:
        """The mean of those that were served."""
        return statistics.mean(answer.ttft_s for answer in self.answers[name] if not answer.failure)

    def tpot_ms(self, name: str) -> float:
        """The mean of those that were served."""
        return 1e3 * statistics.mean(
            answer.tpot_s for answer in self.answers[name] if not answer.failure
        )

    def equal(self, name: str) -> int:
        """How many answers equal the answers of the stack without a pool."""
        both = zip(self.answers[name], self.answers[PLAIN], strict=True)
        return sum(not mine.failure and mine.text == reference.text for mine, reference in both)


def compared(turns: Mapping[float, Turns]) -> tuple[list[Comparison], list[Comparison]]:
    """With the pool beside no pool, and after the engines' death beside the time before.

    Args:
        turns: by load.
    """
    first, again = list[Comparison](), list[Comparison]()
    for load, turn in turns.items():
        for results, name, beside in ((first, POOL, PLAIN), (again, AGAIN, POOL)):
            for figure, mine, other, *judged in (
                ("TTFT mean", turn.ttft_s(name), turn.ttft_s(beside), "s", BARS[beside], False),
                ("TPOT mean", turn.tpot_ms(name), turn.tpot_ms(beside), "ms", None, False),
                ("answers equal", turn.equal(name), len(turn.answers[PLAIN]), "", 1.0, True),
            ):
                samples = Sample((float(mine),)), Sample((float(other),))
                results.append(Comparison(figure, {"load": load}, *samples, *judged))
    return first, again
