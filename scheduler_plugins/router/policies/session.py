# SPDX-License-Identifier: Apache-2.0
"""`session`: a user stays with an engine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from random import Random

from scheduler_plugins.router.policies.base import EngineView, Request, View
from scheduler_plugins.router.policies.least_work import LeastWork
from scheduler_plugins.router.policies.sides import Choice, Rule

REMEMBERED = 100_000
"""Sessions that are remembered; the one unused for longest is forgotten."""


class Session(Rule):
    """Requests of one session go to one engine, where their prefixes are; a new session to least
    work.

    A request without a session goes to least work as well. A session moves when its engine is gone.
    """

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        # By digest: clients choose how long names are.
        self._homes: OrderedDict[bytes, str] = OrderedDict()
        self._new = LeastWork()

    def choose(
        self,
        request: Request,
        engines: Sequence[EngineView],
        view: View,
        now_s: float,
        random: Random,
    ) -> Choice:
        if not request.session:
            return self._new.choose(request, engines, view, now_s, random)
        name = blake2b(request.session.encode(errors="surrogatepass"), digest_size=16).digest()
        home = self._homes.get(name)
        found = next((engine for engine in engines if engine.name == home), None)
        choice = Choice(found) if found else self._new.choose(request, engines, view, now_s, random)
        self._homes[name] = choice.engine.name
        self._homes.move_to_end(name)
        if len(self._homes) > self._remembered:
            self._homes.popitem(last=False)
        return choice
