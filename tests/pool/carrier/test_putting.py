# SPDX-License-Identifier: Apache-2.0
"""What a carrier puts into a far store that does not take everything, or loses what it had."""

import math
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from chunks import chain, save
from support.far_objects import Far
from support.pool_stores import patient, store
from support.waits import until

from pd_connector.errors import Miss, PoolError
from pd_connector.pool.carrier import carrier as carrier_module
from pd_connector.pool.carrier import far_journal, markers, putting
from pd_connector.pool.carrier.carrier import Carrier
from pd_connector.pool.carrier.child import MOST_NAMES
from pd_connector.pool.carrier.object import Packed
from pd_connector.pool.far.seal import Seal
from pd_connector.pool.store.local import LocalStore

__all__ = ["patient", "store"]

MOST_BYTES = 50_000


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Far:
    made = Far()
    monkeypatch.setattr(carrier_module, "FarClient", lambda *args: made)
    monkeypatch.setattr(putting, "_FOLLOWS_S", 0.01)
    monkeypatch.setattr(putting, "_OFFERED_AGAIN_S", (0.01, 0.02))
    monkeypatch.setattr(markers, "_LOOKS_S", 0.01)
    monkeypatch.setattr(putting, "_PUT_BYTES", 15_000)  # two chunks
    return made


@pytest.fixture
def carrier(store: LocalStore, far: Far) -> Iterator[Carrier]:
    made = Carrier(store, Seal((b"k" * 32,)), "redis://h", MOST_BYTES, 1.0)
    yield made
    made.close()


def done(carrier: Carrier, count: str, number: int) -> None:
    """Until this was counted `number` times, and nothing waits to be put."""
    until(lambda: carrier.status().counts.get(count, 0) >= number, count)
    until(lambda: not carrier.status().waiting, "no chunk waits")


def test_a_chunk_that_is_too_large_does_not_hold_up_its_children(
    store: LocalStore, carrier: Carrier
) -> None:
    keys = chain("prompt", 6)
    assert save(store, keys[:2]) == 2
    assert save(store, keys[2:3], keys[1], nbytes=2 * MOST_BYTES) == 1
    assert save(store, keys[3:], keys[2]) == 3
    done(carrier, "put", 5)
    assert carrier.status().counts["too_large"] == 1


def test_a_chunk_that_is_too_large_is_offered_again_only_when_it_has_changed(
    store: LocalStore, carrier: Carrier, far: Far
) -> None:
    (key,) = chain("prompt", 1)
    assert save(store, [key], nbytes=2 * MOST_BYTES) == 1
    until(lambda: carrier.status().counts.get("too_large"))
    (name,) = Seal((b"k" * 32,)).names(key)
    far.asked.clear()
    for number in range(2, 5):  # the whole journal is read again
        far.opened += 1
        assert save(store, chain(f"other {number}", 1)) == 1
        done(carrier, "put", number - 1)
        until(lambda: carrier._putting._opened >= 3 * far.opened)
    assert carrier.status().counts["too_large"] == 1
    assert name not in far.asked
    store.remove([key])
    assert save(store, [key]) == 1  # in a codec with fewer bytes
    until(lambda: far.objects.get(name))
    assert carrier.status().counts["too_large"] == 1


