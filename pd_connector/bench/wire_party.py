# SPDX-License-Identifier: Apache-2.0
"""The program of either process of `bench wire`: obeys calls on a socket until it is ended.

Run as `python -m pd_connector.bench.wire_party SOCKET ROLE TOKENS HOST`. A call is msgpack
`[name, arguments]`, its answer `[error, result]`.
"""

import sys
import threading
import time
from typing import Any

import msgspec
import zmq

from pd_connector.bench.wire_cache import WireCache
from pd_connector.bench.wire_movers import Mover, PlainTcp, make_mover


class Party:
    """Its public methods are the calls."""

    def __init__(self, role: str, tokens: int, host: str) -> None:
        self._role = role
        self._host = host
        self._cache = WireCache(role, tokens)
        self._mover: Mover | None = None

    def open(self, way: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Become one side of this way to move KV; returns its address."""
        self._mover = make_mover(way, self._role, self._cache, self._host, settings)
        return self._mover.address()

    def meet(self, peer: dict[str, Any]) -> None:
        assert self._mover is not None
        self._mover.meet(peer)

    def offer(self, number: int) -> float:
        """Let it be fetched; returns the CPU time that this process has used so far."""
        assert self._mover is not None
        self._mover.offer(number)
        used_s = time.process_time()
        if isinstance(self._mover, PlainTcp):
            threading.Thread(target=self._mover.serve, daemon=True).start()
        return used_s

    def used(self) -> float:
        """CPU time that this process has used so far, in seconds."""
        return time.process_time()

    def fetch(self, number: int) -> tuple[float, float, int]:
        """Fetch it into wiped pages; returns seconds, CPU seconds here, and descriptors."""
        assert self._mover is not None
        self._cache.wipe()
        began, used_s = time.perf_counter(), time.process_time()
        descriptors = self._mover.fetch(number)
        return time.perf_counter() - began, time.process_time() - used_s, descriptors

    def check(self, lossy: bool) -> str:
        return self._cache.check(lossy)

    def close(self) -> None:
        if self._mover is not None:
            self._mover.close()
            self._mover = None


def main(path: str, role: str, tokens: str, host: str) -> None:
    party = Party(role, int(tokens), host)
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


if __name__ == "__main__":
    main(*sys.argv[1:])
