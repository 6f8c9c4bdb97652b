# SPDX-License-Identifier: Apache-2.0
"""What is to be hit: the faults that are armed in one rank, and a count of the paths that its chunks took."""

import random
import threading
from collections import Counter
from collections.abc import Callable, Collection

from chaos.faults import Fault


class Tampering:
    """Shared by the transports and wires of an agent. Armed by one thread, used by others.

    Attributes:
        injected: faults since the last `disarm`.
        paths: chunks by the way they took through this rank (`TamperingTransport`).
        interrupt: has the engine take the pages of a transfer back, while the agent is in the middle of something;
            returns whether it does.
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
        """Hit this part of what comes from now on, at most `count` times."""
        with self._lock:
            self._fault, self._left, self._share = fault, count, share

    def disarm(self) -> int:
        """Hit nothing any more; returns how many have been hit since the last call."""
        with self._lock:
            injected, self.injected, self._left = self.injected, 0, 0
            return injected

    def draw(self, among: Collection[Fault]) -> Fault | None:
        """What happens to that which has come now, if one of these faults can; None for nothing."""
        with self._lock:
            fault = self._fault
            if fault not in among or not self._left or self._random.random() >= self._share:
                return None
            self._left -= 1
            self.injected += 1
            return fault

    def undo(self) -> None:
        """What was drawn could not be done."""
        with self._lock:
            self.injected -= 1
            self._left += 1

    def number(self, below: int) -> int:
        """A number in [0, below)."""
        with self._lock:
            return self._random.randrange(below)
