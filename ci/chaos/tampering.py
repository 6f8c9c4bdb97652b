# SPDX-License-Identifier: Apache-2.0
"""The armed faults of one rank, and counts of its chunks by path."""

import random
import threading
from collections import Counter
from collections.abc import Callable, Collection

from chaos.faults import Fault


class Tampering:
    """Shared by the transports and wires of an agent. One thread arms it, other threads use it.

    Attributes:
        injected: faults since the last `disarm`.
        paths: chunks by their path through this rank (`TamperingTransport`).
        interrupt: makes the engine take back the pages of a transfer while the agent works on them; returns whether it
            does.
    """

    interrupt: Callable[[str], bool]

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._fault: Fault | None = None
        self._share = 0.0
        self._left = 0
        self.injected = 0
        self.paths: Counter[str] = Counter()

    def arm(self, fault: Fault, count: int, share: float) -> None:
        """Hit this fraction of later arrivals, at most `count` times."""
        with self._lock:
            self._fault, self._left, self._share = fault, count, share

    def disarm(self) -> int:
        """Stop hitting. Returns the number of hits since the last call."""
        with self._lock:
            injected, self.injected, self._left = self.injected, 0, 0
            return injected

    def draw(self, among: Collection[Fault]) -> Fault | None:
        """The fault for the present arrival, if one of these faults is possible; None for no fault."""
        with self._lock:
            fault = self._fault
            if fault not in among or not self._left or self._random.random() >= self._share:
                return None
            self._left -= 1
            self.injected += 1
            return fault

    def undo(self) -> None:
        """Take back a drawn fault that was not possible."""
        with self._lock:
            self.injected -= 1
            self._left += 1

    def number(self, below: int) -> int:
        """A number in [0, below)."""
        with self._lock:
            return self._random.randrange(below)
