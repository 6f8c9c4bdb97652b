# SPDX-License-Identifier: Apache-2.0
"""Loads chunks from the pool: threads read and verify them, and the agent's thread writes them into pages or compares them."""

import contextlib
import logging
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from pd_connector.agent.page_gate import AbandonedError, PageGate, RevokedError
from pd_connector.agent.pending_outcomes import Outcome
from pd_connector.agent.thread_priority import prefer_this_thread
from pd_connector.errors import Cause, Miss, PDConnectorError, PoolError
from pd_connector.kv.coding import coarsest
from pd_connector.kv.model import ModelFacts
from pd_connector.pages.paged_cache import PagedCache
from pd_connector.plan.route import Route
from pd_connector.pool.copy_plan import LoadPiece, plan_load
from pd_connector.pool.jobs import Fill, PromptChunk
from pd_connector.pool.keys import CHUNK_TOKENS, model_root
from pd_connector.pool.loader import Loader, ReadBuffer, ReadChunk
from pd_connector.pool.stored import gathered_bytes, payloads
from pd_connector.pool.trust import WriterTrust
from pd_connector.protocol.consuming.audit import Comparison
from pd_connector.protocol.consuming.incoming import Finished
from pd_connector.telemetry import Telemetry

logger = logging.getLogger("pd_connector.agent.pool_loads")

_BUFFER_WAIT_S = 10.0
"""Longest wait of a thread for a buffer that holds no chunk, in seconds."""
_STALL_S = 5.0
"""Longest time without a chunk of a load, in seconds. Later chunks are dropped."""
_LAST_READS_S = 1.0
"""Longest wait for the reads under way when the engine ends, in seconds: its store is closed next."""


_BUFFERS = 4
"""Most chunks that are being read, or are not placed yet."""
_READERS = 2
_BRINGERS = 8
"""Threads that wait for chunks of a far store, so that chunks of this host do not wait behind them. Another thread has the
chunks of each load brought as soon as the load begins."""


class Arranged(NamedTuple):
    """A chunk in memory, ready to be written into pages."""

    read: ReadChunk
    pieces: list[LoadPiece]
    payloads: list[memoryview]


def arrange(read: ReadChunk, fill: Fill, chunk: PromptChunk, buffer: ReadBuffer) -> Arranged:
    """Bring a chunk into the order of the rank's pages. A reading thread does it, so the agent's thread only copies."""
    needs = [(part.geometry, part.need) for part in read.parts]
    span = fill.first_token, fill.stop_token
    pieces = plan_load(needs, read.own, fill.pages, chunk.number, *span)
    parts = [(part.geometry, part.need, part.data) for part in read.parts]
    room = buffer.room(-1, gathered_bytes(pieces))
    return Arranged(read, pieces, payloads(pieces, parts, room))


class Readers:
    """The threads that read, and their memory."""

    def __init__(self) -> None:
        # A request waits for these threads: they have the agent's priority.
        self.threads = ThreadPoolExecutor(_READERS, "pd-pool-load", initializer=prefer_this_thread)
        self.bringers = ThreadPoolExecutor(_BRINGERS, "pd-pool-bring")
        self.askers = ThreadPoolExecutor(1, "pd-pool-ask")
        self.buffers: queue.SimpleQueue[ReadBuffer] = queue.SimpleQueue()
        for _ in range(_BUFFERS):
            self.buffers.put(ReadBuffer())
        self._under_way = set[Future[None]]()

    def submit(self, threads: ThreadPoolExecutor, work: Callable[[], None]) -> None:
        """Run a function in a thread of `threads`, `bringers` or `askers`. Raises RuntimeError after `close`."""
        future = threads.submit(work)
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)

    def close(self, wait_s: float = 0.0) -> None:
        """End the threads and drop their reads. Waits for reads that are under way, at most `wait_s` seconds."""
        for threads in (self.askers, self.bringers, self.threads):
            threads.shutdown(wait=False, cancel_futures=True)
        wait(list(self._under_way), wait_s)