def test_a_chunk_that_cannot_be_read_is_counted_once_and_put_when_it_can(
    store: LocalStore, carrier: Carrier, far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    (key,) = chain("prompt", 1)
    read, tries, broken = LocalStore.read, [0], [True]

    def reads(self: LocalStore, wanted: bytes, part: str) -> Any:
        if wanted == key and broken[0]:
            tries[0] += 1
            raise PoolError(Miss.EVICTED, "its file is gone")
        return read(self, wanted, part)

    monkeypatch.setattr(LocalStore, "read", reads)
    assert save(store, [key]) == 1
    for number in range(1, 4):
        until(lambda: tries[0] >= number)  # noqa: B023
        far.opened += 1
    assert carrier.status().counts["gone"] == 1
    broken[0] = False
    far.opened += 1
    done(carrier, "put", 1)


def test_chunks_that_are_refused_are_tried_once(
    store: LocalStore, carrier: Carrier, far: Far
) -> None:
    far.refuses = lambda name: True
    keys = chain("prompt", 8)
    assert save(store, keys) == 8
    done(carrier, "not_put", 8)
    assert carrier.status().counts["not_put"] <= 16
    far.refuses = lambda name: False
    assert save(store, chain("other", 3)) == 3
    done(carrier, "put", 3)


def test_after_the_far_store_was_opened_again_all_that_it_lost_is_put_again(
    store: LocalStore, carrier: Carrier, far: Far
) -> None:
    keys = chain("prompt", 4)
    assert save(store, keys[:3]) == 3
    done(carrier, "put", 3)
    far.objects.clear()  # it restarts
    far.opened += 1
    until(lambda: far.chunks == 3, "the chunks again, though nothing new is saved")
    assert save(store, keys[3:], keys[2]) == 1
    until(lambda: far.chunks == 4)


def test_a_store_that_was_emptied_unseen_is_noticed_by_its_markers(
    store: LocalStore, carrier: Carrier, far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients connect again by themselves: no child was started."""
    monkeypatch.setattr(putting, "_PAUSE_S", 0.05)
    assert save(store, chain("prompt", 4)) == 4
    done(carrier, "put", 4)
    until(lambda: len(far.objects) > far.chunks, "markers")
    for _ in range(3):
        far.objects.clear()
        until(lambda: far.chunks == 4, "the chunks again")
        until(lambda: len(far.objects) > far.chunks, "markers")
    until(lambda: carrier.status().counts["put"] == 16, "what was there is not put again")


@pytest.mark.parametrize("overwrites", [True, False])
def test_a_store_whose_mark_cannot_be_read_is_not_taken_for_another_one(
    store: LocalStore,
    carrier: Carrier,
    far: Far,
    monkeypatch: pytest.MonkeyPatch,
    overwrites: bool,
) -> None:
    monkeypatch.setattr(putting, "_MARKS_S", 0.01)
    far.overwrites = overwrites
    until(lambda: carrier.journal.far, "the mark")
    mark = carrier.journal.far
    far.gives = False
    looked = far.looked
    until(lambda: far.looked > looked + 10, "looks for the mark")
    assert carrier.journal.far == mark
    far.gives = True
    looked = far.looked
    until(lambda: far.looked > looked + 5, "further looks")
    assert carrier.journal.far == mark
    assert "begun_again" not in carrier.status().counts


def test_a_stranger_who_damages_the_mark_again_and_again_makes_little_work(
    store: LocalStore, carrier: Carrier, far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(putting, "_MARKS_S", 0.01)
    far.overwrites = False
    (name,) = Seal((b"k" * 32,)).names(far_journal._MARK)
    until(lambda: carrier.journal.far, "the mark")
    for _ in range(5):
        mark = carrier.journal.far
        far.objects[name] = bytes(len(far.objects[name]))
        until(lambda: carrier.journal.far not in ("", mark), "another mark")  # noqa: B023
    until(lambda: carrier.status().counts.get("begun_again"), "control: it was noticed")
    assert carrier.status().counts["begun_again"] == 1


def test_a_chunk_that_is_listed_and_cannot_be_read_is_not_sound(
    store: LocalStore, carrier: Carrier, far: Far
) -> None:
    (key,) = chain("prompt", 1)
    assert save(store, [key]) == 1
    done(carrier, "put", 1)
    assert "listed" not in carrier.check(key, removes=False).problem, "control"
    far.gives = False
    checked = carrier.check(key, removes=False)
    assert (checked.nbytes > 0, checked.problem) == (True, "listed, but cannot be read")
    assert far.chunks == 1
    assert carrier.check(key, removes=True).problem
    assert carrier.check(key, removes=False).nbytes == 0


def test_a_marker_that_is_taken_and_not_kept_is_not_lost(far: Far) -> None:
    """Mooncake does so for 30 s after a client has died in mid-put."""
    client: Any = far
    far.objects = Unkept()
    looks = markers.Markers(Seal((b"k" * 32,)), "host", client)
    assert not any(looks.are_lost(float(now_s)) for now_s in range(4))


class Unkept(dict[str, bytes]):
    def __setitem__(self, name: str, data: bytes) -> None: ...


def test_chunks_that_were_not_taken_are_offered_again_though_nothing_new_is_saved(
    store: LocalStore, carrier: Carrier, far: Far
) -> None:
    """Mooncake refuses while it evicts, and for 30 s after another host's client has died in mid-put."""
    offers: Counter[str] = Counter()

    def refuses(name: str) -> bool:
        offers[name] += 1
        return offers[name] <= 2

    far.refuses = refuses
    keys = chain("prompt", 3)
    assert save(store, keys) == 3
    done(carrier, "put", 3)
    assert "not_put" not in carrier.status().counts
    assert {key for key, there in carrier.journal.page(0).events if there} == set(keys)
    assert not carrier._putting._offered_again


def test_a_refused_chunk_that_leaves_its_host_is_given_up(
    store: LocalStore, carrier: Carrier, far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(putting, "_OFFERED_AGAIN_S", (3600.0,))
    far.refuses = lambda name: True
    keys = chain("prompt", 2)
    assert save(store, keys) == 2
    until(lambda: len(carrier._putting._offered_again) == 2, "both are refused")
    store.remove(keys)
    done(carrier, "not_put", 2)
    assert not carrier._putting._offered_again


def test_a_look_up_that_began_before_a_put_does_not_hide_it(
    store: LocalStore, carrier: Carrier, far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    (key,) = chain("prompt", 1)
    has = far.has

    def slow(names: Sequence[str]) -> list[int]:
        answer = has(names)
        if threading.current_thread() is threading.main_thread():
            assert save(store, [key]) == 1
            done(carrier, "put", 1)
        return answer

    monkeypatch.setattr(far, "has", slow)
    assert not carrier.find([key]).sizes
    assert carrier.journal.page(0).events == [(key, True)]


def test_ends_of_a_chain_that_the_far_store_has_lost_are_put_again(
    store: LocalStore, carrier: Carrier, far: Far
) -> None:
    """A look-up asks for some of a chain's chunks only. What comes behind the first missing one is saved again."""
    keys = chain("prompt", 10)
    assert save(store, keys) == 10
    done(carrier, "put", 10)
    names = [Seal((b"k" * 32,)).names(key)[0] for key in keys]
    store.remove(keys)
    far.remove(names[5:])
    far.asked.clear()
    assert len(carrier.find(keys).sizes) == 5
    assert not far.asked.issuperset(names), "control: some were not asked for"
    assert save(store, keys[5:], keys[4]) == 5
    until(lambda: far.chunks == 10, "the whole chain again")


def test_a_long_chain_of_small_chunks_is_put_in_calls_that_a_client_takes(
    store: LocalStore, carrier: Carrier, far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(putting, "_PUT_BYTES", 32 << 20)
    far.is_ready = False
    keys = chain("prompt", 2 * MOST_NAMES)
    assert save(store, keys, nbytes=2000) == len(keys)
    carrier._putting._waiting[keys[-1]] = 0  # with all its parents
    far.is_ready = True
    done(carrier, "put", len(keys))
    assert far.most_names == MOST_NAMES


def test_a_chunk_that_is_damaged_here_leaves_nothing_in_the_far_store(
    store: LocalStore, carrier: Carrier, far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    def into(self: Packed, buffer: memoryview, offset: int) -> None:
        raise PoolError(Miss.DAMAGED, "a part is damaged")

    monkeypatch.setattr(Packed, "into", into)
    keys = chain("prompt", 2)
    assert save(store, keys) == 2
    done(carrier, "put_damaged", 2)
    assert not any(far.has([name for key in keys for name in Seal((b"k" * 32,)).names(key)]))


def test_the_loss_of_one_node_among_many_is_noticed(far: Far) -> None:
    """Each of 16 nodes has a sixteenth of the objects."""
    client: Any = far
    noticed = 0
    for node in range(16):
        far.objects.clear()
        looks = markers.Markers(Seal((b"k" * 32,)), "host", client)
        assert not looks.are_lost(0.0)
        lost = [name for name in far.objects if int(name[:1], 16) == node]
        far.remove(lost)
        noticed += looks.are_lost(1.0)
    assert noticed >= 14


def test_a_chunk_that_cannot_be_looked_for_holds_up_no_other(
    store: LocalStore, carrier: Carrier, far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks, broken = LocalStore.chunks, b"b" * 32

    def found(self: LocalStore, keys: Any = None) -> Any:
        if keys == [broken]:
            raise RuntimeError("a chunk that raises")
        return chunks(self, keys)

    monkeypatch.setattr(LocalStore, "chunks", found)
    carrier._putting._unmade[broken] = math.inf
    assert save(store, chain("prompt", 2)) == 2
    done(carrier, "put", 2)
    assert carrier.status().counts["errors"] == 0
    carrier._putting._unmade[broken] = 0.0
    until(lambda: not carrier._putting._unmade, "it is given up")


def test_a_store_that_refuses_markers_is_not_taken_for_one_that_lost_them(
    store: LocalStore, carrier: Carrier, far: Far
) -> None:
    far.refuses = lambda name: True
    assert save(store, chain("prompt", 2)) == 2
    done(carrier, "not_put", 2)
    looked = far.looked
    until(lambda: far.looked > looked + 5, "looks for markers")
    assert "begun_again" not in carrier.status().counts


def test_a_chunk_that_is_in_the_journal_before_it_can_be_found_is_put(
    store: LocalStore, carrier: Carrier, far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer writes it down first. It may be stopped before it makes the entry."""
    chunks, hidden = LocalStore.chunks, set(chain("prompt", 3))

    def found(self: LocalStore, keys: Any = None) -> Any:
        return iter(each for each in chunks(self, keys) if each.key not in hidden)

    monkeypatch.setattr(LocalStore, "chunks", found)
    assert save(store, chain("prompt", 3)) == 3
    assert save(store, chain("other", 1)) == 1
    until(lambda: far.chunks == 1)
    until(lambda: not carrier._putting._waiting, "the others were looked for")
    hidden.clear()
    until(lambda: far.chunks == 4)
    until(lambda: not carrier._putting._unmade)
