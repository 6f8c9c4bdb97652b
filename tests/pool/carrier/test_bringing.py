# SPDX-License-Identifier: Apache-2.0
"""Engines hear of each chunk as soon as it is known what becomes of it, while later chunks are still on their way."""

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
from chunks import chain, save
from support.far_objects import Far
from support.pool_stores import patient, store
from support.waits import until

from pd_connector.errors import Miss
from pd_connector.pool.carrier import carrier as carrier_module
from pd_connector.pool.carrier import putting
from pd_connector.pool.carrier.carrier import Carrier
from pd_connector.pool.carrier.client import SilentError
from pd_connector.pool.far.seal import Seal
from pd_connector.pool.store.local import LocalStore

__all__ = ["patient", "store"]

WAIT_S = 60.0


class Slow(Far):
    """Gives one object, and waits before it gives the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on, self.silent = threading.Event(), False
        self.calls = 0

    def get(
        self, names: Sequence[str], sizes: Sequence[int], take: Callable[[int, memoryview], None]
    ) -> None:
        self.calls += len(names) > 1  # the mark is read alone
        for place, name in enumerate(names):
            take(place, memoryview(self.objects.get(name, b"")))
            if not place and len(names) > 1:
                self.goes_on.wait(WAIT_S)
                if self.silent:
                    raise SilentError("it stands still")


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Slow:
    made = Slow()
    monkeypatch.setattr(carrier_module, "FarClient", lambda *args: made)
    monkeypatch.setattr(putting, "_FOLLOWS_S", 0.01)
    return made


@pytest.fixture
def carrier(store: LocalStore, far: Slow) -> Iterator[Carrier]:
    made = Carrier(store, Seal((b"k" * 32,)), "redis://h", 1 << 20, 1.0)
    yield made
    far.goes_on.set()
    made.close()


@pytest.fixture
def keys(store: LocalStore, carrier: Carrier) -> list[bytes]:
    """Chunks that only the far store has, and that the carrier knows."""
    keys = chain("prompt", 6)
    assert save(store, keys) == 6
    until(lambda: carrier.status().counts.get("put") == 6, "the chunks in the far store")
    assert store.remove(keys) == 6
    return keys


def test_a_chunk_is_there_while_the_others_are_still_on_their_way(
    carrier: Carrier, far: Slow, keys: list[bytes]
) -> None:
    first, *others = carrier.bring(keys)
    assert first.result(WAIT_S).cause == ""
    assert not any(each.done() for each in others), "control"
    far.goes_on.set()
    assert [each.result(WAIT_S).cause for each in others] == [""] * 5


def test_a_chunk_that_is_gone_is_given_up_while_the_others_are_still_on_their_way(
    carrier: Carrier, far: Slow, keys: list[bytes]
) -> None:
    far.remove(Seal((b"k" * 32,)).names(keys[0]))
    first, *others = carrier.bring(keys)
    assert first.result(WAIT_S).cause == Miss.EVICTED
    assert not any(each.done() for each in others), "control"
    far.goes_on.set()
    assert [each.result(WAIT_S).cause for each in others] == [""] * 5


def test_after_a_store_stands_still_what_has_come_stays_and_the_rest_is_late(
    carrier: Carrier, far: Slow, keys: list[bytes]
) -> None:
    first, *others = carrier.bring(keys)
    assert first.result(WAIT_S).cause == ""
    far.silent = True
    far.goes_on.set()
    assert {each.result(WAIT_S).cause for each in others} == {Miss.LATE}


def test_all_chunks_of_a_prompt_are_read_in_one_row(
    carrier: Carrier, far: Slow, keys: list[bytes]
) -> None:
    """Else the link would be idle between the rows."""
    far.goes_on.set()
    before = far.calls
    assert [each.result(WAIT_S).cause for each in carrier.bring(keys)] == [""] * 6
    assert far.calls == before + 1
