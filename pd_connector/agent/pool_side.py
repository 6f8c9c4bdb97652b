# SPDX-License-Identifier: Apache-2.0
"""The pool's part of a rank's agent: copies computed chunks out of pages, and chunks of the pool into pages.

Only the agent's thread touches pages. Threads of the pool read and write files. Between them chunks lie in buffers
of this rank.
"""

import logging
import queue
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from pd_connector.agent.owed import Outcome
from pd_connector.agent.page_gate import AbandonedError, PageGate
from pd_connector.agent.resources import RankResources
from pd_connector.errors import Cause, PDConnectorError
from pd_connector.kv.model import ModelFacts
from pd_connector.pages.stored import StoredPages
from pd_connector.pool.jobs import Fill, PromptChunk, Save, Saved
from pd_connector.pool.keys import model_root
from pd_connector.pool.loader import Loader, ReadChunk
from pd_connector.pool.saver import Saver
from pd_connector.pool.store.base import Store
from pd_connector.protocol.consuming.incoming import Finished

logger = logging.getLogger("pd_connector.agent.pool")

_BUFFERS = 4
"""Chunks on their way in each direction."""
_READERS = 2
_BUFFER_WAIT_S = 10.0


@dataclass(slots=True)
class _Filling:
    """A load under way."""

    fill: Fill
    fence: Any
    left: int  # chunks
    began_s: float
    nbytes: int = 0
    cause: Cause | None = None
    detail: str = ""


