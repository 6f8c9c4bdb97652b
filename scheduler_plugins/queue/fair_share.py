# SPDX-License-Identifier: Apache-2.0
"""Which class is served next, and what other classes do for a class that is owed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Sized

from scheduler_plugins.qos.classes import QosClass, default_class
from scheduler_plugins.qos.shares import DeficitShares


class FairShare:
    """Chooses among the classes that have requests, by `DeficitShares`.

    A class is *owed* if it has had less than its reserve. Its requests go first. Besides:

    - A prefill of lower priority should be preempted for it (`should_yield`).
    - Its only request is *guarded* while it is prefilled: no request of lower priority starts beside
      it and makes its steps longer. That costs the others a step's fixed time; the class pays for it as
      part of its work. A class with several requests is not guarded: full batches serve it sooner.
    - Before its next request comes, steps can be kept short for it (`expects_higher`).
    """

    def __init__(self) -> None:
        """Without classes: see `update`."""
        self._shares = DeficitShares(())
        self.guarded: dict[str, int] = {}
        """Guarded requests: id to priority. To be read, not changed."""
        self._classes: dict[str, QosClass] = {}
        self._class_queues: Mapping[str, Sized] = {}

    def update(self, classes: Sequence[QosClass], class_queues: Mapping[str, Sized]) -> None:
        """Use other classes from now on. Classes that stay keep their balances.

        Args:
            class_queues: what waits in each class; read at every decision.
        """
        self._classes = {one.name: one for one in classes}
        self._default = default_class(classes).name
        self._lowest = min(one.priority for one in classes)
        self._shares.update(classes)
        self._class_queues = class_queues

    @property
    def classes(self) -> Sequence[QosClass]:
        return tuple(self._classes.values())

    def class_of(self, qos: str) -> str:
        """Name of the class of requests that name `qos`."""
        return qos if qos in self._classes else self._default

    def balance_s(self, name: str) -> float:
        """Seconds of work that a class has earned and not used."""
        return self._shares.balance_s(name)

    def next(self) -> str:
        """The class to serve next; requests wait."""
        if len(self._class_queues) == 1:
            return self._default
        return self._shares.choose(self._waiting())

    def start(self, request_id: str, name: str, cost_s: float) -> Mapping[str, float]:
        """A request of this class starts, and no longer waits. Its class pays, and it may be guarded.

        Returns:
            What was booked on each class, for `refund`.
        """
        if len(self._class_queues) == 1:
            return {}  # all work is everybody's
        priority = self._classes[name].priority
        owed = priority > self._lowest and self._shares.balance_s(name) > 0
        if owed and not len(self._class_queues[name]):
            self.guarded[request_id] = priority
        return self._shares.charge(name, cost_s, self._waiting())

    def refund(self, booked: Mapping[str, float]) -> None:
        """Take back what `start` booked: the work was not done."""
        self._shares.refund(booked)

    def unguard(self, request_id: str) -> None:
        """The request was not started."""
        self.guarded.pop(request_id, None)

    def keep_guards(self, prefilling: Collection[str]) -> None:
        """Drop the guards of all requests except these, whose prefill goes on."""
        self.guarded = {one: self.guarded[one] for one in prefilling if one in self.guarded}

    def outranks(self, name: str, qos: str) -> bool:
        """Whether a class has at least the priority of requests that name `qos`."""
        return self._classes[name].priority >= self._classes[self.class_of(qos)].priority

    def shuts_out(self, name: str) -> bool:
        """Whether no request of this class may start now, because of a guarded one."""
        return self._classes[name].priority < max(self.guarded.values(), default=self._lowest)

    def should_yield(self, qos: str) -> bool:
        """Whether an unfinished prefill of this class should be preempted.

        True if a class of higher priority has requests and has had less than its reserve. The prefix
        cache keeps what was computed until the request comes back, so little is lost.
        """
        waiting = self._waiting()
        if not waiting:
            return False
        first = self._shares.choose(waiting)
        mine = self._classes[self.class_of(qos)]
        return self._shares.balance_s(first) > 0 and self._classes[first].priority > mine.priority

    def expects_higher(self, prefilling: Iterable[str]) -> bool:
        """Whether an owed class outranks everything that waits and everything that is prefilled.

        Its next request may have to wait for the step that is put together now.

        Args:
            prefilling: the classes of the prefills under way.
        """
        if len(self._classes) == 1:
            return False
        here = {*self._waiting(), *map(self.class_of, prefilling)}
        highest = max((self._classes[name].priority for name in here), default=self._lowest)
        return any(
            one.priority > highest and self._shares.balance_s(one.name) > 0
            for one in self._classes.values()
        )

    def _waiting(self) -> list[str]:
        return [name for name, class_queue in self._class_queues.items() if len(class_queue)]
