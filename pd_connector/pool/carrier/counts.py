# SPDX-License-Identifier: Apache-2.0
"""Counts of what a carrier has done."""

import threading
from collections import Counter


class Counts:
    """Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def __getitem__(self, what: str) -> int:
        return self._counts[what]

    def add(self, what: str, number: int = 1) -> None:
        """This has happened `number` times more."""
        with self._lock:
            self._counts[what] += number

    def all(self) -> dict[str, int]:
        """What was counted so far."""
        with self._lock:
            return dict(self._counts)
