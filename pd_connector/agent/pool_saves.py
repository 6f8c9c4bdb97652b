# SPDX-License-Identifier: Apache-2.0
"""Copies computed chunks out of pages, and has threads write them into the store.

They ask the store first. What it does not want is not copied: another engine has often saved the chunk already,
as a prefill engine has what it hands over.
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

from pd_connector.agent.page_gate import AbandonedError, PageGate
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
"""Chunks that the store is asked for, or that are copied and not written yet, beside one for each thread that writes."""
_MOST_WRITERS = 4
_PROCESSORS = 8
"""Processors of a rank for each thread that writes."""
_WAITS_S = 1.0
"""Longest wait of a save for a buffer, and then for the store, in seconds. Its pages are kept meanwhile, and a store may never
answer."""
_LAST_WRITES_S = 2.0
"""How long an engine that ends waits until these are written, in seconds. A store that is well takes milliseconds."""


@dataclass(slots=True, eq=False)
class _Asked:
    """A save for which the store is asked.

    Attributes:
        buffer: for its copy.
        late_s: when it is given up, in seconds, monotonic.
        over: it was given up.
    """

    save: Save
    fence: Any
    plan: SavePlan
    buffer: bytearray
    late_s: float
    over: bool = False


def writers(ranks: int) -> int:
    """How many threads of a rank write. One writes about 2 GB/s, and a GPU may compute KV faster; a machine with few
    processors needs them for other things.

    Args:
        ranks: of the engine.
    """
    return max(1, min(_MOST_WRITERS, len(os.sched_getaffinity(0)) // (_PROCESSORS * ranks)))


class ChunkSaves:
    """Used by the agent's thread only.

    Args:
        gate: shut by the engine's thread for requests whose pages must not be touched.
        saver: writes parts.
        codec: in which chunks are kept.
        threads: number of those that write.
        report: told that pages are no longer read.
        done: has the agent's thread carry something out.
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
        # Each with its fence, and when it came.
        self._waiting: deque[tuple[Save, Any, float]] = deque()
        self._asked: deque[_Asked] = deque()
        self._wanted: deque[tuple[_Asked, WantedPart]] = deque()
        ends = (place.offset + place.nbytes for place in places(self._form, cache.geometry))
        nbytes = max(ends, default=0)
        self._free = [bytearray(nbytes) for _ in range(threads + _MORE_BUFFERS)]
        self._writers = ThreadPoolExecutor(threads, "pd-pool-save")
        self._writes: list[Future[None]] = []  # under way

    @property
    def waits_for_device(self) -> bool:
        """Whether saves wait until the engine's device has computed their pages."""
        return bool(self._waiting and self._free)

    @property
    def due_s(self) -> float:
        """When a save has waited too long, in seconds, monotonic."""
        late_s = [one.late_s for one in self._asked if not one.over]
        if self._waiting and not self._free:
            late_s.append(self._waiting[0][2] + _WAITS_S)
        return min(late_s, default=float("inf"))

    @property
    def device_done(self) -> bool:
        """Whether the first of these can begin."""
        return self.waits_for_device and self._cache.happened(self._waiting[0][1])

    def add(self, save: Save, fence: Any) -> None:
        """A chunk is computed once the work before `fence` is done."""
        self._waiting.append((save, fence, time.monotonic()))

    def close(self) -> None:
        """End the threads. What is copied is written, as far as the store takes it in time."""
        wait(self._writes, _LAST_WRITES_S)
        self._writers.shutdown(wait=False, cancel_futures=True)

    def begin(self, facts: ModelFacts) -> None:
        """Copy what the store wants, and ask it for what is computed, as far as there are buffers. What has waited too
        long is not saved.

        Args:
            facts: the model that the engine serves.
        """
        while self._wanted:
            self._copy(*self._wanted.popleft(), facts)
        while self.device_done:
            save, fence, _ = self._waiting.popleft()
            if plan := self._plan(save, facts):
                late_s = time.monotonic() + _WAITS_S
                asked = _Asked(save, fence, plan, self._free.pop(), late_s)
                self._asked.append(asked)
                self._writers.submit(self._ask, asked, facts)
            else:
                self._report(Saved(save.request))
        while (now := time.monotonic()) >= self.due_s:
            for asked in self._asked:
                if not asked.over and now >= asked.late_s:
                    asked.over = True
                    self._drop(asked.save, "busy")
            if self._waiting and not self._free and now >= self._waiting[0][2] + _WAITS_S:
                self._drop(self._waiting.popleft()[0], "busy")

    def _drop(self, save: Save, cause: str) -> None:
        """A save does not come about. The count comes first: an outcome that is seen has been counted."""
        self._telemetry.count("pool_saves", cause=cause)
        self._report(Saved(save.request))

    def _plan(self, save: Save, facts: ModelFacts) -> SavePlan | None:
        """What is copied; None if nothing can be."""
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

    def _ask(self, asked: _Asked, facts: ModelFacts) -> None:
        """In a thread that writes."""
        save, found = asked.save, None
        try:
            if not asked.over:
                found = self._saver.ask(save.chunk, save.tenant, facts, asked.plan.form)
        except PDConnectorError as error:
            logger.warning("pool: a chunk was not saved: %s", error)
        except Exception:
            logger.exception("pool: a chunk was not saved")
        self._done(partial(self._answered, asked, found or "failed"))

    def _answered(self, asked: _Asked, found: WantedPart | str) -> None:
        self._asked.remove(asked)
        if isinstance(found, WantedPart):
            self._wanted.append((asked, found))
            return
        self._free.append(asked.buffer)
        if not asked.over:
            self._drop(asked.save, found)

    def _copy(self, asked: _Asked, wanted: WantedPart, facts: ModelFacts) -> None:
        """Copy the pages of a save, and have it written. The engine may reuse them afterwards."""
        save, payload, copied = asked.save, memoryview(asked.buffer), False
        try:
            if not asked.over and save.model == model_root(facts):
                with self._gate.touching(save.request) as confirm:
                    for piece in asked.plan.pieces:
                        gather_piece(self._cache, piece, payload, asked.fence)
                    confirm()
                copied = True
        except AbandonedError:
            raise
        except Exception:
            logger.exception("pool: a chunk could not be copied")
        finally:
            if not asked.over:
                self._report(Saved(save.request))
        work = partial(self._write, wanted, asked.buffer, copied=copied)
        self._writes = [one for one in self._writes if not one.done()]
        self._writes.append(self._writers.submit(work))

    def _tables(self, save: Save) -> list[list[int]]:
        """The save's pages, each at its place in the request."""
        sizes = {group.table: group.page_size for group in self._cache.geometry.groups}
        first = save.chunk.first_token
        return [
            [-1] * (first // sizes.get(table, CHUNK_TOKENS)) + list(pages)
            for table, pages in enumerate(save.pages)
        ]

    def _write(self, wanted: WantedPart, buffer: bytearray, *, copied: bool) -> None:
        """In a thread that writes."""
        cause = "failed"
        try:
            if copied:
                cause = wanted.write(memoryview(buffer))
            else:
                wanted.cancel()
        except PDConnectorError as error:
            logger.warning("pool: a chunk was not saved: %s", error)
        except Exception:
            logger.exception("pool: a chunk was not saved")
        self._done(partial(self._written, buffer, cause if copied else ""))

    def _written(self, buffer: bytearray, cause: str) -> None:
        self._free.append(buffer)
        if cause:
            self._telemetry.count("pool_saves", cause=cause)
