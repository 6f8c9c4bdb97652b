# SPDX-License-Identifier: Apache-2.0
"""Gathers that are begun early, and chunks that are posted: what a device has not done yet is never used.

On CPU the operators run their references. A device that is late (`Late`) does its work when it is waited for.
"""

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import agents
from support.agents import LONG, Ranks, assert_pages, ranks
from support.caches import Rank as CacheRank
from support.setups import Layer, Setup

from pd_connector.errors import Cause
from pd_connector.memory.device_slab import DeviceSlab
from pd_connector.pages.one_ahead import OneAhead
from pd_connector.pages.paged_cache import PagedCache
from pd_connector.plan.chunks import Chunk
from pd_connector.plan.route import Route, routes

pytest.importorskip("triton")
__all__ = ["ranks"]

CPU = torch.device("cpu")
TRANSFER = LONG | {"transports": ("nixl",)}
PAGES, INTO = list(range(5, 505)), list(range(500, 0, -1))
"""Enough for several chunks."""


def one_rank() -> CacheRank:
    return CacheRank(Setup().geometries((Layer(2),) * 2)[-1], 160, random.Random(1), "cpu")


def one_cache(rank: CacheRank | None = None) -> tuple[PagedCache, Route]:
    rank = rank or one_rank()
    cache = PagedCache(rank.views, rank.geometry, by_kernels=True)
    (route,) = routes(rank.geometry, rank.geometry, ("raw",), ("raw",))
    return cache, route


def chunk_of(tokens: int) -> Chunk:
    return Chunk(0, 0, 0, 2, 0, tokens, False)


def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each gather, whether it was begun before."""
    found: list[bool] = []
    take = OneAhead._take

    def seen(ahead: OneAhead, call: Any) -> Any:
        moving = take(ahead, call)
        found.append(moving is not None)
        return moving

    monkeypatch.setattr(OneAhead, "_take", seen)
    return found


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_a_guess_changes_no_payload_and_no_checksum(data: st.DataObject) -> None:
    """Right or wrong, for slots of either kind, whether or not it is settled."""
    cache, route = one_cache()
    plain, _ = one_cache()
    nbytes = chunk_of(48).nbytes(route)
    on_device = DeviceSlab(3, nbytes, CPU)
    on_host = [memoryview(bytearray(nbytes)) for _ in range(3)]

    def call(busy: int = -1) -> tuple[Any, ...]:
        tokens = data.draw(st.sampled_from([16, 48]))
        pages = data.draw(st.permutations(range(8)))[: tokens // 16]
        place = data.draw(st.sampled_from([p for p in range(3) if p != busy]))
        slot = on_device.slot(place) if data.draw(st.booleans()) else on_host[place]
        places[id(slot)] = place
        return route, chunk_of(tokens), pages, slot

    places: dict[int, int] = {}
    planned = call()
    for _ in range(data.draw(st.integers(1, 8))):
        following = call(busy=places[id(planned[3])])
        if data.draw(st.booleans()):
            cache.gather_next(*following)
        found = cache.gather(*planned)
        wanted = plain.gather(*planned[:3], memoryview(bytearray(nbytes)))
        assert bytes(found) == bytes(wanted)
        assert cache.last_checksum == plain.last_checksum
        if data.draw(st.booleans()):
            cache.settle()
        planned = following if data.draw(st.booleans()) else call()
    cache.settle()


def test_a_guess_that_is_right_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, route = one_cache()
    found = taken(monkeypatch)
    slots = [memoryview(bytearray(chunk_of(16).nbytes(route))) for _ in range(2)]
    for _ in range(2):
        cache.gather_next(route, chunk_of(16), [3], slots[1])
        cache.gather(route, chunk_of(16), [2], slots[0])
        cache.gather(route, chunk_of(16), [3], slots[1])
        cache.settle()
    assert found == [False, True] * 2


@pytest.mark.parametrize("settles", [True, False])
def test_pages_that_were_given_away_since_are_read_again(settles: bool) -> None:
    """Between two turns of the agent pages may be revoked, and written by others: `settle` forgets what
    was read before. Without it, bytes of before would be sent."""
    ranks = [one_rank(), one_rank()]
    cache, route = one_cache(ranks[0])
    slots = [memoryview(bytearray(chunk_of(16).nbytes(route))) for _ in range(2)]
    cache.gather_next(route, chunk_of(16), [3], slots[1])
    cache.gather(route, chunk_of(16), [2], slots[0])
    if settles:
        cache.settle()
    for rank in ranks:
        for layer in rank.views.values():
            layer.key[3] = 7
    payload = bytes(cache.gather(route, chunk_of(16), [3], slots[1]))
    fresh, _ = one_cache(ranks[1])
    wanted = bytes(fresh.gather(route, chunk_of(16), [3], memoryview(bytearray(len(payload)))))
    assert (payload == wanted) is settles


def test_a_guess_that_cannot_be_is_left_to_its_own_call() -> None:
    cache, route = one_cache()
    slots = [memoryview(bytearray(chunk_of(16).nbytes(route))) for _ in range(2)]
    cache.gather_next(route, chunk_of(16), [99], slots[1])
    cache.gather(route, chunk_of(16), [2], slots[0])
    with pytest.raises(IndexError):
        cache.gather(route, chunk_of(16), [99], slots[1])
    cache.gather_next(route, chunk_of(48), [1, 2, 3], slots[1])
    cache.gather(route, chunk_of(16), [2], slots[0])
    cache.settle()


def test_a_chunk_whose_turn_comes_at_once_is_not_gathered_again_behind_its_post(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The chunk before it was revoked, so that its own `gather` is the next: begun once more, the slot would
    be written while it is sent."""
    cache, route = one_cache()
    late = Late(monkeypatch)
    slot = DeviceSlab(1, chunk_of(16).nbytes(route), CPU).slot(0)
    cache.gather_next(route, chunk_of(16), [3], slot)
    cache.gather(route, chunk_of(16), [3], slot)
    assert late.queue == []
    cache.settle()


