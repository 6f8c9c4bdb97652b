# SPDX-License-Identifier: Apache-2.0
"""Copies computed chunks out of pages, and has a thread write them into the store."""

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

from pd_connector.agent.owed import Outcome
from pd_connector.agent.page_gate import AbandonedError, PageGate
from pd_connector.errors import PDConnectorError
from pd_connector.kv.model import ModelFacts
from pd_connector.pages.paged_cache import PagedCache
from pd_connector.pool.form import Form, places
from pd_connector.pool.jobs import Save, Saved
from pd_connector.pool.keys import CHUNK_TOKENS, model_root
from pd_connector.pool.plans import plan_save
from pd_connector.pool.saver import Saver
from pd_connector.pool.stored import describe, gather_piece
from pd_connector.telemetry import Telemetry

logger = logging.getLogger("pd_connector.agent.pool_saves")

_BUFFERS = 4
"""Chunks that are copied and not written yet."""
_WAITS_S = 1.0
"""Longest wait of a save for a buffer, in seconds. Its pages are kept meanwhile, and a store may never answer."""
_LAST_WRITES_S = 2.0
"""How long an engine that ends waits until these are written, in seconds. A store that is well takes milliseconds."""


class PoolSaves:
    """Used by the agent's thread only.

    Args:
        gate: shut by the engine's thread for requests whose pages may not be touched.
        saver: writes parts; used by one thread.
        report: told that pages are no longer read.
        done: has the agent's thread carry something out.
    """

    def __init__(
        self,
        cache: PagedCache,
        gate: PageGate,
        saver: Saver,
        telemetry: Telemetry,
        report: Callable[[Outcome], None],
        done: Callable[[Callable[[], None]], None],
    ) -> None:
        self._cache = cache
        self._gate = gate
        self._saver = saver
        self._telemetry = telemetry
        self._report = report
        self._done = done
        self._form = describe(cache)
        # Each with its fence, and when it came.
        self._waiting: deque[tuple[Save, Any, float]] = deque()
        ends = (place.offset + place.nbytes for place in places(self._form, cache.geometry))
        nbytes = max(ends, default=0)
        self._free = [bytearray(nbytes) for _ in range(_BUFFERS)]
        self._writers = ThreadPoolExecutor(1, "pd-pool-save")
        self._written_last: Future[None] | None = None  # ends after all others

    @property
    def waits_for_device(self) -> bool:
        """Whether saves wait until the engine's device has computed their pages."""
        return bool(self._waiting and self._free)

    @property
    def due_s(self) -> float:
        """When a save has waited too long for a buffer, in seconds, monotonic."""
        return self._waiting[0][2] + _WAITS_S if self._waiting and not self._free else float("inf")

    @property
    def device_done(self) -> bool:
        """Whether the first of these can begin."""
        return self.waits_for_device and self._cache.happened(self._waiting[0][1])

    def add(self, save: Save, fence: Any) -> None:
        """A chunk is computed once the work before `fence` is done."""
        self._waiting.append((save, fence, time.monotonic()))

    def close(self) -> None:
        """End the thread. What is copied is written, as far as the store takes it in time."""
        if self._written_last is not None:
            wait([self._written_last], _LAST_WRITES_S)
        self._writers.shutdown(wait=False, cancel_futures=True)

    def begin(self, facts: ModelFacts) -> None:
        """Copy what is computed, as far as there are buffers. What has waited too long is not saved.

        Args:
            facts: the model that the engine serves.
        """
        while self.device_done:
            save, fence, _ = self._waiting.popleft()
            buffer = self._free.pop()
            form = self._copied(save, facts, memoryview(buffer), fence)
            if form is None:
                self._free.append(buffer)
                continue
            self._written_last = self._writers.submit(self._write, save, form, facts, buffer)
        while time.monotonic() >= self.due_s:
            save, *_ = self._waiting.popleft()
            self._report(Saved(save.request))
            self._telemetry.count("pool_saves", cause="busy")

    def _copied(
        self, save: Save, facts: ModelFacts, payload: memoryview, fence: Any
    ) -> Form | None:
        """Copy the pages of a save. The engine may reuse them afterwards. Returns what the payload looks like; None if
        there is none."""
        try:
            if save.model != model_root(facts):
                return None
            plan = plan_save(
                self._form, self._cache.geometry, self._tables(save), save.chunk.number
            )
            if plan is None:
                return None
            if not self._cache.prepare([piece.route for piece in plan.pieces], gathers=True):
                return None  # the agent does not wait for a compiler
            with self._gate.touching(save.request) as confirm:
                for piece in plan.pieces:
                    gather_piece(self._cache, piece, payload, fence)
                confirm()
            return plan.form
        except AbandonedError:
            raise
        except Exception:
            logger.exception("pool: a chunk could not be copied")
            return None
        finally:
            self._report(Saved(save.request))

    def _tables(self, save: Save) -> list[list[int]]:
        """The save's pages, each at its place in the request."""
        sizes = {group.table: group.page_size for group in self._cache.geometry.groups}
        first = save.chunk.first_token
        return [
            [-1] * (first // sizes.get(table, CHUNK_TOKENS)) + list(pages)
            for table, pages in enumerate(save.pages)
        ]

    def _write(self, save: Save, form: Form, facts: ModelFacts, buffer: bytearray) -> None:
        """In the thread that writes."""
        cause = "failed"
        try:
            cause = self._saver.save(save.chunk, save.tenant, facts, form, memoryview(buffer))
        except PDConnectorError as error:
            logger.warning("pool: a chunk was not saved: %s", error)
        except Exception:
            logger.exception("pool: a chunk was not saved")
        self._done(partial(self._written, buffer, cause))

    def _written(self, buffer: bytearray, cause: str) -> None:
        self._free.append(buffer)
        self._telemetry.count("pool_saves", cause=cause)
