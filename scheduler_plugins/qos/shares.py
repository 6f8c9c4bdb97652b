# SPDX-License-Identifier: Apache-2.0
"""Deficit round robin: the choice of the class that gets the next piece of work."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from scheduler_plugins.qos.classes import QosClass

BURST_S = 1.5
"""The most work, in seconds, that a class without requests saves: 5 % of 30 s. If a class uses 80 % of its reserve in
random arrivals of 50 ms each, it needs more only once in a thousand requests."""


class DeficitShares:
    """Deficit round robin over classes, in seconds of predicted cost, without rounds.

    Each class has a balance (the deficit of deficit round robin). Whenever work is given out, every class earns its
    reserved fraction of the work. The class that got the work pays for all of it. Every piece of work is a round of its
    own, so no class waits for a turn.

    - A class with a positive balance has had less than its reserve, and goes first. Among several such classes, the
      class with the highest priority goes first.
    - A class without requests keeps at most `BURST_S`: an idle hour gives no right to a busy hour.
      Earnings beyond that are lent to the class of the highest priority that has room for them. The owner's next
      request finds a positive balance, so the loan costs the owner nothing.
    - If all classes with requests have used up their balances, the class of the highest priority gets the
      next piece of work. It does not pay for it.
    - If nothing else waited, no class pays for the work, because no class lost anything. All balances become `BURST_S`.

    So a class with requests gets its fraction of any stretch of work. What it can lack is at most one piece of its own work,
    and the savings of other classes.
    """

    def __init__(self, classes: Sequence[QosClass]) -> None:
        self._balances: dict[str, float] = {}
        self.update(classes)

    def update(self, classes: Sequence[QosClass]) -> None:
        """Use other classes from now on. Classes that stay keep their balances."""
        kept = self._balances
        self._classes = sorted(classes, key=lambda qos_class: -qos_class.priority)
        self._balances = {qos_class.name: kept.get(qos_class.name, 0.0) for qos_class in classes}

    def balance_s(self, name: str) -> float:
        """Seconds of work that the class has earned and not used."""
        return self._balances[name]

    def choose(self, waiting: Collection[str]) -> str:
        """The class to serve next.

        Args:
            waiting: the classes that have requests; at least one.
        """
        first = ""
        for qos_class in self._classes:
            if qos_class.name in waiting:
                if self._balances[qos_class.name] > 0:
                    return qos_class.name
                first = first or qos_class.name
        return first

    def charge(self, name: str, cost_s: float, waiting: Collection[str]) -> Mapping[str, float]:
        """Book work that was given to class `name`.

        Args:
            waiting: the classes that have requests other than this one.

        Returns:
            The amount booked on each class, for `refund`.
        """
        before = self._balances
        if waiting:
            self._balances = self._paid(name, cost_s, waiting)
        else:
            self._balances = dict.fromkeys(before, BURST_S)
        return {owner: after - before[owner] for owner, after in self._balances.items()}

    def _paid(self, name: str, cost_s: float, waiting: Collection[str]) -> dict[str, float]:
        """The balances after work while other requests waited."""
        after, spare_s = dict(self._balances), 0.0
        if after[name] > 0:
            after[name] -= cost_s
        for qos_class in self._classes:
            earned = after[qos_class.name] + qos_class.reserved_fraction * cost_s
            after[qos_class.name] = earned if qos_class.name in waiting else min(earned, BURST_S)
            spare_s += earned - after[qos_class.name]
        for qos_class in self._classes:
            lent_s = max(0.0, min(spare_s, BURST_S - after[qos_class.name]))
            after[qos_class.name] += lent_s
            spare_s -= lent_s
        return after

    def refund(self, booked: Mapping[str, float]) -> None:
        """Undo exactly a booking of `charge`, because the work was not done.

        The undo is exact: a class whose balance was full earned nothing, so it must lose nothing. Otherwise a request
        that is tried and put back in every step would drain its balance.
        """
        for name, earned_s in booked.items():
            self._balances[name] -= earned_s
