# SPDX-License-Identifier: Apache-2.0
"""Engines wait behind chunks of others as long as chunks come from the far store, and not when waiting takes longer than
computing."""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chunks import chain, save
from support.far_objects import Far
from support.pool_stores import patient, store
from support.waits import until

from pd_connector.errors import Miss, PoolError
from pd_connector.pool.carrier import asking, putting
from pd_connector.pool.carrier import carrier as carrier_module
from pd_connector.pool.carrier.asking import CarrierLink
from pd_connector.pool.carrier.carrier import Carrier
from pd_connector.pool.carrier.messages import MOST_KEYS, Waiting
from pd_connector.pool.carrier.server import CarrierServer
from pd_connector.pool.far.seal import Seal
from pd_connector.pool.store.base import FAR
from pd_connector.pool.store.local import LocalStore
from pd_connector.pool.store.reaching import ReachingStore

__all__ = ["patient", "store"]

WAIT_S = 60.0
CHUNKS = 6


class Slow(Far):
    """Gives one chunk for each permit."""

    def __init__(self) -> None:
        super().__init__()
        self.permits = threading.Semaphore(0)
        self.rows: list[int] = []

    def get(
        self, names: Sequence[str], sizes: Sequence[int], take: Callable[[int, memoryview], None]
    ) -> None:
        chunks = [name for name in names if len(self.objects.get(name, b"")) > 1000]
        if chunks:
            self.rows.append(len(chunks))
        for place, name in enumerate(names):
            if name in chunks:
                assert self.permits.acquire(timeout=WAIT_S)
            take(place, memoryview(self.objects.get(name, b"")))


class Clock:
    """The engine's. The test moves it, and sees what the engine has heard by then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self.ended: list[int] = []
        answers = asking.answers

        def decode(data: bytes) -> Any:
            answer = answers.decode(data)
            if isinstance(answer, Waiting):
                self.ended.append(answer.ended)
            return answer

        monkeypatch.setattr(asking, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(asking, "answers", SimpleNamespace(decode=decode))


class Site:
    """A host with a carrier and an engine. Only the far store has the chunks `keys`."""

    def __init__(self, store: LocalStore, far: Slow) -> None:
        self.far = far
        folder = Path(store.status().tiers[0].path)
        self.carrier = Carrier(store, Seal((b"k" * 32,)), "redis://h", 1 << 20, 1.0)
        self.server = CarrierServer(self.carrier, folder)
        self.store = ReachingStore(store, folder)
        self.link: CarrierLink = self.store.carrier
        self.keys = chain("prompt", CHUNKS)
        assert save(store, self.keys) == CHUNKS
        until(lambda: self.carrier.status().counts.get("put") == CHUNKS, "chunks in the far store")
        assert store.remove(self.keys) == CHUNKS

    def close(self) -> None:
        for _ in range(100):
            self.far.permits.release()
        self.link.close()
        self.server.close()
        self.carrier.close()


@pytest.fixture
def site(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    far = Slow()
    monkeypatch.setattr(carrier_module, "FarClient", lambda *args: far)
    monkeypatch.setattr(putting, "_FOLLOWS_S", 0.01)
    monkeypatch.setattr(asking, "BRING_S", 4.0)
    monkeypatch.setattr(asking, "QUEUE_S", 60.0)
    made = Site(store, far)
    yield made
    made.close()


class Waiter(threading.Thread):
    """An engine that waits for the last chunk, behind the others."""

    def __init__(self, site: Site) -> None:
        super().__init__(daemon=True)
        self._site, self.problem = site, ""
        site.link.prefetch(site.keys[:-1])
        until(lambda: site.carrier.status().bringing == CHUNKS - 1)
        self.start()

    def run(self) -> None:
        try:
            self._site.link.bring(self._site.keys[-1])
        except PoolError as error:
            self.problem = f"{error.cause}: {error}"


def test_a_chunk_that_waits_behind_others_is_not_late_while_these_come(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    waiter = Waiter(site)
    for come in range(CHUNKS):
        until(lambda: clock.ended[-1:] == [come], "what the carrier tells")  # noqa: B023
        clock.now_s += 3.0
        site.far.permits.release()
    waiter.join(WAIT_S)
    assert (waiter.is_alive(), waiter.problem) == (False, "")
    assert site.link.find(chain("other", 1)).sizes == []
    assert site.link._answers.waited_for


def test_a_carrier_that_brings_nothing_is_given_up(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    waiter = Waiter(site)
    until(lambda: clock.ended, "what the carrier tells")
    clock.now_s += 4.0
    waiter.join(WAIT_S)
    assert waiter.problem.startswith(Miss.LATE)
    assert not site.link._answers.waited_for, "it is left alone"


def test_no_chunk_is_waited_for_without_end(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "QUEUE_S", 8.0)
    clock = Clock(monkeypatch)
    waiter = Waiter(site)
    for come in range(3):
        until(lambda: clock.ended[-1:] == [come], "what the carrier tells")  # noqa: B023
        clock.now_s += 3.0
        site.far.permits.release()
    waiter.join(WAIT_S)
    assert waiter.problem.startswith(Miss.NOT_WORTH)
    assert site.link._answers.waited_for, "the far store answers"


def test_an_engine_that_ends_waits_for_no_chunk(site: Site) -> None:
    waiter = Waiter(site)
    until(lambda: site.link._busy, "the request")
    site.link.close()
    waiter.join(WAIT_S)
    assert waiter.problem.startswith(Miss.LATE)


def test_an_engine_is_told_how_long_it_would_wait(site: Site) -> None:
    assert site.carrier.find(site.keys).wait_s == 0.0
    site.link.prefetch(site.keys)
    site.far.permits.release()
    until(lambda: site.carrier.status().bringing == CHUNKS - 1)
    until(lambda: site.carrier.find([site.keys[-1]]).wait_s > 0.0, "a measured speed")
    (found,) = site.store.find([site.keys[-1]])
    assert found
    assert (found.tier, found.wait_s > 0.0) == (FAR, True)
    assert site.carrier.find(site.keys[1:]).wait_s == 0.0, "what is on its way for the same prompt"
    assert site.carrier.find(site.keys[1:2]).wait_s == 0.0, "the others come after it"
    assert site.carrier.find(chain("unknown", 1)).wait_s == 0.0
    for _ in range(CHUNKS):
        site.far.permits.release()
    until(lambda: site.carrier.status().bringing == 0)
    assert site.carrier.find(site.keys).wait_s == 0.0


def test_chunks_that_are_prefetched_come_in_one_row_whoever_waits_for_them(site: Site) -> None:
    """Else the link would be idle after the first chunk."""
    for _ in range(CHUNKS):
        site.far.permits.release()
    site.store.prefetch(site.keys)
    assert all(site.store.bring(key) for key in site.keys)
    assert site.far.rows == [CHUNKS]


def test_a_chain_of_any_length_is_asked_for(site: Site) -> None:
    for _ in range(CHUNKS):
        site.far.permits.release()
    site.store.prefetch([*site.keys, *chain("unknown", MOST_KEYS)])
    assert all(site.store.bring(key) for key in site.keys)