# Whole transfers, on devices that are late.


class Late:
    """A device that does what was queued when somebody waits for it. Each thread has its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from pd_connector.pages import kernel_pages

        self._run = kernel_pages._run
        self._queues: dict[int, list[Callable[[], object]]] = {}
        self.forgets: threading.Thread | None = None  # its waits return at once
        monkeypatch.setattr(kernel_pages, "_run", self.run)
        monkeypatch.setattr(kernel_pages, "record", lambda device: self)

    @property
    def queue(self) -> list[Callable[[], object]]:
        return self._queues.setdefault(threading.get_ident(), [])

    def run(self, operator: Any, launch: Any) -> Any:
        self.queue.append(lambda: self._run(operator, launch))
        return launch.sums

    def synchronize(self) -> None:
        if threading.current_thread() is not self.forgets:
            while self.queue:
                self.queue.pop(0)()

    def wait(self, stream: object) -> None:
        """Streams keep the order by themselves; there is one."""


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Late:
    monkeypatch.setattr(agents, "PagedCache", lambda *what: PagedCache(*what, by_kernels=True))
    return Late(monkeypatch)


@pytest.mark.parametrize("direction", ["write", "read"])
def test_a_chunk_is_posted_once_the_device_has_gathered_it(
    ranks: Ranks,
    late: Late,
    monkeypatch: pytest.MonkeyPatch,
    direction: str,
) -> None:
    pytest.importorskip("nixl._api", reason="nixl cannot be imported")
    found = taken(monkeypatch)
    producer, consumer = ranks.pair(TRANSFER | {"direction": direction}, pages=510)
    producer.offer("t", PAGES)
    consumer.load(producer.source, "t", INTO)
    assert consumer.loaded("t").cause is None
    assert_pages(producer, PAGES, consumer, INTO)
    assert True in found, "some were begun early"


@pytest.mark.parametrize("direction", ["write", "read"])
def test_a_chunk_that_was_posted_too_early_is_noticed(
    ranks: Ranks,
    late: Late,
    direction: str,
) -> None:
    """What would happen without the wait: the slot's bytes of before are sent, with sums of nothing. Slots are
    not filled with zeros, which these sums would fit."""
    pytest.importorskip("nixl._api", reason="nixl cannot be imported")
    producer, consumer = ranks.pair(TRANSFER | {"direction": direction}, pages=510)
    late.forgets = producer.agent._thread._thread
    producer.offer("t", PAGES)
    consumer.load(producer.source, "t", INTO)
    assert consumer.loaded("t").cause is Cause.CHECKSUM


def test_chunks_that_land_together_are_staged_one_ahead(
    ranks: Ranks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pd_connector.pages.kernel_pages import KernelPages

    monkeypatch.setattr(agents, "PagedCache", lambda *what: PagedCache(*what, by_kernels=True))
    staged: list[int] = []
    stage = KernelPages.stage

    def seen(pages: KernelPages, payload: Any) -> None:
        staged.append(len(payload))
        stage(pages, payload)

    monkeypatch.setattr(KernelPages, "stage", seen)
    producer, consumer = ranks.pair(LONG | {"transports": ("shm",), "direction": "read"}, pages=510)
    held = hold_back(consumer)
    producer.offer("t", PAGES)
    consumer.load(producer.source, "t", INTO)
    assert consumer.loaded("t").cause is None
    assert_pages(producer, PAGES, consumer, INTO)
    assert held
    assert staged, "chunks that came together were staged"


def hold_back(consumer: Any) -> list[int]:
    """Let a consumer's chunks land two at a time, but for those that nothing follows."""
    (transport,) = consumer.transports
    poll, kept, polls = transport.poll, [], [0]
    sizes: list[int] = []

    def polled() -> Any:
        written, landed = poll()
        polls[0] = 0 if landed else polls[0] + 1
        kept.extend(landed)
        if len(kept) < 2 and polls[0] < 50:
            return written, []
        found, kept[:] = list(kept), []
        sizes.extend([len(found)] * bool(found))
        return written, found

    transport.poll = polled
    return sizes
