# SPDX-License-Identifier: Apache-2.0
"""Two ways to bring a prompt's KV from one GPU process to another over NIXL: a descriptor per page, or slabs that the
transfer kernels collate."""

import contextlib
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from pd_bench.gpu.cache import GpuCache
from pd_bench.gpu.endpoint import Endpoint
from pd_bench.wire.movers import Mover, descriptors, places
from pd_connector.pages.kernel_pages import KernelPages
from pd_connector.plan.chunks import Chunk, chunk_limit, plan
from pd_connector.plan.route import routes
from pd_connector.tools.wire import TIMEOUT_S, MoveError
from pd_kernels.transfer import finish

_GO = b"go"
_FAILED = b"failed: "
_CHUNK = struct.Struct("<I8s")  # number, checksum
_CREDIT = struct.Struct("<I")  # number


class PerPage(Mover):
    """Works as vLLM's NixlConnector (`nixl/base_worker.py`, `nixl/pull_worker.py`). Each layer is a region, and each
    of its pages a descriptor in a prepared list. The consumer reads its prompt's pages straight into its own pages.
    A progress thread polls in both processes. Nothing is verified."""

    def __init__(self, role: str, cache: GpuCache) -> None:
        self._cache = cache
        self._bases = [layer.data_ptr() for layer in cache.layers]
        regions = [(base, cache.page_count * cache.page_bytes) for base in self._bases]
        settings = {"num_threads": 4, "capture_telemetry": True}
        self._end = Endpoint(role, cache, regions, settings)
        self._lists: list[Any] = []

    def address(self) -> dict[str, Any]:
        end = self._end
        return {"metadata": end.metadata, "bases": self._bases, "device": end.device}

    def meet(self, peer: Mapping[str, Any]) -> None:
        end, cache = self._end, self._cache
        end.meet(peer["metadata"])
        for owner, bases, device in (
            ("NIXL_INIT_AGENT", self._bases, end.device),
            (end.remote, peer["bases"], peer["device"]),
        ):
            table = descriptors(bases, cache.page_count, cache.page_bytes, device)
            every = end.nixl.get_xfer_descs(table, end.memory)
            self._lists.append(end.nixl.prep_xfer_dlist(owner, every))

    def offer(self, number: int) -> None:
        self._end.notes()

    def fetch(self, number: int) -> int:
        end, (here, there) = self._end, self._lists
        mine, theirs = (places(self._cache, side) for side in ("consumer", "producer"))
        note = f"transfer {number}:1".encode()
        handle = end.nixl.make_prepped_xfer("READ", here, mine, there, theirs, notif_msg=note)
        if end.nixl.transfer(handle) == "ERR":
            raise MoveError("NIXL does not start a read")
        waits = _patience()
        while not end.ended(handle):
            waits()
        return len(mine)

    def close(self) -> None:
        for prepared in self._lists:
            self._end.nixl.release_dlist_handle(prepared)
        self._end.close()


class _Queued(NamedTuple):
    """A chunk whose gather or scatter is queued."""

    number: int
    sums: torch.Tensor  # in host memory, once `done`
    event: torch.cuda.Event | None  # None if nothing is queued, because it is done at once

    @property
    def done(self) -> bool:
        return self.event is None or self.event.query()


