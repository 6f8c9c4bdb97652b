# SPDX-License-Identifier: Apache-2.0
"""Whose turn it is among the classes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from scheduler_plugins.qos.classes import QosClass

BURST_S = 1.5
"""Reserve that a class without requests keeps for later, in seconds of the engine's work: 5 % of
30 s. A class that brings 80 % of its reserve at random brings so much more only once in a thousand
requests, if they cost 50 ms each."""


class DeficitShares:
    """Deficit round robin over classes, in seconds of predicted cost, without rounds.

    Whenever work is given out, every class earns its reserved fraction of it and the class that got
    it pays for it: the balance is the deficit of deficit round robin, with a quantum for every piece
    of work instead of every round. So nobody waits for its turn to come round:

    - A class with a positive balance has had less than its reserve: it goes first. Of several, the
      one with the highest priority does.
    - What a class without requests cannot keep is lent: the highest priority that has room for it
      earns it. What was lent is taken back at once: the next request of its owner finds a positive
      balance.
    - If no class that has requests has a positive balance, the highest priority gets the next piece
      of work and does not pay for it.
    - A class without requests keeps at most `BURST_S`: an idle hour gives no right to a busy one.
    - Work that was given out when nothing else waited deprived nobody: it is not paid for, and all
      have `BURST_S` after it. What a class did on an idle engine does not count against it later.

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
            waiting: the classes that have requests, apart from this one request.

        Returns:
            What was booked on each class, for `refund`.
        """
        before = self._balances
        if waiting:
            self._balances = self._paid(name, cost_s, waiting)
        else:
            self._balances = dict.fromkeys(before, BURST_S)
        return {one: after - before[one] for one, after in self._balances.items()}

    def _paid(self, name: str, cost_s: float, waiting: Collection[str]) -> dict[str, float]:
        """The balances after work for which others waited."""
        after, spare_s = dict(self._balances), 0.0
        if after[name] > 0:
            after[name] -= cost_s
        for one in self._classes:
            earned = after[one.name] + one.reserved_fraction * cost_s
            after[one.name] = earned if one.name in waiting else min(earned, BURST_S)
            spare_s += earned - after[one.name]
        for one in self._classes:
            lent_s = max(0.0, min(spare_s, BURST_S - after[one.name]))
            after[one.name] += lent_s
            spare_s -= lent_s
        return after

    def refund(self, booked: Mapping[str, float]) -> None:
        """Take back exactly what `charge` booked: the work was not done.

        A class whose balance was full earned nothing, and must lose nothing here: a request that is
        tried and put back in every step would drain it.
        """
        for name, earned_s in booked.items():
            self._balances[name] -= earned_s
