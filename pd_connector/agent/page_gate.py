# SPDX-License-Identifier: Apache-2.0
"""Keeps the agent's thread from reading pages that the engine is about to give to someone else."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class PageGate:
    """The engine's thread shuts it for a request before it reuses the request's pages; the agent's
    thread passes it to read them. Whoever shuts it waits for a read that is under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shut: dict[str, int] = {}

    def shut(self, request: str) -> None:
        """From the return of this call on, nobody reads the request's pages."""
        with self._lock:
            self._shut[request] = self._shut.get(request, 0) + 1

    def open(self, request: str) -> None:
        """Undo one `shut`: what is offered from now on is the request's own again."""
        with self._lock:
            self._shut[request] -= 1
            if not self._shut[request]:
                del self._shut[request]

    @contextmanager
    def passing(self, request: str) -> Iterator[bool]:
        """Within, the request's pages stay as they are, if the value is true."""
        with self._lock:
            yield request not in self._shut
