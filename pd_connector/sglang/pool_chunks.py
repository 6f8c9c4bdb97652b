# SPDX-License-Identifier: Apache-2.0
"""Chunks of the pool in a rank's own memory: read and verified while their requests wait, and copied into pages later.

Whatever becomes of a chunk's files afterwards, a chunk that is held here can be copied.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from pd_connector.agent.thread_priority import prefer_this_thread
from pd_connector.errors import Miss, PoolError
from pd_connector.kv.geometry import Geometry
from pd_connector.kv.model import ModelFacts
from pd_connector.pool.copy_plan import LoadPiece, first_covered, plan_load
from pd_connector.pool.jobs import PromptChunk
from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.pool.loader import Loader, ReadBuffer, ReadChunk
from pd_connector.pool.read_plan import ReadPlan
from pd_connector.pool.store.base import FAR, Found
from pd_connector.pool.stored import gathered_bytes, payloads
from pd_connector.sglang.cache import WINDOW_TABLE

logger = logging.getLogger("pd_connector.sglang")

MOST_HELD_BYTES = 4 << 30
"""Most bytes of chunks that a rank holds. Requests that find no room compute their prompts."""
_READERS = 2
_BRINGERS = 8
"""Threads that wait for chunks of a far store, so that chunks of this host do not wait behind them."""
_FREE_BUFFERS = 4
"""Buffers that are kept for the next chunks: fresh memory costs time."""


class Ready(NamedTuple):
    """A verified chunk in the order of the rank's pages.

    Attributes:
        pieces: the copies to make, with placeholders instead of page ids.
        payloads: the bytes of each piece.
        window_from: the token of the chunk, from 0, from which on layers with a sliding window have whole pages here;
            `CHUNK_TOKENS`: none. 0 for a model without windows.
    """

    read: ReadChunk
    pieces: list[LoadPiece]
    payloads: list[memoryview]
    window_from: int = 0

    def payloads_of(self, pieces: Sequence[LoadPiece]) -> list[memoryview]:
        """The payload of each of these pieces of the chunk. Payloads that were not arranged yet are arranged now: a load can
        need a part of the chunk."""
        by_bytes = dict(zip(map(_bytes_of, self.pieces), self.payloads, strict=True))
        others = [piece for piece in pieces if _bytes_of(piece) not in by_bytes]
        made = arranged(self.read, others, bytearray(gathered_bytes(others)))
        by_bytes.update(zip(map(_bytes_of, others), made, strict=True))
        return [by_bytes[_bytes_of(piece)] for piece in pieces]


@dataclass(eq=False)
class HeldChunk:
    """A chunk that is read, or was read.

    Attributes:
        hit: its place in the store when its request came.
        users: requests that hold it.
        ready: the chunk; None while it is read, and if it cannot be used.
        problem: why it cannot be used.
        afar: whether it waits for the far store.
        brought_s: when it came from the far store, on the steady clock; 0: it is of this host, or has not come.
        done: whether reading has ended, also with a problem.
        done_s: when reading ended, on the steady clock.
    """

    chunk: PromptChunk
    hit: Found
    buffer: ReadBuffer
    users: int = 0
    ready: Ready | None = None
    problem: tuple[Miss | str, str] | None = None
    afar: bool = False
    brought_s: float = 0.0
    done: bool = False
    done_s: float = 0.0


class HeldChunks:
    """Any thread may use it.

    Args:
        loader: reads and verifies chunks.
        own: the rank's cache.
        progressed: called by a reading thread after each chunk.
    """

    def __init__(self, loader: Loader, own: Geometry, progressed: Callable[[], None]) -> None:
        self._loader = loader
        self._own = own
        self._progressed = progressed
        self._lock = threading.Lock()
        self._held: dict[bytes, HeldChunk] = {}
        self._free: list[ReadBuffer] = []
        self.nbytes = 0
        # A request waits for these threads: they have the agent's priority.
        self._threads = ThreadPoolExecutor(_READERS, "pd-pool-load", initializer=prefer_this_thread)
        self._bringers = ThreadPoolExecutor(_BRINGERS, "pd-pool-bring")

    @property
    def far_moved_s(self) -> float:
        """When a chunk last came from the far store, on the steady clock."""
        return self._loader.far_moved_s

    def fitting(self, hits: Sequence[Found]) -> int:
        """For how many of these chunks, from the first one on, there is room."""
        with self._lock:
            room = MOST_HELD_BYTES - self.nbytes
        return sum(total <= room for total in accumulate(hit.nbytes for hit in hits))

    def hold(self, chunk: PromptChunk, hit: Found, facts: ModelFacts) -> HeldChunk | None:
        """Hold a chunk, and read it unless it was read for another request. None: there is no room.

        Args:
            hit: where it is.
            facts: the model that will use it.
        """
        with self._lock:
            held = self._held.get(chunk.key)
            if held is None or held.problem is not None or held.chunk != chunk:
                if self.nbytes + hit.nbytes > MOST_HELD_BYTES:
                    return None
                buffer = self._free.pop() if self._free else ReadBuffer()
                held = HeldChunk(chunk, hit, buffer, users=1)
                self._held[chunk.key] = held
                self.nbytes += hit.nbytes
                if hit.tier == FAR:
                    held.afar = True
                    self._bringers.submit(self._bring, held, facts)
                else:
                    self._threads.submit(self._read, held, facts)
            else:
                held.users += 1
            return held

    def release(self, held: HeldChunk) -> None:
        """A request holds it no longer."""
        with self._lock:
            held.users -= 1
            if held.users == 0 and held.done:
                self._drop(held)

    def close(self) -> None:
        """End the threads."""
        for threads in (self._bringers, self._threads):
            threads.shutdown(wait=False, cancel_futures=True)

    def _drop(self, held: HeldChunk) -> None:
        self.nbytes -= held.hit.nbytes
        held.ready = None
        self._forget(held)
        if len(self._free) < _FREE_BUFFERS:
            self._free.append(held.buffer)

    def _forget(self, held: HeldChunk) -> None:
        """No other request gets it."""
        if self._held.get(held.chunk.key) is held:
            del self._held[held.chunk.key]

    def _bring(self, held: HeldChunk, facts: ModelFacts) -> None:
        """Wait for a chunk of a far store, then have it read. A thread that only waits calls it."""
        if self._is_wanted(held) and not self._failed(held, lambda: self._loader.bring(held.chunk)):
            held.brought_s, held.afar = time.monotonic(), False
            with contextlib.suppress(RuntimeError):  # all ends
                self._threads.submit(self._read, held, facts)
            return
        self._finish(held)

    def _read(self, held: HeldChunk, facts: ModelFacts) -> None:
        """Read a chunk, and bring it into the order of the rank's pages. A reading thread calls it."""
        if self._is_wanted(held):

            def read() -> None:
                held.ready = self._arranged(held, facts)

            self._failed(held, read)
        self._finish(held)

    def _is_wanted(self, held: HeldChunk) -> bool:
        with self._lock:
            if held.users > 0:
                return True
            self._forget(held)  # the next request reads it again
        return False

    @staticmethod
    def _failed(held: HeldChunk, step: Callable[[], None]) -> bool:
        """Whether a step has failed. The chunk says why."""
        try:
            step()
        except PoolError as error:
            held.problem = error.cause, str(error)
        except Exception as error:
            logger.exception("pool: a chunk was not read")
            held.problem = "failed", repr(error)
        return held.problem is not None

    def _finish(self, held: HeldChunk) -> None:
        with self._lock:
            held.done, held.done_s = True, time.monotonic()
            if held.users == 0:
                self._drop(held)
        self._progressed()

    def _arranged(self, held: HeldChunk, facts: ModelFacts) -> Ready:
        read = self._loader.read(held.chunk, facts, held.buffer)
        number = held.chunk.number
        span = number * CHUNK_TOKENS, (number + 1) * CHUNK_TOKENS
        (page_size,) = {group.page_size for group in self._own.groups}
        tables = [list(range(span[1] // page_size))]
        window_from = 0
        if any(group.table == WINDOW_TABLE for group in self._own.groups):
            # Without its windows a chunk still serves prompts that go on long behind it.
            first = first_covered(_needs(read), self._own, WINDOW_TABLE)
            window_from = -(-first // page_size) * page_size
            tables.append(list(tables[0]))
            for page in range((span[0] + window_from) // page_size):
                tables[WINDOW_TABLE][page] = -1
        pieces = planned(read, self._own, tables, number, *span)
        room = held.buffer.room(-1, gathered_bytes(pieces))
        return Ready(read, pieces, arranged(read, pieces, room), window_from)


def _bytes_of(piece: LoadPiece) -> tuple[Any, ...]:
    """Which bytes of a chunk a piece has."""
    return piece.part, piece.chunk, piece.run.layers, piece.route.layers, piece.route.heads


def _needs(read: ReadChunk) -> list[tuple[Geometry, ReadPlan]]:
    return [(part.geometry, part.need) for part in read.parts]


def planned(
    read: ReadChunk,
    own: Geometry,
    tables: Sequence[Sequence[int]],
    number: int,
    first_token: int,
    stop_token: int,
) -> list[LoadPiece]:
    """How a chunk comes into pages; see `plan_load`."""
    return plan_load(_needs(read), own, tables, number, first_token, stop_token)


def arranged(
    read: ReadChunk, pieces: Sequence[LoadPiece], room: memoryview | bytearray
) -> list[memoryview]:
    """The payload of each piece; see `payloads`."""
    parts = [(part.geometry, part.need, part.data) for part in read.parts]
    return payloads(pieces, parts, memoryview(room))
