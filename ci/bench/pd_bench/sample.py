# SPDX-License-Identifier: Apache-2.0
"""Repeated measurements of one quantity."""

from __future__ import annotations

import statistics
from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """Values of one quantity in one unit, one for each run, in the order of the runs."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("a sample of no values: at least one run is needed")

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def p10(self) -> float:
        """Value below which a tenth of the runs lie, interpolated between neighbours."""
        return self._decile(1)

    @property
    def p90(self) -> float:
        """Value below which nine tenths of the runs lie, interpolated between neighbours."""
        return self._decile(9)

    def scaled(self, factor: float) -> Sample:
        """The same measurements in another unit."""
        return Sample(tuple(value * factor for value in self.values))

    def _decile(self, number: int) -> float:
        if len(self.values) == 1:
            return self.values[0]
        return statistics.quantiles(self.values, n=10, method="inclusive")[number - 1]


def single(value: float) -> Sample:
    """A sample of one value, such as a bar."""
    return Sample((value,))
