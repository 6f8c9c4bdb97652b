# SPDX-License-Identifier: Apache-2.0
"""The worker of UCX that peers dial now, and earlier ones that still serve a peer."""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from pd_connector.transport.ucx.worker import UcxWorker

logger = logging.getLogger("pd_connector.transport.ucx")


class UcxWorkers:
    """Used by one thread.

    Args:
        api: ucxx's core.
        array: what wraps its buffers.
        options: of UCX.

    Raises:
        Exception: UCX cannot make a worker (ucxx's exceptions have no common base).
    """

    def __init__(self, api: Any, array: Any, options: Mapping[str, str]) -> None:
        context = api.UCXContext(dict(options), feature_flags=(api.Feature.TAG,))
        self._make = partial(UcxWorker, api, array, context)
        self._current = self._make()
        self._spent: list[UcxWorker] = []  # they serve the peers that have reached them

    def __iter__(self) -> Iterator[UcxWorker]:
        return iter((self._current, *self._spent))

    @property
    def current(self) -> UcxWorker:
        """The worker that dials, and that peers are told of."""
        return self._current

    def renew_if_spent(self) -> None:
        """Make a new worker where UCX does not listen any more, or the current one is worn."""
        if self._current.is_deaf:
            logger.warning(
                "ucx: its listening socket is closed (no descriptors?), and is opened again"
            )
            self._renew()
        else:
            self.renew_if_worn()

    def renew_if_worn(self) -> None:
        """Make a new worker where the current one holds what goes only with its worker."""
        if self._current.is_worn:
            self._renew()

    def progress(self) -> None:
        """Let UCX go on."""
        for worker in self:
            worker.worker.progress()
        if self._current.is_deaf:
            with contextlib.suppress(Exception):  # told when it is dialled
                self._current.forget_closed()

    def leave(self, user: int) -> None:
        """A link or a source has gone: workers without another peer end."""
        for worker in self:
            worker.users.discard(user)
        for worker in [worker for worker in self._spent if not worker.users]:
            self._spent.remove(worker)
            worker.end()

    def close(self) -> None:
        """End the current worker; earlier ones are no longer used."""
        self._current.end()
        del self._current

    def _renew(self) -> None:
        """If there can be no other worker now, the next call tries again."""
        old = self._current
        with contextlib.suppress(Exception):
            old.forget_closed()
            self._current = self._make()
            if old.users:
                self._spent.append(old)
            else:
                old.end()
