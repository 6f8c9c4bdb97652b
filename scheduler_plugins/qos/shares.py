# SPDX-License-Identifier: Apache-2.0
"""Whose turn it is among the classes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from scheduler_plugins.qos.classes import QosClass

BURST_S = 1.0
"""Reserve that a class without requests keeps for later, in seconds of the engine's work."""


class DeficitShares:
    """Deficit round robin over classes, in seconds of predicted cost, without rounds.

    Whenever work is given out, every class earns its reserved fraction of it and the class that got
    it pays for it: the balance is the deficit of deficit round robin, with a quantum for every piece
    of work instead of every round. So nobody waits for its turn to come round:

    - A class with a positive balance has had less than its reserve: it goes first. Of several, the
      one with the highest priority does.
    - If no class that has requests has one, the reserve of those without requests is being lent: the
      highest priority gets the next piece of work and does not pay for it. What was lent is taken
      back at once: the next request of its owner finds a positive balance.
    - A class without requests keeps at most `BURST_S`: an idle hour gives no right to a busy one.

    While a class has requests it gets its fraction of any stretch of work, short of one piece of
    its own work and of what other classes had kept.
    """

    def __init__(self, classes: Sequence[QosClass]) -> None:
        self._balances: dict[str, float] = {}
        self.update(classes)

    def update(self, classes: Sequence[QosClass]) -> None:
        """Use other classes from now on; balances of those that stay are kept."""
        kept = self._balances
        self._classes = sorted(classes, key=lambda one: -one.priority)
        self._balances = {one.name: kept.get(one.name, 0.0) for one in classes}

    def balance_s(self, name: str) -> float:
        """Seconds of work that the class has earned and not used."""
        return self._balances[name]

    def choose(self, waiting: Collection[str]) -> str:
        """The class to serve next, of those in `waiting`, which is not empty."""
        first = ""
        for one in self._classes:
            if one.name in waiting:
                if self._balances[one.name] > 0:
                    return one.name
                first = first or one.name
        return first

    def charge(self, name: str, cost_s: float, waiting: Collection[str]) -> Mapping[str, float]:
        """Account for work given to `name`, which pays for it unless it is a loan.

        Args:
            waiting: the classes that have requests, apart from this one.

        Returns:
            What was booked on each class, for `refund`.
        """
        balances, booked = self._balances, {}
        paid_s = cost_s if balances[name] > 0 else 0.0
        for one in self._classes:
            before = balances[one.name]
            earned = before + one.reserved_fraction * cost_s
            after = earned if one.name in waiting else min(earned, BURST_S)
            balances[one.name] = after
            booked[one.name] = after - before
        balances[name] -= paid_s
        booked[name] -= paid_s
        return booked

    def refund(self, booked: Mapping[str, float]) -> None:
        """Take back exactly what `charge` booked: the work was not done.

        A class whose balance was full earned nothing, and must lose nothing here: a request that is
        tried and put back in every step would drain it.
        """
        for name, earned_s in booked.items():
            self._balances[name] -= earned_s