class PoolSide:
    """Used by the agent's thread only.

    Args:
        store: where chunks are.
        gate: shut by the engine's thread for requests whose pages may not be touched.
        report: told of every outcome.
    """

    def __init__(
        self,
        resources: RankResources,
        store: Store,
        gate: PageGate,
        report: Callable[[Outcome], None],
    ) -> None:
        self._cache = resources.cache
        self._telemetry = resources.telemetry
        self._wake = resources.wake
        self._gate = gate
        self._report = report
        self._pages = StoredPages(resources.cache)
        self._facts = resources.identity.facts
        self._saver = Saver(store, self._pages.form, resources.identity.engine_id)
        self._loader = Loader(store, resources.cache.geometry)
        self._saves: deque[tuple[Save, Any]] = deque()
        self._free = [bytearray(self._pages.part_bytes) for _ in range(_BUFFERS)]
        self._landing: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
        for _ in range(_BUFFERS):
            self._landing.put(bytearray())
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._writers = ThreadPoolExecutor(1, "pd-pool-save")
        self._readers = ThreadPoolExecutor(_READERS, "pd-pool-load")

    @property
    def model(self) -> bytes:
        """The loaded model as the pool knows it; empty while that is not known."""
        return model_root(self._facts) or b""

    @property
    def waits_for_device(self) -> bool:
        """Whether saves wait until the engine's device has computed their pages."""
        return bool(self._saves and self._free)

    @property
    def device_done(self) -> bool:
        """Whether the first of these can begin."""
        return self.waits_for_device and self._cache.happened(self._saves[0][1])

    def change_model(self, facts: ModelFacts) -> None:
        """The engine serves other weights from now on."""
        self._facts = facts

    def know_weights(self, full: bytes) -> None:
        """All bytes of the engine's weights have been read now."""
        self._facts = msgspec.structs.replace(self._facts, weights_full=full)

    def execute(self, command: Save | Fill, fence: Any) -> None:
        """Begin a save or a load."""
        if isinstance(command, Save):
            self._saves.append((command, fence))
            self._begin_saves()
        else:
            self._begin_fill(command, fence)

    def tick(self) -> None:
        """Go on with what threads have done, or the device."""
        while not self._done.empty():
            self._done.get()()
        self._begin_saves()

    def close(self) -> None:
        """End the threads; what they write or read is dropped."""
        for pool in (self._writers, self._readers):
            pool.shutdown(wait=False, cancel_futures=True)

    # Saves

    def _begin_saves(self) -> None:
        while self.device_done:
            save, fence = self._saves.popleft()
            buffer = self._free.pop()
            if not self._copied(save, buffer, fence):
                self._free.append(buffer)
                continue
            self._writers.submit(self._write, save.chunk, save.tenant, self._facts, buffer)

    def _copied(self, save: Save, buffer: bytearray, fence: Any) -> bool:
        """Copy the pages of a save, which the engine may reuse afterwards. Returns whether that went well."""
        try:
            if save.model != self.model:
                return False
            with self._gate.touching(save.request) as confirm:
                self._pages.save(save.chunk.number, save.pages, memoryview(buffer), fence)
                confirm()
            return True
        except AbandonedError:
            raise
        except Exception:
            logger.exception("pool: a chunk could not be copied")
            return False
        finally:
            self._report(Saved(save.request))

    def _write(self, chunk: PromptChunk, tenant: str, facts: ModelFacts, buffer: bytearray) -> None:
        """In the thread that writes."""
        cause = "failed"
        try:
            cause = self._saver.save(chunk, tenant, facts, memoryview(buffer))
        except PDConnectorError as error:
            logger.warning("pool: a chunk was not saved: %s", error)
        except Exception:
            logger.exception("pool: a chunk was not saved")
        self._done.put(partial(self._written, buffer, cause))
        self._wake()

    def _written(self, buffer: bytearray, cause: str) -> None:
        self._free.append(buffer)
        self._telemetry.count("pool_saves", cause=cause)

    # Loads

    def _begin_fill(self, fill: Fill, fence: Any) -> None:
        filling = _Filling(fill, fence, len(fill.chunks), time.monotonic())
        if fill.model != self.model:
            filling.cause, filling.detail = Cause.MODEL, "the weights have changed"
        for chunk in fill.chunks:
            self._readers.submit(self._read, filling, chunk, self._facts)

    def _read(self, filling: _Filling, chunk: PromptChunk, facts: ModelFacts) -> None:
        """In a thread that reads."""
        found: ReadChunk | PDConnectorError | None = None
        buffer: bytearray | None = None
        if filling.cause is None:
            try:
                buffer = self._landing.get(timeout=_BUFFER_WAIT_S)
                found = self._loader.read(chunk, facts, buffer)
            except PDConnectorError as error:
                found = error
            except Exception as error:
                logger.exception("pool: a chunk was not read")
                found = PDConnectorError(repr(error))
        self._done.put(partial(self._place, filling, chunk, found, buffer))
        self._wake()

    def _place(
        self,
        filling: _Filling,
        chunk: PromptChunk,
        found: ReadChunk | PDConnectorError | None,
        buffer: bytearray | None,
    ) -> None:
        if isinstance(found, PDConnectorError):
            filling.cause = filling.cause or Cause.POOL
            filling.detail = filling.detail or str(found)
        elif found is not None and filling.cause is None:
            self._scatter(filling, chunk, found)
        if buffer is not None:
            self._landing.put(buffer)
        filling.left -= 1
        if not filling.left:
            self._end(filling)

    def _scatter(self, filling: _Filling, chunk: PromptChunk, found: ReadChunk) -> None:
        fill = filling.fill
        first = max(fill.first_token, chunk.first_token)
        stop = min(fill.stop_token, chunk.stop_token)
        try:
            with self._gate.touching(fill.request) as confirm:
                for part in found.parts:
                    self._pages.fill(part, first, stop, fill.pages, filling.fence)
                confirm()
            filling.nbytes += found.nbytes
        except AbandonedError:
            raise
        except Exception as error:
            logger.exception("pool: a chunk could not be placed")
            filling.cause, filling.detail = Cause.INTERNAL, repr(error)

    def _end(self, filling: _Filling) -> None:
        fill, seconds = filling.fill, time.monotonic() - filling.began_s
        if filling.cause is None:
            self._telemetry.count("pool_loaded_bytes", filling.nbytes)
        else:
            logger.warning(
                "request %s: KV from the pool is not used, its prompt is computed: %s",
                fill.request,
                filling.detail,
            )
            self._telemetry.count("pool_misses", cause="refused")
        self._report(
            Finished(
                fill.request,
                filling.cause,
                filling.detail,
                filling.nbytes,
                len(fill.chunks),
                seconds,
            )
        )
