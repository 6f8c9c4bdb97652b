# SPDX-License-Identifier: Apache-2.0
"""The engine of a rank: it offers, loads, compares what has arrived, and takes pages back in the middle of a copy."""

import queue
import threading
from typing import NamedTuple

from chaos.known import PAGE_SIZE, KnownPages
from chaos.tampering import Tampering
from pd_connector.agent.agent import Agent
from pd_connector.agent.commands import Drop, Revoke, Withdraw
from pd_connector.errors import Cause
from pd_connector.protocol.consuming.incoming import Finished, Load
from pd_connector.protocol.producing.outgoing import Free, Offer
from pd_connector.protocol.wire.peers import Peer

_MIDST_S = 0.03
"""Time that the agent's thread stops in the middle of a copy, while the engine wants its pages back. Without a guard,
the engine would reuse the pages in this time."""
_DROPPED = "dropped"


class _Offered(NamedTuple):
    content_of: list[int]
    pages: list[int]
    final: bool


class _Loading(NamedTuple):
    theirs: list[int]
    ours: list[int]


class Engine:
    """Calls come from one thread, and another thread takes pages back. While the agent's thread stops in the middle of
    a copy (`Tampering.interrupt`), the engine asks for its pages, and reuses them when it may.
    """

    def __init__(self, agent: Agent, pages: KnownPages, tampering: Tampering) -> None:
        self._agent = agent
        self._pages = pages
        self._tampering = tampering
        self._one_at_a_time = threading.Lock()  # an agent's methods are for one thread
        self._offered: dict[str, _Offered] = {}
        self._loading: dict[str, _Loading] = {}
        self._dropped: set[str] = set()
        self._wanted: queue.SimpleQueue[tuple[str, threading.Event]] = queue.SimpleQueue()
        tampering.interrupt = self._interrupt
        threading.Thread(target=self._serve, daemon=True).start()

    def offer(self, name: str, content_of: list[int], *, final: bool) -> None:
        """Offer pages; if some were offered before, offer all."""
        with self._one_at_a_time:
            known = self._offered.get(name)
            pages = known.pages if known else content_of
            if known is None or pages:
                self._offer(name, _Offered(content_of, pages, final))

    def _offer(self, name: str, offered: _Offered) -> None:
        self._offered[name] = offered
        prompt = len(offered.pages) * PAGE_SIZE
        tokens = prompt if offered.final else len(offered.pages) // 2 * PAGE_SIZE
        pages = self._tables(offered.pages, states=offered.final)
        offer = Offer(name, name, pages, name.encode(), prompt, tokens, offered.final)
        self._agent.submit(offer._replace(state_token=prompt if self._pages.states else 0))

    def _tables(self, pages: list[int], *, states: bool = True) -> tuple[list[int], ...]:
        """The page tables of a request: pages of KV, and that of its states."""
        if not self._pages.states:
            return (pages,)
        return pages, pages[:1] if states else []

    def load(
        self, name: str, peers: tuple[Peer, ...], theirs: list[int], ours: list[int], *, wait: bool
    ) -> None:
        with self._one_at_a_time:
            self._pages.wipe(ours)
            self._loading[name] = _Loading(theirs, ours)
            stop = len(ours) * PAGE_SIZE
            tables = self._tables(ours)
            load = Load(name, name, peers, name.encode(), 0, stop, tables, wait)
            self._agent.submit(load._replace(state_token=stop if self._pages.states else 0))

    def outcomes(self) -> list[tuple[str, str, bool]]:
        """Ends since the last call: name, cause, and whether all pages are right."""
        with self._one_at_a_time:
            found = [self._judged(one) for one in self._agent.outcomes()]
        return [one for one in found if one is not None]

    def _judged(self, outcome: object) -> tuple[str, str, bool] | None:
        match outcome:
            case Finished(request=name):
                theirs, ours = self._loading.pop(name)
                if name in self._dropped:
                    self._dropped.discard(name)
                    return name, _DROPPED, True
                if outcome.cause and not self._pages.states_untouched(ours):
                    return name, "", self._pages.states_are(theirs, ours)
                return name, outcome.cause or "", self._pages.right(theirs, ours)
            case Free(request=name):
                self._offered.pop(name, None)
                return name, outcome.cause or "", True
            case _:
                return None

    def take_back(self, name: str) -> bool:
        """Give the pages of this transfer to another request. Returns whether the engine had them."""
        with self._one_at_a_time:
            if name in self._loading and name not in self._dropped:
                self._dropped.add(name)
                self._agent.submit(Drop(name, Cause.ABORTED))
                self._pages.reuse(self._loading[name].ours)
                return True
            known = self._offered.get(name)
            if known is None or not known.pages:
                return False
            if known.final:
                self._agent.submit(Withdraw(name, name))
                self._pages.reuse(known.pages)
                del self._offered[name]
                return True
            self._agent.submit(Revoke(name, name))  # the request is preempted, and computed again
            moved = self._pages.move(known.pages, known.content_of)
            if not moved:
                self._agent.submit(Withdraw(name, name))
            self._offered[name] = known._replace(pages=moved)
            return True

    def restore(self) -> int:
        """Call this without running transfers: taken-back pages become free. Returns the number of these transfers
        whose pages were written after they were taken back."""
        with self._one_at_a_time:
            self._offered = {n: one for n, one in self._offered.items() if one.final and one.pages}
            return self._pages.restore()

    def _interrupt(self, name: str) -> bool:
        """Called by the agent's thread: take back the pages of this transfer, or of any load."""
        name = name or next(iter(self._loading.copy()), "")
        if name in self._dropped or not (name in self._loading or name in self._offered):
            return False
        reused = threading.Event()
        self._wanted.put((name, reused))
        reused.wait(_MIDST_S)
        return True

    def _serve(self) -> None:
        while True:
            name, reused = self._wanted.get()
            self.take_back(name)
            reused.set()
