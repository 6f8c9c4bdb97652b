# SPDX-License-Identifier: Apache-2.0
"""The outcomes that the engine waits for. None is lost, and none is reported twice."""

import queue
import threading

from pd_connector.agent.commands import Command, Drop, Hold, Withdraw
from pd_connector.errors import Cause
from pd_connector.pool.jobs import Fill, Save, Saved
from pd_connector.protocol.consuming.incoming import Finished, Held, Load
from pd_connector.protocol.producing.outgoing import Free, Offer

Outcome = Free | Finished | Held | Saved


class PendingOutcomes:
    """Outcomes on their way from the agent's thread to the engine's. Can be used by any thread."""

    def __init__(self) -> None:
        self._reported: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._any = threading.Event()  # an outcome has been reported
        self._lock = threading.Lock()
        self._abandoned = False
        # The request of an abandoned agent whose outcome is still waited for.
        self._owed: str | None = None
        self._requests: dict[type[Outcome], set[str]] = {
            kind: set() for kind in (Finished, Free, Held, Saved)
        }

    def expect(self, command: Command) -> None:
        """Note the outcome that a command will have."""
        with self._lock:
            match command:
                case Offer() if command.final:
                    self._requests[Free].add(command.request)
                case Load():
                    self._requests[Finished].add(command.request)
                    self._requests[Held].discard(command.request)
                case Fill():
                    self._requests[Finished].add(command.request)
                case Save():
                    self._requests[Saved].add(command.request)
                case Hold() if command.watch:
                    self._requests[Held].add(command.request)
                case Drop():
                    self._requests[Held].discard(command.request)
                case Withdraw():
                    self._requests[Free].discard(command.request)

    def report(self, outcome: Outcome) -> None:
        """Report an outcome, from the agent's thread. Only a request's first outcome counts. An abandoned agent's
        outcome counts only for the request `but` of `abandon`: for other requests the engine may have submitted a new
        command meanwhile."""
        with self._lock:
            if not self._abandoned or outcome.request == self._owed:
                self._put(outcome)

    def abandon(self, cause: Cause, detail: str, *, but: str | None = None) -> None:
        """Report all pending outcomes as failed, except that of the request `but`. Until `fail_all`, only this
        request's reports count."""
        with self._lock:
            self._abandoned, self._owed = True, but
            self._fail(cause, detail, but)

    def fail_all(self, cause: Cause, detail: str) -> None:
        """Report all pending outcomes as failed. Reports count from now on."""
        with self._lock:
            self._abandoned = False
            self._fail(cause, detail)

    def _fail(self, cause: Cause, detail: str, but: str | None = None) -> None:
        pending = {kind: requests - {but} for kind, requests in self._requests.items()}
        for request in pending[Finished]:
            self._put(Finished(request, cause, detail))
        for request in pending[Free]:
            self._put(Free(request, cause))
        for request in pending[Held]:
            self._put(Held(request, cause, detail))
        for request in pending[Saved]:
            self._put(Saved(request))

    def _put(self, outcome: Outcome) -> None:
        self._reported.put(outcome)
        self._any.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until an outcome is reported, at most `timeout_s` seconds. Returns whether there is one."""
        return self._any.wait(timeout_s)

    @property
    def loads(self) -> bool:
        """Whether a load from another engine or from the pool has yet to end."""
        with self._lock:
            return bool(self._requests[Finished])

    def drain(self) -> list[Outcome]:
        """The pending outcomes that were reported since the last call, one for each request."""
        self._any.clear()
        taken: list[Outcome] = []
        while not self._reported.empty():
            outcome = self._reported.get()
            with self._lock:
                pending = self._requests[type(outcome)]
                if outcome.request in pending:
                    pending.discard(outcome.request)
                    taken.append(outcome)
        return taken
