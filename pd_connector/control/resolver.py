# SPDX-License-Identifier: Apache-2.0
"""Host names to numeric addresses, without making a caller wait.

A name server may take half a minute to answer. libzmq looks names up in its only I/O thread, and
every session would stop meanwhile. So it gets numeric addresses only. Names are looked up here, in
threads of their own.
"""

import threading
import time
from collections.abc import Callable

from pd_connector.control.addresses import numeric
from pd_connector.errors import PDConnectorError
from pd_connector.hosts import numeric_address

_MOST_LOOKUPS = 4
"""At a time; each takes a thread until the name server has answered."""
_HUNG_S = 30.0
"""A lookup that takes longer does not count: the name is looked up again, and others go on."""
_MOST_THREADS = 32
_ASKED_S = 30.0
"""A name that waits for its lookup is forgotten if it is not asked for within this time."""
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
        self._threads = 0
        self._running: dict[str, float] = {}  # lookups that count, and when they began
        self._queued: dict[str, float] = {}  # names, and when they were last asked for
        # Address, or what went wrong, and until when that is believed.
        self._cached: dict[str, tuple[str, str, float]] = {}

    def address(self, host: str) -> str | None:
        """The numeric address of a host; None while it is being looked up.

        Raises UnknownHostError if there is none, or the name server does not know it.
        """
        if (spelled := canonical(host)) is not None:
            return spelled
        with self._lock:
            now = time.monotonic()
            address, problem, until = self._cached.get(host, ("", "", 0.0))
            if until > now:
                if problem:
                    raise UnknownHostError(problem)
                return address
            if self._running.get(host, float("-inf")) + _HUNG_S <= now:
                self._queued[host] = now
            self._start(now)
        return None

    def close(self) -> None:
        """Stop calling `wake`. A lookup under way ends by itself."""
        with self._lock:
            self._closed = True

    def _start(self, now: float) -> None:
        running = {host: began for host, began in self._running.items() if began + _HUNG_S > now}
        self._running = running
        while self._queued and len(running) < _MOST_LOOKUPS and self._threads < _MOST_THREADS:
            host = next(iter(self._queued))
            if self._queued.pop(host) + _ASKED_S <= now:
                continue
            thread = threading.Thread(
                target=self._run, args=(host, now), name="pd-resolve", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # the system gives this process no more threads
                self._learn(host, "", f"host {host!r} cannot be looked up: {error}")
            else:
                self._threads += 1
                running[host] = now

    def _learn(self, host: str, address: str, problem: str) -> None:
        if len(self._cached) >= _MOST_KEPT:
            del self._cached[next(iter(self._cached))]
        keep_s = _KEEP_FAILURE_S if problem else _KEEP_S
        self._cached[host] = address, problem, time.monotonic() + keep_s

    def _run(self, host: str, began: float) -> None:
        address, problem = "", ""
        try:
            address = canonical(self._lookup(host)) or ""
        except (OSError, ValueError) as error:  # ValueError: no text that could be a name
            problem = f"host {host!r} cannot be resolved: {error}"
        with self._lock:
            self._threads -= 1
            if self._running.get(host) == began:
                del self._running[host]
            self._learn(host, address, problem)
            self._start(time.monotonic())
            if not self._closed:
                self._wake()
