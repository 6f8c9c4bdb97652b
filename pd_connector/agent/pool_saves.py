# SPDX-License-Identifier: Apache-2.0
"""Saves chunks into the pool: the agent's thread copies them out of pages, and threads write them into the store.

The threads ask the store first. A chunk that the store has already is not copied. That is common: a prefill engine
saves the KV that it hands over, so its decode engine need not.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from pd_connector.agent.page_gate import AbandonedError, PageGate, RevokedError
from pd_connector.agent.pending_outcomes import Outcome
from pd_connector.errors import PDConnectorError
from pd_connector.kv.model import ModelFacts
from pd_connector.pages.paged_cache import PagedCache
from pd_connector.pool.chunk_layout import places
from pd_connector.pool.codecs import AtRest
from pd_connector.pool.copy_plan import SavePlan, plan_save
from pd_connector.pool.jobs import Save, Saved
from pd_connector.pool.keys import CHUNK_TOKENS, model_root
from pd_connector.pool.saver import Saver, WantedPart
from pd_connector.pool.stored import describe, gather_piece
from pd_connector.telemetry import Telemetry

logger = logging.getLogger("pd_connector.agent.pool_saves")

_MORE_BUFFERS = 3
"""Buffers for chunks that wait for the store or are not written yet, besides one for each writing thread."""
_MOST_WRITERS = 4
_PROCESSORS = 8
"""Divisor: a rank has one writing thread for 8 processors."""
_WAITS_S = 1.0
"""Longest wait of a save for a buffer, and then for the store, in seconds. Its pages are kept meanwhile, and a store may
never answer."""
_LAST_WRITES_S = 2.0
"""Longest wait for the last writes when the engine ends, in seconds. A healthy store needs milliseconds."""


@dataclass(slots=True, eq=False)
class _Query:
    """A save that waits until the store says whether it takes the chunk.

    Attributes:
        buffer: for the copy of the chunk.
        late_s: when the save is given up, in seconds, monotonic.
        over: whether the save was given up.
    """

    save: Save
    fence: Any
    plan: SavePlan
    buffer: bytearray
    late_s: float
    over: bool = False


def writers(ranks: int) -> int:
    """The number of writing threads of a rank. A thread writes about 2 GB/s, and a GPU can compute KV faster. A machine with
    few processors needs them for other work.

    Args:
        ranks: number of the engine's ranks.
    """
    return max(1, min(_MOST_WRITERS, len(os.sched_getaffinity(0)) // (_PROCESSORS * ranks)))


class ChunkSaves:
    """The saves into the pool. Used by the agent's thread only.

    Args:
        gate: the engine's thread shuts it for requests whose pages must not be touched.
        saver: writes parts.
        codec: the codec of chunks in the pool.
        threads: number of writing threads.
        report: called with `Saved` when a request's pages are not read any more.
        done: runs a function in the agent's thread.
    """

    def __init__(
        self,
        cache: PagedCache,
        gate: PageGate,
        saver: Saver,
        codec: AtRest,
        threads: int,
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
        self._form = describe(cache, codec)
        # Each save with its fence, and the time when it came.
        self._waiting: deque[tuple[Save, Any, float]] = deque()
        self._queries: deque[_Query] = deque()
        self._to_copy: deque[tuple[_Query, WantedPart]] = deque()
        ends = (place.offset + place.nbytes for place in places(self._form, cache.geometry))
        nbytes = max(ends, default=0)
        self._free = [bytearray(nbytes) for _ in range(threads + _MORE_BUFFERS)]
        self._writers = ThreadPoolExecutor(threads, "pd-pool-save")
        self._under_way: list[Future[None]] = []  # queries and writes

    @property
    def waits_for_device(self) -> bool:
        """Whether saves wait until the engine's device has computed their pages."""
        return bool(self._waiting and self._free)

    @property
    def due_s(self) -> float:
        """When the next save has waited too long, in seconds, monotonic."""
        late_s = [query.late_s for query in self._queries if not query.over]
        if self._waiting and not self._free:
            late_s.append(self._waiting[0][2] + _WAITS_S)
        return min(late_s, default=float("inf"))

    @property
    def device_done(self) -> bool:
        """Whether the device has computed the pages of the first waiting save."""
        return self.waits_for_device and self._cache.happened(self._waiting[0][1])

    def add(self, save: Save, fence: Any) -> None:
        """Save a chunk. Its pages are computed when the device has done its work before `fence`."""
        self._waiting.append((save, fence, time.monotonic()))

    def close(self) -> None:
        """End the threads. Copied chunks are written if the store takes them in time."""
        for query in self._queries:
            query.over = True  # the store is not asked any more
        wait(self._under_way, _LAST_WRITES_S)
        self._writers.shutdown(wait=False, cancel_futures=True)

    def begin(self, facts: ModelFacts) -> None:
        """Copy the chunks that the store takes, and ask it about computed chunks while there are buffers. Saves that have
        waited too long are dropped.

        Args:
            facts: the model that the engine serves.
        """
        while self._to_copy:
            self._copy(*self._to_copy.popleft(), facts)
        while self.device_done:
            save, fence, _ = self._waiting.popleft()
            if plan := self._plan(save, facts):
                late_s = time.monotonic() + _WAITS_S
                query = _Query(save, fence, plan, self._free.pop(), late_s)
                self._queries.append(query)
                self._submit(partial(self._ask, query, facts))
            else:
                self._report(Saved(save.request))
        while (now := time.monotonic()) >= self.due_s:
            for query in self._queries:
                if not query.over and now >= query.late_s:
                    query.over = True
                    self._drop(query.save, "busy")
            if self._waiting and not self._free and now >= self._waiting[0][2] + _WAITS_S:
                self._drop(self._waiting.popleft()[0], "busy")

    def _drop(self, save: Save, cause: str) -> None:
        """Drop a save. It is counted first and reported then, so every reported save is in the counts."""
        self._telemetry.count("pool_saves", cause=cause)
        self._report(Saved(save.request))

    def _plan(self, save: Save, facts: ModelFacts) -> SavePlan | None:
        """The plan of the copy; None if the chunk cannot be copied."""
        if save.model != model_root(facts):
            return None
        try:
            geometry = self._cache.geometry
            plan = plan_save(self._form, geometry, self._tables(save), save.chunk.number)
            if plan is None or not self._cache.prepare(
                [piece.route for piece in plan.pieces], gathers=True
            ):
                return None  # the agent does not wait for a compiler
        except Exception:
            logger.exception("pool: a chunk cannot be copied")
            return None
        return plan

    def _ask(self, query: _Query, facts: ModelFacts) -> None:
        """Ask the store about a chunk. A writing thread calls it."""
        save, answer = query.save, None
        try:
            if not query.over:
                answer = self._saver.ask(save.chunk, save.tenant, facts, query.plan.form)
        except PDConnectorError as error:
            logger.warning("pool: a chunk was not saved: %s", error)
        except Exception:
            logger.exception("pool: a chunk was not saved")
        self._done(partial(self._answered, query, answer or "failed"))

    def _answered(self, query: _Query, answer: WantedPart | str) -> None:
        self._queries.remove(query)
        if isinstance(answer, WantedPart):
            self._to_copy.append((query, answer))
            return
        self._free.append(query.buffer)
        if not query.over:
            self._drop(query.save, answer)

    def _copy(self, query: _Query, part: WantedPart, facts: ModelFacts) -> None:
        """Copy the pages of a save, and have a thread write the copy. The engine can reuse the pages afterwards."""
        save, payload, copied = query.save, memoryview(query.buffer), False
        try:
            if not query.over and save.model == model_root(facts):
                with self._gate.touching(save.request) as confirm:
                    for piece in query.plan.pieces:
                        gather_piece(self._cache, piece, payload, query.fence)
                    confirm()
                copied = True
        except AbandonedError:
            raise
        except RevokedError:
            copied = False  # the engine has emptied its cache
        except Exception:
            logger.exception("pool: a chunk could not be copied")
        finally:
            if not query.over:
                self._report(Saved(save.request))
        self._submit(partial(self._write, part, query.buffer, copied=copied))

    def _submit(self, work: Callable[[], None]) -> None:
        """Have a writing thread do this."""
        self._under_way = [future for future in self._under_way if not future.done()]
        self._under_way.append(self._writers.submit(work))

    def _tables(self, save: Save) -> list[list[int]]:
        """Page tables of the save: each page id at its index in the request, -1 before the first."""
        sizes = {group.table: group.page_size for group in self._cache.geometry.groups}
        first = save.chunk.first_token
        return [
            [-1] * (first // sizes.get(table, CHUNK_TOKENS)) + list(pages)
            for table, pages in enumerate(save.pages)
        ]

    def _write(self, part: WantedPart, buffer: bytearray, *, copied: bool) -> None:
        """Write a copied chunk, or cancel it if it was not copied. A writing thread calls it."""
        cause = "failed"
        try:
            if copied:
                cause = part.write(memoryview(buffer))
            else:
                part.cancel()
        except PDConnectorError as error:
            logger.warning("pool: a chunk was not saved: %s", error)
        except Exception:
            logger.exception("pool: a chunk was not saved")
        self._done(partial(self._written, buffer, cause if copied else ""))

    def _written(self, buffer: bytearray, cause: str) -> None:
        self._free.append(buffer)
        if cause:
            self._telemetry.count("pool_saves", cause=cause)
