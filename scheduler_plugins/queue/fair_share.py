# SPDX-License-Identifier: Apache-2.0
"""Chooses the next class, and decides the measures for a class that is owed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized

from scheduler_plugins.qos.classes import QosClass, default_class
from scheduler_plugins.qos.shares import DeficitShares


class FairShare:
    """Chooses among the classes that have requests, by `DeficitShares`.

    A class is *owed* if it has had less than its reserve. Its requests go first. A prefill of lower priority should be
    preempted for it (`should_yield`). Steps that it shares with lower classes, or for which its next request would
    wait, should be short (`wants_short_steps`).
    """

    def __init__(self) -> None:
        """Start without classes; see `update`."""
        self._shares = DeficitShares(())
        self._classes: dict[str, QosClass] = {}
        self._class_queues: Mapping[str, Sized] = {}
        self.is_shared = False
        """Whether there are several classes. Read it, do not change it."""

    def update(self, classes: Sequence[QosClass], class_queues: Mapping[str, Sized]) -> None:
        """Use other classes from now on. Classes that stay keep their balances.

        Args:
            class_queues: the waiting requests of each class; read at every decision.
        """
        self._classes = {qos_class.name: qos_class for qos_class in classes}
        self.is_shared = len(self._classes) > 1
        self._default = default_class(classes).name
        self._shares.update(classes)
        self._class_queues = class_queues

    @property
    def classes(self) -> Sequence[QosClass]:
        return tuple(self._classes.values())

    def class_of(self, qos: str) -> str:
        """The class of requests that name `qos`."""
        return qos if qos in self._classes else self._default

    def balance_s(self, name: str) -> float:
        """Seconds of work that a class has earned and not used."""
        return self._shares.balance_s(name)

    def next(self) -> str:
        """The class to serve next. At least one request must wait."""
        if len(self._class_queues) == 1:
            return self._default
        return self._shares.choose(self._waiting())

    def charge(self, name: str, cost_s: float) -> Mapping[str, float]:
        """A request of this class starts and no longer waits. Its class pays.

        Returns:
            The amount booked on each class, for `refund`.
        """
        if len(self._class_queues) == 1:
            return {}  # the only class owns all work
        return self._shares.charge(name, cost_s, self._waiting())

    def refund(self, booked: Mapping[str, float]) -> None:
        """Undo a booking of `charge`, because the work was not done."""
        self._shares.refund(booked)

    def priority(self, name: str) -> int:
        """Priority of a class."""
        return self._classes[name].priority

    def is_owed(self, name: str) -> bool:
        """Whether a class has had less than its reserve and there are classes of lower priority."""
        if len(self._classes) == 1 or self._shares.balance_s(name) <= 0:
            return False
        return self._classes[name].priority > min(
            qos_class.priority for qos_class in self._classes.values()
        )

    def outranks(self, name: str, qos: str) -> bool:
        """Whether the class's priority is at least the priority of requests that name `qos`."""
        return self._classes[name].priority >= self._classes[self.class_of(qos)].priority

    def should_yield(self, qos: str, head: str) -> bool:
        """Whether an unfinished prefill of requests that name `qos` should be preempted.

        True if the next request belongs to a class of higher priority that has had less than its reserve. The prefix
        cache keeps the computed KV until the request comes back, so little is lost. It is not enough that such a class
        has requests. Another request may have to start before them (`TurnedBack`), and two prefills that yield to each
        other never end.

        Args:
            head: the class of the next request.
        """
        mine = self._classes[self.class_of(qos)]
        return self._shares.balance_s(head) > 0 and self._classes[head].priority > mine.priority

    def wants_short_steps(self, prefilling: Iterable[str]) -> bool:
        """Whether the step that is scheduled now should be short.

        True if the engine has work of some class and a class of higher priority is owed. The next request of that class
        waits for the running step. If it shares a step, it waits for all work in that step.

        Args:
            prefilling: the classes of the running prefills.
        """
        if len(self._classes) == 1:
            return False
        here = {*self._waiting(), *map(self.class_of, prefilling)}
        lowest = min((self._classes[name].priority for name in here), default=None)
        return lowest is not None and any(
            qos_class.priority > lowest and self._shares.balance_s(qos_class.name) > 0
            for qos_class in self._classes.values()
        )

    def _waiting(self) -> list[str]:
        return [name for name, class_queue in self._class_queues.items() if len(class_queue)]
