# SPDX-License-Identifier: Apache-2.0
"""Which engine serves next. A policy decides without a clock and without I/O."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, TypeVar

from pd_connector.errors import ConfigError
from pd_connector.extensions import load_entry_points, unknown_name

GROUP = "scheduler_plugins.policies"
"""Entry points of other packages' policies. Those of the queue are in the same group
(`scheduler_plugins/order/registry.py`)."""


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


POLICIES: dict[str, type[RouterPolicy]] = {"round_robin": RoundRobin}
"""This package's own."""


def create(name: str) -> RouterPolicy:
    """A new policy object. This package's own names come before those of other packages.

    Args:
        name: option `--policy`.

    Raises:
        ConfigError: no policy has that name, or another package's cannot be loaded.
    """
    if name in POLICIES:
        return POLICIES[name]()
    extension = load_entry_points(GROUP).get(name)
    if extension is None:
        raise unknown_name("policy", name, POLICIES, GROUP, "policy")
    found = extension.load()
    if not (isinstance(found, type) and issubclass(found, RouterPolicy)):
        raise ConfigError(
            f"policy {name!r}, which {extension.source} adds, is {found!r}: must be a subclass of "
            "scheduler_plugins.router.policy.RouterPolicy"
        )
    return found()
