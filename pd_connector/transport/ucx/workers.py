# SPDX-License-Identifier: Apache-2.0
"""The worker of UCX that peers dial now, and those before it that still serve somebody."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pd_connector.transport.ucx.worker import UcxWorker

logger = logging.getLogger("pd_connector.transport.ucx")

_MOST_FAILED_DIALS = 8
"""UCX keeps a socket of each for as long as the worker lives."""


class UcxWorkers:
    """Used by one thread.

    Args:
        api: ucxx's core.
        options: of UCX.
        ended: told of every worker that has ended: what it had under way is over.

    Raises:
        Exception: UCX cannot make a worker (ucxx's exceptions have no common base).
    """

    def __init__(
        self, api: Any, options: Mapping[str, str], ended: Callable[[UcxWorker], None]
    ) -> None:
        self._api = api
        self._options = options
        self._ended = ended
        self._current = UcxWorker(api, options)
        self._spent: list[UcxWorker] = []  # they serve those who have reached them

    def __iter__(self) -> Iterator[UcxWorker]:
        return iter((self._current, *self._spent))

    @property
    def current(self) -> UcxWorker:
        """The one that dials, and that peers are told of."""
        return self._current

    def renew_if_deaf(self) -> None:
        """Make a new worker where UCX does not listen any more. If there can be none now, the next
        call tries again."""
        if self._current.is_deaf:
            logger.warning("ucx: its listening socket is closed (no descriptors?): begun again")
            with contextlib.suppress(Exception):
                self._renew()

    def renew_if_worn(self) -> None:
        """Make a new worker where too many dials have failed.

        Raises:
            Exception: there can be none now.
        """
        if self._current.failed_dials >= _MOST_FAILED_DIALS:
            self._renew()

    def progress(self) -> None:
        """Let UCX go on."""
        for worker in self:
            worker.worker.progress()
        if self._current.is_deaf:
            with contextlib.suppress(Exception):  # told when it is dialled
                self._current.forget_closed()

    def leave(self, user: int) -> None:
        """A link or a source is no more: workers that served nobody else end."""
        for worker in self:
            worker.users.discard(user)
        for worker in [worker for worker in self._spent if not worker.users]:
            self._spent.remove(worker)
            self._end(worker)

    def close(self) -> None:
        """End the current worker; nobody uses those before it any more."""
        self._end(self._current)
        del self._current

    def _renew(self) -> None:
        old = self._current
        old.forget_closed()
        self._current = UcxWorker(self._api, self._options)
        if old.users:
            self._spent.append(old)
        else:
            self._end(old)

    def _end(self, worker: UcxWorker) -> None:
        """Nobody needs this worker any more."""
        worker.drain()
        self._ended(worker)
