# SPDX-License-Identifier: Apache-2.0
"""A handoff between two caches on a GPU: `PagedCache` as an agent calls it, with its streams, events, stagings,
slots and kernels, beside an engine that computes on a stream of its own. What arrives equals what arrives between
caches on a CPU."""

import functools
import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from device_memory import on_host
from support.caches import Rank
from support.setups import Layer, Model, Setup
from torch_device import gpu
from transfer_cases import Case

from pd_connector.kv.geometry import page_span
from pd_connector.memory.device_bytes import DeviceBytes, Payload
from pd_connector.memory.device_slab import DeviceSlab
from pd_connector.memory.pins import Pins
from pd_connector.pages.paged_cache import PagedCache
from pd_connector.plan.chunks import Chunk, plan
from pd_connector.plan.route import Route, routes
from pd_kernels.checksum import checksum_of

MODEL: Model = (Layer(2, 32, 16),) * 2
FIRST, MIDDLE, LAST = 3, 32, 50
"""Tokens that pass; the producer computes them in two steps."""
ROOMS = 3_200, 6_400
"""Bytes of a chunk at most, of a first and of a second request: stagings grow between them."""
GPU = torch.device("cuda", 0)


class Handoff(NamedTuple):
    """How KV passes.

    Attributes:
        codec: of the route.
        prepared: whether kernels are compiled beforehand, in a thread of their own.
        on_device: whether slots lie on the GPU.
        rooms: bytes of a chunk at most, in each request.
    """

    codec: str
    ours: Setup
    theirs: Setup
    prepared: bool = False
    on_device: bool = False
    rooms: tuple[int, ...] = ROOMS


class Side:
    """An engine, its cache on a device, and what the engine does to the pages."""

    def __init__(self, setup: Setup, seed: int, device: torch.device) -> None:
        geometry = setup.geometries(MODEL)[-1]
        self.rank = Rank(geometry, LAST, random.Random(seed), str(device))
        self.cache: PagedCache = self.rank.cache
        numbers = torch.Generator().manual_seed(seed)
        self.pages = [
            (storage.view(self.rank.shapes[layer].pages, -1), layer)
            for layer, storage in self.rank.storage.items()
        ]
        self.results = [
            torch.randn(pages.shape, generator=numbers).to(pages.dtype).to(device)
            for pages, _ in self.pages
        ]

    def compute(self, first: int, stop: int) -> object:
        """The engine writes the pages of tokens, on its own stream; returns a fence."""
        (group,) = self.rank.geometry.groups
        own = self.rank.pages(group, page_span(first, stop, group.page_size))
        for (pages, _), results in zip(self.pages, self.results, strict=True):
            for page in own:
                pages[page].copy_(results[page])
        return self.cache.fence()

    def forget(self) -> None:
        """Other requests have these pages."""
        for pages, _ in self.pages:
            pages.fill_(0.5)

    def bits(self) -> list[torch.Tensor]:
        """All pages, as the engine's next step reads them."""
        return [storage.view(torch.uint8).cpu() for storage in self.rank.storage.values()]


class Slots:
    """Two slots, which a peer fills and empties when it likes. `more`: makes two others like them."""

    def __init__(self, nbytes: int, device: torch.device | None) -> None:
        self.more = functools.partial(Slots, nbytes, device)
        self._slab = DeviceSlab(2, nbytes, device) if device else None
        self._own = np.zeros(2 * nbytes, np.uint8)
        self._memory = self._own.reshape(2, nbytes)
        self._pins = Pins(GPU)
        self._pins.pin(self._own, "slots")

    def __getitem__(self, number: int) -> Payload:
        return self._slab.slot(number % 2) if self._slab else self._memory[number % 2].data

    def take(self, payload: Payload) -> bytes:
        """What a peer reads at this moment."""
        if isinstance(payload, DeviceBytes):
            return on_host(payload.tensor).numpy().tobytes()
        return bytes(payload)

    def put(self, number: int, payload: bytes) -> Payload:
        """A peer writes into a slot at this moment."""
        slot = self[number][: len(payload)]
        room = on_host(slot.tensor).numpy() if isinstance(slot, DeviceBytes) else slot
        room[:] = np.frombuffer(payload, np.uint8) if isinstance(room, np.ndarray) else payload
        return slot

    def close(self) -> None:
        self._pins.release()
        if self._slab:
            self._slab.close()