@dataclass(slots=True, eq=False)
class _Filling:
    """A load under way.

    Attributes:
        facts: the model that the load is for.
        waits: numbers of the chunks that are not placed yet and not given up.
        afar: numbers of those that a far store has and that are not on this host yet.
        stop: number of the first unusable chunk. Chunks from it on are not placed.
        cause: why that chunk is unusable.
        miss: the pool's miss cause, if the chunk itself is unusable.
    """

    fill: Fill
    fence: Any
    facts: ModelFacts
    waits: set[int]
    stop: int
    began_s: float
    moved_s: float
    nbytes: int = 0
    cause: Cause | None = None
    miss: Miss | None = None
    detail: str = ""
    comparison: Comparison | None = None
    routes: set[Route] = field(default_factory=set)
    writers: set[bytes] = field(default_factory=set)
    afar: set[int] = field(default_factory=set)

    def wants(self, number: int) -> bool:
        """Whether this chunk is still to be placed."""
        return number < self.stop and number in self.waits

    def fail(self, number: int, cause: Cause, detail: str, miss: Miss | None = None) -> None:
        """This chunk is unusable, and so are all chunks after it."""
        if number < self.stop:
            self.stop = number
            self.cause, self.detail, self.miss = cause, detail, miss

    @property
    def ended(self) -> bool:
        """Whether no chunk is left to be placed."""
        return not any(number < self.stop for number in self.waits)

    @property
    def stop_token(self) -> int:
        """The load's tokens before this one are in pages."""
        fill = self.fill
        return max(fill.first_token, min(self.stop * CHUNK_TOKENS, fill.stop_token))


