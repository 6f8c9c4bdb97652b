# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of a GPU that is not there: what a capture records, each replay runs again, with the same arguments and
the same memory. What CUDA does not allow in a capture raises RuntimeError."""

import itertools
from typing import Any

from device_memory import MEMORY
from streams import STREAMS, Stream

_pools = itertools.count(1)


def new_pool() -> tuple[int, int]:
    """As `torch.cuda.graph_pool_handle`."""
    return 0, next(_pools)


class Graph:
    """Work that was captured, as `torch.cuda.CUDAGraph`.

    Attributes:
        work: what a replay runs, in its order.
        allocated: bytes of each tensor that was allocated in the capture.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        self.work: list[Any] = []
        self.allocated: list[int] = []
        self.memory = new_pool()

    def pool(self) -> tuple[int, int]:
        return self.memory

    def replay(self) -> None:
        """Queue the work. The memory of the capture holds anything before."""
        STREAMS.queue(lambda: MEMORY.spoil(self.memory))
        for work in self.work:
            STREAMS.queue(work)


class Capture:
    """As `torch.cuda.graph`."""

    def __init__(
        self, graph: Graph, pool: tuple[int, int] | None = None, stream: Any = None, **_: Any
    ) -> None:
        self.graph, self.stream = graph, stream or Stream()
        graph.memory = pool or graph.memory

    def __enter__(self) -> None:
        STREAMS.finish_all()
        self.before, STREAMS.current = STREAMS.current, self.stream
        STREAMS.captured = {self.stream: self.graph.work}
        MEMORY.pool, MEMORY.allocated = self.graph.memory, self.graph.allocated

    def __exit__(self, *_: object) -> None:
        STREAMS.current = self.before
        STREAMS.captured = {}
        MEMORY.pool = MEMORY.allocated = None