def gathered(
    side: Side, paths: Sequence[Route], steps: Sequence[Sequence[Chunk]], slots: Slots
) -> list[tuple[bytes, bytes | None]]:
    """Each chunk's payload and checksum. The next chunk is begun meanwhile, also if a later step computes it."""
    chunks, found = [chunk for step in steps for chunk in step], []
    fences = [side.compute(FIRST, MIDDLE)]

    def call(number: int) -> tuple[Route, Chunk, list[int], Payload, object]:
        if number == len(steps[0]) == number * len(fences):
            fences.append(side.compute(MIDDLE, LAST))
        chunk = chunks[number]
        route = paths[chunk.route]
        pages = side.rank.pages(route.source, chunk.pages(route.source.page_size))
        return route, chunk, pages, slots[number], fences[number >= len(steps[0])]

    for number in range(len(chunks)):
        if number + 1 < len(chunks):
            side.cache.gather_next(*call(number + 1))  # type: ignore[arg-type]
        filled = side.cache.gather(*call(number))  # type: ignore[arg-type]
        found.append((slots.take(filled), side.cache.last_checksum))
    side.cache.settle()
    side.forget()
    return found


def scattered(
    side: Side, paths: Sequence[Route], chunks: Sequence[Chunk], payloads: list[bytes], slots: Slots
) -> tuple[list[bytes | None], list[bytes]]:
    """Scatter payloads that land in turn, with a gather from the same cache after each. Returns checksums of the
    scattered, and payloads of the gathered. A slot is lent again when its call has ended."""
    side.forget()
    fence, sums, sent = side.cache.fence(), [], []
    own, sending = routes(side.cache.geometry, side.cache.geometry, ["raw"], ["raw"]), slots.more()
    landed = [slots.put(number, payload) for number, payload in enumerate(payloads[:2])]
    for number, chunk in enumerate(chunks):
        route = paths[chunk.route]
        pages = side.rank.pages(route.destination, chunk.pages(route.destination.page_size))
        if number + 1 < len(chunks):
            side.cache.scatter_next(landed[number + 1])
        side.cache.scatter(route, chunk, pages, landed[number], fence)
        sums.append(side.cache.last_checksum)
        slots.put(number, b"\x5a" * len(payloads[number]))
        if number + 2 < len(chunks):
            landed.append(slots.put(number, payloads[number + 2]))
        back = chunk._replace(route=0, stop_layer=chunk.first_layer + 1, verbatim=False)
        back = back._replace(stop_token=min(back.stop_token, back.first_token + 8))
        where = side.rank.pages(own[0].source, back.pages(own[0].source.page_size))
        sent.append(sending.take(side.cache.gather(own[0], back, where, sending[number])))
    side.cache.settle()
    return sums, sent


def handoff(given: Handoff) -> None:
    """Two requests from one cache to another, on a GPU and on a CPU."""
    cpu = torch.device("cpu")
    ours, theirs = Side(given.ours, 1, GPU), Side(given.theirs, 2, GPU)
    source, target = Side(given.ours, 1, cpu), Side(given.theirs, 2, cpu)
    offered = given.codec, "raw"
    paths = routes(ours.cache.geometry, theirs.cache.geometry, offered, offered)
    if given.prepared:
        for side, gathers in ((ours, True), (theirs, False)):
            while not side.cache.prepare(paths, gathers=gathers):
                pass
    where = GPU if given.on_device else None
    for room in given.rooms:
        steps = plan(paths, FIRST, MIDDLE, room), plan(paths, MIDDLE, LAST, room)
        chunks = [chunk for step in steps for chunk in step]
        host, slots = Slots(room, None), (Slots(room, where), Slots(room, where))
        wanted = [payload for payload, _ in gathered(source, paths, steps, host)]
        _, sent = scattered(target, paths, chunks, wanted, host)
        found = gathered(ours, paths, steps, slots[0])
        assert [payload for payload, _ in found] == wanted, "payloads differ"
        sums = [checksum_of(memoryview(payload)) for payload in wanted]
        assert [summed for _, summed in found] == sums, "sums of the gather differ"
        arrived = scattered(theirs, paths, chunks, wanted, slots[1])
        assert arrived[0] == sums, "sums of the scatter differ"
        assert arrived[1] == sent, "payloads of a gather between scatters differ"
        for number, bits in enumerate(theirs.bits()):
            assert torch.equal(bits, target.bits()[number]), f"pages of layer {number} differ"
        for each in (host, *slots):
            each.close()


def on_gpu(given: Handoff) -> None:
    with gpu():
        handoff(given)


ALIKE = Setup(layout="NHD")
HALF = Setup(tp=2, layout="HND in parts", page_sizes=(32,))
HANDOFFS = {
    "raw": Handoff("raw", ALIKE, HALF),
    "raw, prepared, device slots": Handoff("raw", ALIKE, HALF, prepared=True, on_device=True),
    "int8": Handoff("int8", ALIKE, HALF, prepared=True),
    "int8, device slots": Handoff("int8", HALF, ALIKE, on_device=True),
    "whole pages": Handoff("raw", ALIKE, ALIKE),
    "one request": Handoff("raw", ALIKE, HALF, rooms=(1_920,)),
}
DOORS: dict[str, Case] = {
    f"handoff, {name}": functools.partial(on_gpu, given) for name, given in HANDOFFS.items()
}
