# SPDX-License-Identifier: Apache-2.0
"""Which class is served next, and which steps are kept short for which class."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Sized

from scheduler_plugins.qos.classes import QosClass, default_class
from scheduler_plugins.qos.shares import DeficitShares


class Turns:
    """Takes the classes in turn by `DeficitShares`, of those that have requests.

    A class that is *owed* has had less than its reserve. What waits of it goes first; besides:

    - a prefill of lower priority should give way to it (`should_yield`),
    - its only request is *guarded* while it is prefilled: new ones of lower priority would make its
      steps longer. That costs them a step's fixed time, which the class pays for as part of its
      work. A class with a queue waits for its turns, which come sooner where batches are full,
    - before it comes, steps can be kept short for it (`expects_higher`).
    """

    def __init__(self) -> None:
        """Without classes: see `update`."""
        self._shares = DeficitShares(())
        self.guarded: dict[str, int] = {}
        """Ids of the requests that are guarded, with their priorities; to be read, not changed."""
        self._classes: dict[str, QosClass] = {}
        self._lanes: Mapping[str, Sized] = {}

    def update(self, classes: Sequence[QosClass], lanes: Mapping[str, Sized]) -> None:
        """Use other classes from now on; what those that stay are owed is kept.

        Args:
            lanes: what waits in each; looked at whenever it matters.
        """
        self._classes = {one.name: one for one in classes}
        self._default = default_class(classes).name
        self._lowest = min(one.priority for one in classes)
        self._shares.update(classes)
        self._lanes = lanes

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
        if len(self._lanes) == 1:
            return self._default
        return self._shares.choose(self._waiting())

    def start(self, request_id: str, name: str, cost_s: float) -> Mapping[str, float]:
        """A request of this class starts, and waits no more: guard it, if it should be, and let its
        class pay. Returns what was booked, for `refund`."""
        if len(self._lanes) == 1:
            return {}  # all work is everybody's
        priority = self._classes[name].priority
        owed = priority > self._lowest and self._shares.balance_s(name) > 0
        if owed and not len(self._lanes[name]):
            self.guarded[request_id] = priority
        return self._shares.charge(name, cost_s, self._waiting())

    def refund(self, booked: Mapping[str, float]) -> None:
        """Take back what `start` booked: the work was not done."""
        self._shares.refund(booked)

    def unguard(self, request_id: str) -> None:
        """It was not started."""
        self.guarded.pop(request_id, None)

    def keep_guards(self, prefilling: Collection[str]) -> None:
        """Guard only what is prefilled still."""
        self.guarded = {one: self.guarded[one] for one in prefilling if one in self.guarded}

    def outranks(self, name: str, qos: str) -> bool:
        """Whether a class has at least the priority of requests that name `qos`."""
        return self._classes[name].priority >= self._classes[self.class_of(qos)].priority

    def shuts_out(self, name: str) -> bool:
        """Whether none of this class may start now, because of what is guarded."""
        return self._classes[name].priority < max(self.guarded.values(), default=self._lowest)

    def should_yield(self, qos: str) -> bool:
        """Whether a prefill of this class that is not done should be preempted for one that is owed.

        True if a class of higher priority has requests and has had less than its reserve. What was
        prefilled is found in the cache when the request comes back, so that little is lost.
        """
        waiting = self._waiting()
        if not waiting:
            return False
        first = self._shares.choose(waiting)
        mine = self._classes[self.class_of(qos)]
        return self._shares.balance_s(first) > 0 and self._classes[first].priority > mine.priority

    def expects_higher(self, prefilling: Iterable[str]) -> bool:
        """Whether a class is owed, and has priority over all that waits and over these classes: the
        next step may be what its next request waits for."""
        if len(self._classes) == 1:
            return False
        here = {*self._waiting(), *map(self.class_of, prefilling)}
        highest = max((self._classes[name].priority for name in here), default=self._lowest)
        return any(
            one.priority > highest and self._shares.balance_s(one.name) > 0
            for one in self._classes.values()
        )

    def _waiting(self) -> list[str]:
        return [name for name, lane in self._lanes.items() if len(lane)]
