# SPDX-License-Identifier: Apache-2.0
"""Clocks that stand still until a test moves them."""


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now