class ChunkLoads:
    """The loads from the pool. Used by the agent's thread only.

    Args:
        gate: the engine's thread shuts it for requests whose pages must not be touched.
        loader: reads and verifies chunks.
        trust: the writers whose chunks this engine uses.
        experts: see `Comparison`.
        report: takes the end of every load.
        done: runs a function in the agent's thread.
    """

    def __init__(
        self,
        cache: PagedCache,
        gate: PageGate,
        loader: Loader,
        trust: WriterTrust,
        telemetry: Telemetry,
        report: Callable[[Outcome], None],
        done: Callable[[Callable[[], None]], None],
        *,
        experts: bool,
    ) -> None:
        self._cache = cache
        self._gate = gate
        self._loader = loader
        self._trust = trust
        self._telemetry = telemetry
        self._report = report
        self._done = done
        self._experts = experts
        self._fillings: list[_Filling] = []
        self._readers = Readers()

    @property
    def due_s(self) -> float:
        """When `tick` must be called at the latest, in seconds, monotonic."""
        return min(map(self._stalls_s, self._fillings), default=float("inf"))

    def _stalls_s(self, filling: _Filling) -> float:
        """When a load is given up. Chunks of a far store come one after another, so a load whose next chunk is there is not
        stalled while others come."""
        moved_s = filling.moved_s
        if min(filling.waits, default=-1) in filling.afar:
            moved_s = max(moved_s, self._loader.far_moved_s)
        return moved_s + _STALL_S

    def tick(self) -> None:
        """Give up stalled loads and their threads. Start the other loads again: another tier may have their chunks."""
        now = time.monotonic()
        stalled = [load for load in self._fillings if now >= self._stalls_s(load)]
        for filling in stalled:
            detail = f"the store has not answered for {_STALL_S:g} s"
            filling.fail(min(filling.waits), Cause.STALLED, detail)
            self._end(filling)
        if stalled:
            self._readers.close()
            self._readers = Readers()
            for filling in self._fillings:
                filling.moved_s = now
                self._begin_reads(filling)

    def close(self) -> None:
        """End the threads. Their reads are dropped."""
        self._readers.close(_LAST_READS_S)

    def begin(self, fill: Fill, fence: Any, facts: ModelFacts) -> None:
        """Begin a load, or a comparison.

        Args:
            fence: pages are touched after the device's work before it.
            facts: the model that the engine serves.
        """
        now = time.monotonic()
        numbers = [chunk.number for chunk in fill.chunks]
        filling = _Filling(fill, fence, facts, set(numbers), numbers[-1] + 1, now, now)
        self._fillings.append(filling)
        if fill.compares:
            filling.comparison = Comparison(fill.chunks[0].adapter, experts=self._experts)
        else:
            with contextlib.suppress(RevokedError), self._gate.touching(fill.request):
                self._cache.clear(fill.pages, fill.first_token, fill.stop_token, fence)
        if fill.model != model_root(facts):
            filling.fail(numbers[0], Cause.MODEL, "the weights have changed")
        self._begin_reads(filling)

    def _begin_reads(self, filling: _Filling) -> None:
        """Read the chunks that the load still waits for."""
        chunks = [chunk for chunk in filling.fill.chunks if chunk.number in filling.waits]
        afar = [chunk for chunk in chunks if self._loader.comes_from_afar(chunk)]
        numbers = {chunk.number for chunk in afar}
        filling.afar = set(numbers)
        if afar:
            ask = partial(self._prefetch, self._readers, filling, afar)
            self._readers.submit(self._readers.askers, ask)
        for chunk in chunks:
            if chunk.number not in numbers:
                work = partial(self._read, self._readers.buffers, filling, chunk)
                self._readers.submit(self._readers.threads, work)

    def _prefetch(self, readers: Readers, filling: _Filling, chunks: Sequence[PromptChunk]) -> None:
        """Have chunks of a far store brought in one row, and then wait for each."""
        try:
            self._loader.prefetch(chunks)
        except Exception:
            logger.exception("pool: chunks were not requested in one row; each is requested alone")
        with contextlib.suppress(RuntimeError):  # ended meanwhile: the load begins again
            for chunk in chunks:
                readers.submit(readers.bringers, partial(self._bring, readers, filling, chunk))

    def _bring(self, readers: Readers, filling: _Filling, chunk: PromptChunk) -> None:
        """Wait for a chunk of a far store, then have it read. A thread that only waits calls it."""
        result: PDConnectorError | None = None
        if filling.wants(chunk.number):
            try:
                self._loader.bring(chunk)
                filling.moved_s = time.monotonic()
                filling.afar.discard(chunk.number)
                # Ended meanwhile: the load begins again.
                with contextlib.suppress(RuntimeError):
                    work = partial(self._read, readers.buffers, filling, chunk)
                    readers.submit(readers.threads, work)
                return
            except PDConnectorError as error:
                result = error
            except Exception as error:
                logger.exception("pool: a chunk was not brought")
                result = PDConnectorError(repr(error))
        self._done(partial(self._place, filling, chunk, result, None))

    def _read(
        self, buffers: queue.SimpleQueue[ReadBuffer], filling: _Filling, chunk: PromptChunk
    ) -> None:
        """Read one chunk. A reading thread calls it."""
        result: Arranged | PDConnectorError | None = None
        buffer: ReadBuffer | None = None
        if filling.wants(chunk.number):
            try:
                buffer = buffers.get(timeout=_BUFFER_WAIT_S)
                read = self._loader.read(chunk, filling.facts, buffer)
                result = arrange(read, filling.fill, chunk, buffer)
            except PDConnectorError as error:
                result = error
            except Exception as error:
                logger.exception("pool: a chunk was not read")
                result = PDConnectorError(repr(error))
        give_back = partial(buffers.put, buffer) if buffer else None
        self._done(partial(self._place, filling, chunk, result, give_back))

    def _place(
        self,
        filling: _Filling,
        chunk: PromptChunk,
        result: Arranged | PDConnectorError | None,
        give_back: Callable[[], None] | None,
    ) -> None:
        if isinstance(result, PDConnectorError):
            miss = result.cause if isinstance(result, PoolError) else None
            filling.fail(chunk.number, Cause.POOL, str(result), miss)
        elif result is not None and filling.wants(chunk.number):
            self._use(filling, chunk, result)
        if give_back is not None:
            give_back()
        filling.waits.discard(chunk.number)
        filling.moved_s = time.monotonic()
        if filling.ended and filling in self._fillings:
            self._end(filling)

    def _use(self, filling: _Filling, chunk: PromptChunk, arranged: Arranged) -> None:
        """Write a chunk into pages, or compare it with them."""
        fill, comparison = filling.fill, filling.comparison
        try:
            for part in () if fill.compares else arranged.read.parts:
                if problem := self._trust.problem(part.engine_id, part.writer):
                    filling.fail(chunk.number, *problem)
                    return
            routes = [piece.route for piece in arranged.pieces]
            if not self._cache.prepare(routes, gathers=False):
                detail = "kernels for this writer's layout are being compiled"
                filling.fail(chunk.number, Cause.POOL, detail)
                return
            with self._gate.touching(fill.request) as confirm:
                for piece, payload in zip(arranged.pieces, arranged.payloads, strict=True):
                    where = piece.route, piece.chunk, piece.pages, payload, filling.fence
                    if comparison is None:
                        self._cache.scatter(*where)
                    else:
                        passed = arranged.read.parts[piece.part].codec
                        comparison.note(piece.route, self._cache.compare(*where), passed)
                        filling.routes.add(piece.route)
                confirm()
            if comparison is None:
                codecs = (part.codec for part in arranged.read.parts)
                self._cache.passed = coarsest((self._cache.passed, *codecs))
            filling.nbytes += arranged.read.nbytes
            filling.writers.update(part.writer for part in arranged.read.parts)
        except AbandonedError:
            raise
        except PoolError as error:
            filling.fail(chunk.number, Cause.POOL, str(error), error.cause)
        except RevokedError as error:  # the engine has emptied its cache
            filling.fail(chunk.number, Cause.POOL, str(error))
        except Exception as error:
            logger.exception("pool: a chunk could not be placed")
            filling.fail(chunk.number, Cause.INTERNAL, repr(error))

    def _judge(self, filling: _Filling, comparison: Comparison) -> None:
        """Note the end of a comparison: from now on chunks of these writers are used, or never."""
        if filling.cause is None and (problem := comparison.judge((), filling.routes)):
            filling.cause, filling.detail = problem
        self._telemetry.count("audits", cause=filling.cause or "passed")
        if filling.cause is None:
            for writer in filling.writers:
                self._trust.passed(writer)
            logger.info("pool: audit of a writer passed: %s", comparison)
        elif filling.cause is Cause.AUDIT:
            for writer in filling.writers:
                self._trust.distrust(writer, filling.detail)
            logger.error(
                "pool: KV of another engine is wrong, or this engine's is: %s (%s). Chunks of that kind of engine are not "
                "used here (docs/pool.md#audit)",
                filling.detail,
                comparison,
            )

    def _end(self, filling: _Filling) -> None:
        self._fillings = [other for other in self._fillings if other is not filling]
        fill, seconds = filling.fill, time.monotonic() - filling.began_s
        if filling.comparison is not None:
            self._judge(filling, filling.comparison)
        else:
            self._telemetry.count("pool_loaded_bytes", filling.nbytes)
            if filling.cause is not None:
                self._miss(filling, filling.cause)
        self._report(
            Finished(
                fill.request,
                filling.cause,
                filling.detail,
                filling.nbytes,
                len(fill.chunks),
                seconds,
                stop_token=filling.stop_token,
                miss=filling.miss,
            )
        )

    def _miss(self, filling: _Filling, cause: Cause) -> None:
        """Log and count a load that failed or broke off."""
        logger.log(
            logging.INFO if cause is Cause.UNAUDITED else logging.WARNING,
            "request %s: KV from the pool is used up to token %d, the rest of the prompt is computed: %s",
            filling.fill.request,
            filling.stop_token,
            filling.detail,
        )
        self._telemetry.count("pool_misses", cause=filling.miss or cause)