class Collated(Mover):
    """Chunks are gathered into slots of a slab on the device. NIXL writes them into the consumer's slots. There they
    are scattered, and their checksums compared. A slot is reused once its chunk was scattered.

    Args:
        codec: on the wire.
        slots: number of slots in each slab.
        slot_bytes: size of each.
    """

    def __init__(self, role: str, cache: GpuCache, codec: str, slots: int, slot_bytes: int) -> None:
        self._cache = cache
        self._count, self._slot_bytes = slots, slot_bytes
        geometry = cache.geometry
        (self._route,) = routes(geometry, geometry, (codec, "raw"), (codec, "raw"))
        most = chunk_limit((self._route,), cache.tokens, slot_bytes, None)
        self._chunks = plan((self._route,), 0, cache.tokens, most)
        self._pages = KernelPages(cache.layer_pages(), cache.device)
        self._slab = torch.empty(slots * slot_bytes, dtype=torch.uint8, device=cache.device)
        on_gpu = cache.device.type == "cuda"
        self._stream = torch.cuda.Stream(cache.device) if on_gpu else None
        region = self._slab.data_ptr(), len(self._slab)
        self._end = Endpoint(role, cache, [region], {"enable_prog_thread": False})
        self._peer: Mapping[str, Any] = {}
        self._serving: threading.Thread | None = None

    def address(self) -> dict[str, Any]:
        end, base = self._end, self._slab.data_ptr()
        return {"metadata": end.metadata, "base": base, "device": end.device}

    def meet(self, peer: Mapping[str, Any]) -> None:
        self._peer = peer
        self._end.meet(peer["metadata"])

    def offer(self, number: int) -> None:
        self._join()
        self._serving = threading.Thread(target=self._serve, daemon=True)
        self._serving.start()

    def fetch(self, number: int) -> int:
        checksums: dict[int, bytes] = {}
        scattered: deque[_Queued] = deque()
        left = len(self._chunks)
        waits = _patience()
        with self._streamed():
            self._end.tell(_GO)
            while left:
                waits()
                for note in self._end.notes():
                    if note.startswith(_FAILED):
                        raise MoveError(f"the producer {note.decode()}")
                    chunk, checksums[chunk] = _CHUNK.unpack(note)
                    scattered.append(self._queue(chunk, self._pages.scatter))
                while scattered and scattered[0].done:
                    queued = scattered.popleft()
                    if self._checksum(queued) != checksums[queued.number]:
                        raise MoveError(f"chunk {queued.number} is corrupt")
                    self._end.tell(_CREDIT.pack(queued.number))
                    left -= 1
        return len(self._chunks)

    def close(self) -> None:
        self._join()
        self._end.close()

    def _serve(self) -> None:
        """Send every chunk once the consumer has asked, each as soon as a slot is free."""
        try:
            self._send()
        except Exception as error:
            self._end.tell(_FAILED + repr(error).encode())

    def _send(self) -> None:
        returned: set[int] = set()
        gathered: deque[_Queued] = deque()
        writes: list[Any] = []
        begun, queued = False, 0
        waits = _patience()
        with self._streamed():
            while writes or len(returned) < len(self._chunks):
                waits()
                for note in self._end.notes():
                    if note == _GO:
                        begun = True
                    else:
                        returned.add(*_CREDIT.unpack(note))
                free = queued < self._count or queued - self._count in returned
                if begun and free and queued < len(self._chunks):
                    gathered.append(self._queue(queued, self._pages.gather))
                    queued += 1
                while gathered and gathered[0].done:
                    writes.append(self._write(gathered.popleft()))
                writes = [handle for handle in writes if not self._end.ended(handle)]

    def _write(self, queued: _Queued) -> Any:
        chunk, place = self._chunks[queued.number], self._place(queued.number)
        nbytes = chunk.nbytes(self._route)
        note = _CHUNK.pack(queued.number, self._checksum(queued))
        here, there = self._slab.data_ptr() + place, self._peer["base"] + place
        return self._end.write(here, there, nbytes, self._peer["device"], note)

    def _queue(self, number: int, move: Callable[..., torch.Tensor | None]) -> _Queued:
        """Queue the gather or scatter of a chunk, from or to its slot."""
        chunk: Chunk = self._chunks[number]
        pages = [self._cache.pages[page] for page in chunk.pages(self._route.source.page_size)]
        place = self._place(number)
        payload = self._slab[place : place + chunk.nbytes(self._route)]
        sums = move(self._route, chunk, pages, payload)
        if sums is None:
            raise MoveError("no kernel takes such a chunk")
        if self._stream is None:
            return _Queued(number, sums, None)
        host = sums.to("cpu", non_blocking=True)
        return _Queued(number, host, self._stream.record_event())

    def _checksum(self, queued: _Queued) -> bytes:
        return finish(queued.sums, self._chunks[queued.number].nbytes(self._route))

    def _place(self, number: int) -> int:
        """Offset of a chunk's slot in the slab, the same on both sides."""
        return number % self._count * self._slot_bytes

    def _streamed(self) -> contextlib.AbstractContextManager[object]:
        """A context in which the mover's own stream is current."""
        if self._stream is None:
            return contextlib.nullcontext()
        stream: contextlib.AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return stream

    def _join(self) -> None:
        if self._serving is not None:
            self._serving.join(TIMEOUT_S)
            self._serving = None


def _patience() -> Callable[[], None]:
    """Returns a function to call in a waiting loop; it raises MoveError after too long a wait."""
    deadline = time.monotonic() + TIMEOUT_S

    def wait() -> None:
        if time.monotonic() > deadline:
            raise MoveError(f"not all has come within {TIMEOUT_S:g} s")

    return wait
