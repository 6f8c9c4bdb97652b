# SPDX-License-Identifier: Apache-2.0
"""Host names to numeric addresses, without making anybody wait.

A name server may take half a minute to answer. libzmq looks names up in its only I/O thread, which
would stop every session; so it is given numeric addresses only, and names are looked up here, in
threads of their own.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

from pd_connector.control.addresses import numeric
from pd_connector.errors import PDConnectorError
from pd_connector.hosts import numeric_address

_MOST_LOOKUPS = 4
"""At a time; each takes a thread until the name server has answered."""
_KEEP_S = 60.0
_KEEP_FAILURE_S = 5.0
_MOST_KEPT = 1024


class UnknownHostError(PDConnectorError):
    """A host name has no address."""


def canonical(host: str) -> str | None:
    """The one spelling of a numeric address; None for a name."""
    address = numeric_address(host)
    return None if address is None else str(address)


class Resolver:
    """Used by one thread.

    Args:
        wake: called from another thread when a lookup has ended.
        lookup: the address of a name, or OSError; waits as long as it takes.
    """

    def __init__(self, wake: Callable[[], None], lookup: Callable[[str], str] = numeric) -> None:
        self._wake = wake
        self._lookup = lookup
        self._lock = threading.Lock()
        self._closed = False
        self._running: set[str] = set()
        self._queued: deque[str] = deque()
        # Address, or what went wrong, and until when that is believed.
        self._known: dict[str, tuple[str, str, float]] = {}

    def address(self, host: str) -> str | None:
        """The numeric address of a host; None while it is being looked up.

        Raises UnknownHostError if there is none, or the name server does not know it.
        """
        if (spelled := canonical(host)) is not None:
            return spelled
        with self._lock:
            address, problem, until = self._known.get(host, ("", "", 0.0))
            if until > time.monotonic():
                if problem:
                    raise UnknownHostError(problem)
                return address
            if host not in self._running and host not in self._queued:
                self._queued.append(host)
            self._start()
        return None

    def close(self) -> None:
        """Nobody is woken any more. A lookup under way ends by itself."""
        with self._lock:
            self._closed = True

    def _start(self) -> None:
        while self._queued and len(self._running) < _MOST_LOOKUPS:
            host = self._queued.popleft()
            self._running.add(host)
            threading.Thread(target=self._run, args=(host,), name="pd-resolve", daemon=True).start()

    def _run(self, host: str) -> None:
        address, problem, keep_s = "", "", _KEEP_S
        try:
            address = canonical(self._lookup(host)) or ""
        except (OSError, ValueError) as error:  # ValueError: no text that could be a name
            problem, keep_s = f"host {host!r} cannot be resolved: {error}", _KEEP_FAILURE_S
        with self._lock:
            self._running.discard(host)
            if len(self._known) >= _MOST_KEPT:
                del self._known[next(iter(self._known))]
            self._known[host] = address, problem, time.monotonic() + keep_s
            self._start()
            if not self._closed:
                self._wake()
