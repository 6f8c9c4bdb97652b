# SPDX-License-Identifier: Apache-2.0
"""The program of either process of `bench handoff --gpu`: obeys calls on a socket until it is ended.

Run as `python -m pd_connector.bench.gpu_party SOCKET ROLE DEVICE`. A call is msgpack
`[name, arguments]`, its answer `[error, result]`.
"""

import sys
import time
from typing import Any

import msgspec
import torch
import zmq

from pd_connector.bench.gpu_cache import GpuCache
from pd_connector.bench.gpu_movers import Collated, PerPage
from pd_connector.bench.wire_movers import Mover
from pd_kernels.bench.caches import Model


class GpuParty:
    """Its public methods are the calls, those of `wire_party.Party`."""

    def __init__(self, role: str, device: str) -> None:
        self._role = role
        self._device = torch.device(device)
        if self._device.type == "cuda":
            self._device = torch.device("cuda", self._device.index or 0)
            torch.cuda.set_device(self._device)
        self._cache: GpuCache | None = None
        self._mover: Mover | None = None

    def open(self, way: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Become one side of this way, `pages` or `collated`, with such a model and prompt; returns
        its address."""
        cache = self._filled(Model(**settings["model"]), settings["tokens"])
        if way == "pages":
            self._mover = PerPage(self._role, cache)
        else:
            slots = settings["slots"], settings["slot_bytes"]
            self._mover = Collated(self._role, cache, settings["codec"], *slots)
        return self._mover.address()

    def meet(self, peer: dict[str, Any]) -> None:
        assert self._mover is not None
        self._mover.meet(peer)

    def offer(self, number: int) -> float:
        """Let it be fetched; returns the CPU time that this process has used so far."""
        assert self._mover is not None
        self._mover.offer(number)
        return time.process_time()

    def used(self) -> float:
        """CPU time that this process has used so far, in seconds."""
        return time.process_time()

    def fetch(self, number: int) -> tuple[float, float, int]:
        """Fetch it into wiped pages; returns seconds, CPU seconds here, and descriptors."""
        assert self._mover is not None
        assert self._cache is not None
        self._cache.wipe()
        began, used_s = time.perf_counter(), time.process_time()
        descriptors = self._mover.fetch(number)
        return time.perf_counter() - began, time.process_time() - used_s, descriptors

    def check(self, lossy: bool) -> str:
        assert self._cache is not None
        return self._cache.check(lossy)

    def close(self) -> None:
        if self._mover is not None:
            self._mover.close()
            self._mover = None

    def _filled(self, model: Model, tokens: int) -> GpuCache:
        """The cache of this model and prompt; one at a time."""
        if self._cache is None or (self._cache.model, self._cache.tokens) != (model, tokens):
            self._cache = None
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            self._cache = GpuCache(self._role, model, tokens, self._device)
        return self._cache


def main(path: str, role: str, device: str) -> None:
    party = GpuParty(role, device)
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
