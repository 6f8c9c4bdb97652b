# SPDX-License-Identifier: Apache-2.0
"""Which engine serves next. A policy decides without a clock and without I/O."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """What a policy may look at."""

    @property
    def url(self) -> str: ...

    @property
    def in_flight(self) -> int: ...


C = TypeVar("C", bound=Candidate)


class RouterPolicy(ABC):
    """Chooses among engines that could serve. One object per side, asked once per attempt."""

    @abstractmethod
    def choose(self, candidates: Sequence[C]) -> C:
        """Return one of `candidates`, which is never empty and may differ from call to call.

        The caller sends a request to the engine returned; the policy may remember that it did.
        """


class RoundRobin(RouterPolicy):
    """The engine whose turn is longest ago; engines never chosen come first, in the order given."""

    def __init__(self) -> None:
        self._turn = 0
        self._last_turn: dict[str, int] = {}

    def choose(self, candidates: Sequence[C]) -> C:
        chosen = min(candidates, key=lambda candidate: self._last_turn.get(candidate.url, 0))
        self._turn += 1
        self._last_turn[chosen.url] = self._turn
        return chosen
