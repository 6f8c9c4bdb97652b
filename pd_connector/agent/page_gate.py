# SPDX-License-Identifier: Apache-2.0
"""Keeps the agent's thread away from pages that the engine is about to give to another request."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class PageGate:
    """One gate per request. The engine's thread shuts it before it reuses the request's pages; the
    agent's thread passes it to read or write them. Shutting waits for a copy that is under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shut: dict[str, int] = {}

    def shut(self, request: str) -> None:
        """Once this call has returned, nobody reads or writes the request's pages."""
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
        """Whether the request's pages may be touched within the `with` block."""
        with self._lock:
            yield request not in self._shut
