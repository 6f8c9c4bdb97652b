# SPDX-License-Identifier: Apache-2.0
"""Threads that read chunks of the pool, and the memory in which these wait for the agent's thread."""

import queue
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from pd_connector.agent.thread_priority import prefer_this_thread
from pd_connector.pool.copy_plan import LoadPiece, plan_load
from pd_connector.pool.jobs import Fill, PromptChunk
from pd_connector.pool.loader import ReadBuffer, ReadChunk
from pd_connector.pool.stored import gathered_bytes, payloads

_BUFFERS = 4
"""Chunks that are being read, or not placed yet."""
_READERS = 2


class Arranged(NamedTuple):
    """A chunk in memory, ready to be written into pages."""

    read: ReadChunk
    pieces: list[LoadPiece]
    payloads: list[memoryview]


def arrange(read: ReadChunk, fill: Fill, chunk: PromptChunk, buffer: ReadBuffer) -> Arranged:
    """Bring what was read into the order of the rank's pages. In a thread that reads, so that the agent's thread only
    has to write it."""
    needs = [(part.geometry, part.need) for part in read.parts]
    span = fill.first_token, fill.stop_token
    pieces = plan_load(needs, read.own, fill.pages, chunk.number, *span)
    parts = [(part.geometry, part.need, part.data) for part in read.parts]
    room = buffer.room(-1, gathered_bytes(pieces))
    return Arranged(read, pieces, payloads(pieces, parts, room))


class Readers:
    """Threads that read, and the memory that they read into."""

    def __init__(self) -> None:
        # A request waits for them: as the agent's thread they go before the engine's.
        self.threads = ThreadPoolExecutor(_READERS, "pd-pool-load", initializer=prefer_this_thread)
        self.buffers: queue.SimpleQueue[ReadBuffer] = queue.SimpleQueue()
        for _ in range(_BUFFERS):
            self.buffers.put(ReadBuffer())
