# SPDX-License-Identifier: Apache-2.0
"""`session`: all requests of a session go to one engine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from random import Random

from scheduler_plugins.router.policies.base import EngineView, Request, View
from scheduler_plugins.router.policies.least_work import LeastWork
from scheduler_plugins.router.policies.sides import Choice, Rule

REMEMBERED = 100_000
"""Most sessions that are remembered. The least recently used session is forgotten first."""


class Session(Rule):
    """Sends requests of one session to one engine, where their prefixes are cached.

    A new session and a request without one go to the engine with the least work. A session moves
    when its engine is gone.
    """

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        # Keyed by digest, because clients choose the length of session names.
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
