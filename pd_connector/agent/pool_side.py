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
from pd_connector.errors import Cause, PDConnectorError, PoolError
from pd_connector.kv.model import ModelFacts
from pd_connector.pool.form import Form, places
from pd_connector.pool.jobs import Fill, PromptChunk, Save, Saved
from pd_connector.pool.keys import CHUNK_TOKENS, model_root
from pd_connector.pool.loader import Landing, Loader, ReadChunk
from pd_connector.pool.plans import plan_load, plan_save
from pd_connector.pool.record import Writer
from pd_connector.pool.saver import Saver
from pd_connector.pool.store.base import Store
from pd_connector.pool.stored import ChunkLoader, describe, gather_piece
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
        writer: this engine, as records name it.
        parts: number of its ranks.
        gate: shut by the engine's thread for requests whose pages may not be touched.
        report: told of every outcome.
    """

    def __init__(
        self,
        resources: RankResources,
        store: Store,
        writer: Writer,
        parts: int,
        gate: PageGate,
        report: Callable[[Outcome], None],
    ) -> None:
        self._cache = resources.cache
        self._telemetry = resources.telemetry
        self._wake = resources.wake
        self._gate = gate
        self._report = report
        self._geometry = resources.cache.geometry
        self._form = describe(resources.cache)
        self._facts = resources.identity.facts
        self._saver = Saver(store, self._geometry, writer, parts)
        self._loader = Loader(store, self._geometry)
        self._placing = ChunkLoader(resources.cache)
        self._saves: deque[tuple[Save, Any]] = deque()
        last = places(self._form, self._geometry)[-1]
        self._free = [bytearray(last.offset + last.nbytes) for _ in range(_BUFFERS)]
        self._landings: queue.SimpleQueue[Landing] = queue.SimpleQueue()
        for _ in range(_BUFFERS):
            self._landings.put(Landing())
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
            form = self._copied(save, memoryview(buffer), fence)
            if form is None:
                self._free.append(buffer)
                continue
            self._writers.submit(self._write, save, form, self._facts, buffer)

    def _copied(self, save: Save, payload: memoryview, fence: Any) -> Form | None:
        """Copy the pages of a save. The engine may reuse them afterwards. Returns what the payload looks like; None if
        there is none."""
        try:
            if save.model != self.model:
                return None
            plan = plan_save(self._form, self._geometry, self._tables(save), save.chunk.number)
            if plan is None:
                return None
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
        sizes = {group.table: group.page_size for group in self._geometry.groups}
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
        landing: Landing | None = None
        if filling.cause is None:
            try:
                landing = self._landings.get(timeout=_BUFFER_WAIT_S)
                found = self._loader.read(chunk, facts, landing)
            except PDConnectorError as error:
                found = error
            except Exception as error:
                logger.exception("pool: a chunk was not read")
                found = PDConnectorError(repr(error))
        self._done.put(partial(self._place, filling, chunk, found, landing))
        self._wake()

    def _place(
        self,
        filling: _Filling,
        chunk: PromptChunk,
        found: ReadChunk | PDConnectorError | None,
        landing: Landing | None,
    ) -> None:
        if isinstance(found, PDConnectorError):
            filling.cause = filling.cause or Cause.POOL
            filling.detail = filling.detail or str(found)
        elif found is not None and filling.cause is None:
            self._scatter(filling, chunk, found)
        if landing is not None:
            self._landings.put(landing)
        filling.left -= 1
        if not filling.left:
            self._end(filling)

    def _scatter(self, filling: _Filling, chunk: PromptChunk, found: ReadChunk) -> None:
        fill = filling.fill
        span = fill.first_token, fill.stop_token
        needs = [(part.geometry, part.need) for part in found.parts]
        try:
            pieces = plan_load(needs, found.own, fill.pages, chunk.number, *span)
            with self._gate.touching(fill.request) as confirm:
                self._placing.scatter(pieces, found.parts, filling.fence)
                confirm()
            filling.nbytes += found.nbytes
        except AbandonedError:
            raise
        except PoolError as error:
            filling.cause, filling.detail = Cause.POOL, str(error)
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
