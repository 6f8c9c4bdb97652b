# SPDX-License-Identifier: Apache-2.0
"""Keeps the agent's thread away from pages that the engine has taken back."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pd_connector.errors import PDConnectorError


class RevokedError(PDConnectorError):
    """The engine has taken the request's pages back."""


class AbandonedError(PDConnectorError):
    """The engine has given the agent up, because it did not answer. The agent must not touch any page."""


class PageGate:
    """One gate per request. The agent's thread touches a request's pages only while `touching` it.

    The engine's thread calls `shut` before it reuses the pages. `shut` waits for a copy that is under way, up to a timeout. A
    copy that takes longer is not used (`confirm`).
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._shut: dict[str, int] = {}
        self._overrun: set[str] = set()
        self._touched: str | None = None  # the request whose pages the agent's thread touches now
        self._abandoned = False

    def shut(self, request: str, timeout_s: float = float("inf")) -> bool:
        """Shut the gate. After the return no copy of the request's pages begins, and no copy that is under way is used.

        Returns:
            Whether copies that were under way have ended within `timeout_s` seconds.
        """
        timeout = min(timeout_s, threading.TIMEOUT_MAX)
        with self._changed:
            self._shut[request] = self._shut.get(request, 0) + 1
            if self._changed.wait_for(lambda: self._touched != request, timeout):
                return True
            self._overrun.add(request)
            return False

    def open(self, request: str) -> None:
        """Undo one `shut`, unless `reset` has undone it. Pages offered from now on belong to the request again."""
        with self._changed:
            left = self._shut.pop(request, 0) - 1
            if left > 0:
                self._shut[request] = left
            else:
                self._overrun.discard(request)

    def abandon(self) -> str | None:
        """Shut the gates of all requests until `reset`.

        Returns:
            The request whose pages the agent's thread touches at this moment, or None. Only its pages can still change.
        """
        with self._changed:
            self._abandoned = True
            return self._touched

    def reset(self) -> None:
        """Open all gates, for an agent that has started again."""
        with self._changed:
            self._abandoned = False
            self._shut.clear()
            self._overrun.clear()

    @contextmanager
    def touching(self, request: str) -> Iterator[Callable[[], None]]:
        """A context in which the agent's thread can copy from or to the request's pages.

        Yields:
            `confirm`, to be called before the copy is used. It raises as below if the engine has taken the pages back
            meanwhile.

        Raises:
            RevokedError: the gate is shut.
            AbandonedError: all gates are shut.
        """
        with self._changed:
            self._check(request, self._shut)
            self._touched = request
        try:
            yield lambda: self._check(request, self._overrun)
        finally:
            with self._changed:
                self._touched = None
                self._changed.notify_all()

    def _check(self, request: str, shut: dict[str, int] | set[str]) -> None:
        if self._abandoned:
            raise AbandonedError("the agent did not answer its engine, which gave it up")
        if request in shut:
            raise RevokedError(f"the pages of request {request} were taken back")
