# SPDX-License-Identifier: Apache-2.0
"""Either process of a benchmark with two processes: it answers calls on a socket until it is ended.

A call is msgpack `[name, arguments]`, its answer `[error, result]`.
"""

import abc
import time
from typing import Any, Protocol

import msgspec
import zmq

from pd_bench.wire.movers import AnyMover


class MovedCache(Protocol):
    """What a party needs from the cache that is moved."""

    def wipe(self) -> None: ...

    def check(self, lossy: bool) -> str:
        """Why it is wrong after a transfer; empty if it is right."""
        ...


class Party(abc.ABC):
    """Its public methods are the calls. `open` sets the cache and the way to move it."""

    cache: MovedCache | None = None
    mover: AnyMover | None = None

    @abc.abstractmethod
    def open(self, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Become one side of a mover of this kind; returns its address."""

    def meet(self, peer: dict[str, Any]) -> None:
        assert self.mover is not None
        self.mover.meet(peer)

    def offer(self, number: int) -> float:
        """Offer the KV to be fetched; returns the CPU time that this process has used."""
        assert self.mover is not None
        self.mover.offer(number)
        return time.process_time()

    def used(self) -> float:
        """CPU time that this process has used, in seconds."""
        return time.process_time()

    def fetch(self, number: int) -> tuple[float, float, int]:
        """Fetch it into wiped pages; returns seconds, CPU seconds here, and descriptors."""
        assert self.mover is not None
        assert self.cache is not None
        self.cache.wipe()
        began, used_s = time.perf_counter(), time.process_time()
        descriptors = self.mover.fetch(number)
        return time.perf_counter() - began, time.process_time() - used_s, descriptors

    def check(self, lossy: bool) -> str:
        assert self.cache is not None
        return self.cache.check(lossy)

    def close(self) -> None:
        if self.mover is not None:
            self.mover.close()
            self.mover = None


def obey(party: object, path: str) -> None:
    """Serve calls on the Unix socket at `path` for ever."""
    calls: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REP)
    calls.bind(f"ipc://{path}")
    while True:
        name, arguments = msgspec.msgpack.decode(calls.recv())
        error, result = "", None
        try:
            result = getattr(party, name)(**arguments)
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
        calls.send(msgspec.msgpack.encode([error, result]))
