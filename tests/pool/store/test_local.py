# SPDX-License-Identifier: Apache-2.0
"""What a store of this host promises to engines that save and load."""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chunks import begin, chain, content, loads, save, there
from support.waits import until

from pd_connector.errors import Miss, PoolError
from pd_connector.pool.store import tier_storage
from pd_connector.pool.store.base import Found, Journal, Refusal, Store, Why
from pd_connector.pool.store.catalog import CatalogError
from pd_connector.pool.store.folder import Folder, charge_of
from pd_connector.pool.store.local import LocalStore

pytestmark = pytest.mark.usefixtures("patient")
NBYTES = 10_000
CHARGE = charge_of(NBYTES)
Open = Callable[..., LocalStore]


def refused(answer: object) -> Why:
    assert isinstance(answer, Refusal), answer
    return answer.why


def has_caught_up(store: LocalStore) -> bool:
    """Whether chunks of the memory are on the disk, too; not known while the keeper holds the books."""
    with contextlib.suppress(CatalogError):
        return not store.maintenance.is_behind()
    return False


def test_what_one_process_saved_another_loads(open_store: Open) -> None:
    writer, reader = open_store(), open_store()
    keys = chain("a", 5)
    assert save(writer, keys) == 5
    assert reader.find(keys) == [Found("memory", ("r0",), NBYTES)] * 5
    assert all(loads(reader, key) for key in keys)


def test_after_the_first_missing_chunk_none_is_found(open_store: Open) -> None:
    store = open_store()
    keys = chain("a", 5)
    save(store, keys)
    store.remove([keys[2]])
    assert [found is not None for found in store.find(keys)] == [True, True, False, False, False]


def test_a_part_that_is_not_published_is_not_found(open_store: Open) -> None:
    store = open_store()
    (key,) = chain("a", 1)
    with begin(store, key) as writing:  # type: ignore[union-attr]
        writing.write(0, memoryview(b"x" * NBYTES))
        assert there(store, [key]) == 0
    assert there(store, [key]) == 0
    assert until(lambda: store.status().writing == 0), "with the keeper's turn at the latest"
    assert store.status().tiers[0].nbytes == 0


def test_a_chunk_counts_when_all_its_parts_are_there(open_store: Open) -> None:
    store = open_store()
    (key,) = chain("a", 1)
    for part in ("tp1", "tp0"):
        assert there(store, [key]) == 0
        assert save(store, [key], part=part, parts=2, writer="engine") == 1
    assert store.find([key]) == [Found("memory", ("tp0", "tp1"), 2 * NBYTES)]
    assert loads(store, key, "tp0")
    assert loads(store, key, "tp1")


def test_parts_of_two_engines_never_make_a_chunk(open_store: Open) -> None:
    store = open_store()
    (key,) = chain("a", 1)
    save(store, [key], part="tp0", parts=2, writer="one")
    other = begin(store, key, part="tp1", parts=2, writer="two")
    assert refused(other) is Why.BEING_WRITTEN
    assert refused(begin(store, key, part="tp1", parts=4, writer="one")) is Why.BEING_WRITTEN


def test_one_engine_saves_a_chunk_and_others_are_told_so(open_store: Open) -> None:
    one, other = open_store(), open_store()
    (key,) = chain("a", 1)
    with begin(one, key) as writing:  # type: ignore[union-attr]
        assert refused(begin(other, key)) is Why.BEING_WRITTEN
        assert writing.publish()
    assert refused(begin(other, key)) is Why.EXISTS


def test_the_budget_holds_for_all_processes_together(open_store: Open, folder: Path) -> None:
    stores = [open_store(20 * CHARGE) for _ in range(3)]
    for number in range(60):
        assert save(stores[number % 3], chain(f"{number}", 1)) == 1
    assert stores[0].status().tiers[0].nbytes == 20 * CHARGE
    files = list((folder / "pool" / "v1" / "data").iterdir())
    assert sum(file.stat().st_blocks * 512 for file in files) <= 20 * CHARGE


def test_the_chunk_that_was_used_longest_ago_is_evicted_first(open_store: Open) -> None:
    store = open_store(4 * CHARGE)
    keys = [chain(name, 1) for name in "abcde"]
    for key in keys[:4]:
        save(store, key)
    store.find(keys[0])
    save(store, keys[4])
    assert [there(store, key) for key in keys] == [1, 0, 1, 1, 1]


def test_a_use_counts_although_another_thread_writes_others_down_meanwhile(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a store's own does every quarter of a second."""
    store, real, writes = open_store(3 * CHARGE), tier_storage.touch, threading.Event()
    store.maintenance.stop()
    used, unused, other = (chain(name, 1) for name in ("used", "unused", "other"))
    for keys in (used, unused, other):
        save(store, keys)

    def touch(*arguments: Any) -> None:
        writes.set()
        time.sleep(0.1)  # the save below finds it at work
        real(*arguments)

    there(store, other)
    monkeypatch.setattr(tier_storage, "touch", touch)
    writer = threading.Thread(target=store._tier_storage.flush)
    writer.start()
    assert writes.wait(30)
    there(store, used)
    save(store, chain("new", 1))
    writer.join()
    assert [there(store, keys) for keys in (used, unused, other)] == [1, 0, 1]


def test_the_deepest_chunk_of_a_chain_is_evicted_first(open_store: Open) -> None:
    store = open_store(6 * CHARGE)
    old = chain("old", 6)
    save(store, old)
    save(store, chain("new", 2))
    assert [store.find([key])[0] is not None for key in old] == [True] * 4 + [False] * 2


def test_a_parent_is_used_whenever_its_child_is(open_store: Open) -> None:
    """A child outlives no parent: without the parent nobody would find it."""
    store = open_store(5 * CHARGE)
    first, second = chain("a", 3), chain("b", 2)
    save(store, first[:1])
    save(store, second)
    save(store, first[1:], parent=first[0])  # the parent itself was saved longest ago
    save(store, chain("c", 2))
    assert (there(store, first), there(store, second)) == (3, 0)


def test_a_clock_that_jumps_changes_no_order(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(3 * CHARGE)
    real = time.time
    for name, years in (("a", 1), ("b", -1), ("c", 0), ("d", 0)):
        monkeypatch.setattr(time, "time", lambda years=years: real() + years * 365 * 86400)
        save(store, chain(name, 1))
    assert [there(store, chain(name, 1)) for name in "abcd"] == [0, 1, 1, 1]


def test_a_pinned_chunk_stays_until_the_pin_ends(open_store: Open) -> None:
    store = open_store(3 * CHARGE)
    pinned = chain("pinned", 2)
    save(store, pinned)
    assert store.pin(pinned, for_s=60) == 2
    save(store, chain("others", 3))
    assert there(store, pinned) == 2
    store.unpin(pinned)
    save(store, chain("more", 3))
    assert there(store, pinned) == 0


def test_when_all_is_pinned_a_save_is_refused(open_store: Open) -> None:
    store = open_store(2 * CHARGE)
    keys = chain("a", 2)
    save(store, keys)
    store.pin(keys, for_s=60)
    assert refused(begin(store, *chain("b", 1))) is Why.FULL


def test_a_pin_ends_by_itself(open_store: Open) -> None:
    store = open_store(2 * CHARGE)
    keys = chain("a", 2)
    save(store, keys)
    store.pin(keys, for_s=0.05)
    time.sleep(0.06)
    assert save(store, chain("b", 2)) == 2


def test_pins_without_a_name_end_with_their_store(open_store: Open) -> None:
    one, other = open_store(2 * CHARGE), open_store(2 * CHARGE)
    keys = chain("a", 2)
    save(one, keys)
    one.pin(keys, for_s=3600)
    one.close()
    assert save(other, chain("b", 2)) == 2


def test_pins_with_a_name_hold_half_of_the_memory_at_most(open_store: Open) -> None:
    store = open_store(10 * CHARGE)
    chains = [chain(f"{number}", 2) for number in range(5)]
    for keys in chains:
        save(store, keys)
        store.pin(keys, for_s=3600, holder="tenant")
    save(store, chain("new", 10))
    assert sum(there(store, keys) for keys in chains) == 4


def test_a_part_larger_than_the_tier_is_refused(open_store: Open) -> None:
    store = open_store(CHARGE)
    assert refused(begin(store, *chain("a", 1), nbytes=2 * CHARGE)) is Why.FULL


@pytest.mark.parametrize(
    "harm",
    [
        lambda file: file.unlink(),
        lambda file: os.truncate(file, 10),
        lambda file: os.truncate(file, NBYTES + 1),
        lambda file: file.chmod(0o644),
        lambda file: (file.unlink(), file.symlink_to("/etc/passwd")),
        lambda file: (file.unlink(), os.mkfifo(file)),
    ],
    ids=["deleted", "cut", "longer", "open to others", "a link", "a pipe"],
)
def test_a_chunk_with_a_bad_file_is_a_miss_and_is_removed(
    open_store: Open, folder: Path, harm: Callable[[Path], object]
) -> None:
    store = open_store()
    first, second = keys = chain("a", 2)
    save(store, keys)
    (file,) = (folder / "pool" / "v1" / "data").glob(f"{second.hex()}.*")
    harm(file)
    with pytest.raises(PoolError) as caught:
        store.read(second, "r0")
    assert caught.value.cause is Miss.DAMAGED
    assert there(store, keys) == 1
    assert loads(store, first)
    assert save(store, [second], parent=first) == 1


def test_a_pin_counts_only_chunks_with_whole_files(open_store: Open, folder: Path) -> None:
    store = open_store()
    keys = chain("a", 3)
    save(store, keys)
    (file,) = (folder / "pool" / "v1" / "data").glob(f"{keys[1].hex()}.*")
    os.truncate(file, 10)
    assert there(store, keys) == 3
    assert store.pin(keys, for_s=1) == 1
    assert there(store, keys) == 1


def test_an_open_part_can_be_read_after_its_chunk_was_evicted(open_store: Open) -> None:
    store = open_store(2 * CHARGE)
    (key,) = chain("a", 1)
    save(store, [key])
    with store.read(key, "r0") as reading:
        save(store, chain("b", 2))
        assert there(store, [key]) == 0
        assert reading.take(0, NBYTES) == content(key, "r0", NBYTES)


def test_a_file_cut_while_it_is_read_is_damage_and_no_crash(open_store: Open, folder: Path) -> None:
    store = open_store()
    (key,) = chain("a", 1)
    save(store, [key])
    with store.read(key, "r0") as reading:
        (file,) = (folder / "pool" / "v1" / "data").iterdir()
        os.truncate(file, 10)
        with pytest.raises(PoolError) as caught:
            reading.take(0, NBYTES)
    assert caught.value.cause is Miss.DAMAGED


def test_missing_and_evicted_chunks_are_told_apart(open_store: Open) -> None:
    store = open_store()
    stored, never = chain("a", 1), chain("b", 1)
    save(store, stored)
    store.remove(stored)
    # Later, if the keeper's own turn holds the catalog: neither a removal nor this question waits for them.
    assert until(lambda: store.was_stored(stored[0]))
    assert not store.was_stored(never[0])
    with pytest.raises(PoolError) as caught:
        store.read(stored[0], "r0")
    assert caught.value.cause is Miss.EVICTED


def replayed(
    store: Store, after: int = 0, known: dict[bytes, str] | None = None
) -> tuple[dict[bytes, str], int]:
    """What a reader of the journal knows."""
    known = {} if known is None else known
    page = Journal([], after, False, True)
    while page.more:
        page = store.journal(page.next)
        if page.whole:
            known.clear()
        for event in page.events:
            known.pop(event.key, None)
            if event.tier:
                known[event.key] = event.tier
    return known, page.next


def test_the_journal_tells_what_is_there_the_same_to_all(open_store: Open) -> None:
    one, other = open_store(5 * CHARGE), open_store(5 * CHARGE)
    save(one, chain("a", 3))
    known, after = replayed(other)
    assert set(known) == set(chain("a", 3))
    save(other, chain("b", 4))
    one.remove(chain("b", 1))
    assert until(lambda: one.was_stored(chain("b", 1)[0]))
    known, after = replayed(one, after, known)
    assert known == replayed(other)[0]
    there_now = {key for key in chain("a", 3) + chain("b", 4) if one.find([key])[0]}
    assert set(known) == there_now
    assert one.journal(after).events == []


def test_the_journal_is_whole_over_many_pages(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd_connector.pool.store.reports.PAGE_EVENTS", 2)
    store = open_store()
    keys = chain("a", 7)
    save(store, keys)
    known, after = replayed(store)
    assert set(known) == set(keys)
    store.remove(keys[3:])
    assert until(lambda: all(map(store.was_stored, keys[3:])))
    assert set(replayed(store, after, known)[0]) == set(keys[:3])


def test_a_journal_that_no_longer_reaches_back_begins_again(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd_connector.pool.store.reports.MOST_GONE", 2)
    store = open_store()
    save(store, chain("a", 1))
    known, after = replayed(store)
    for number in range(6):
        save(store, chain(f"{number}", 1))
        store.remove(chain(f"{number}", 1))
    store.remove(chain("a", 1))
    assert until(lambda: store.status().tiers[0].chunks == 0)
    store.maintenance.sweep()
    store.maintenance.sweep()
    save(store, chain("b", 1))
    assert store.journal(after).whole
    assert replayed(store, after, known)[0] == {chain("b", 1)[0]: "memory"}


def test_what_leaves_memory_is_on_the_disk_and_comes_back_when_it_is_used(open_store: Open) -> None:
    store = open_store(16 * CHARGE, disk=1000 * CHARGE)
    chains = [chain(f"{number}", 4) for number in range(10)]
    for keys in chains:
        for parent, key in zip([b"", *keys], keys, strict=False):
            save(store, [key], parent)
            assert until(lambda: has_caught_up(store))
    assert sum(there(store, keys) for keys in chains) == 40
    assert store.find(chains[0])[0] == Found("disk", ("r0",), NBYTES)
    assert all(loads(store, key) for keys in chains for key in keys)

    def is_used_in_memory() -> bool:
        assert loads(store, chains[0][0])
        return store.find(chains[0])[0] == Found("memory", ("r0",), NBYTES)

    assert until(is_used_in_memory)


def test_the_disk_has_a_budget_too(open_store: Open) -> None:
    store = open_store(8 * CHARGE, disk=16 * CHARGE)
    for number in range(60):
        save(store, chain(f"{number}", 1))
        assert until(lambda: has_caught_up(store))
    memory, disk = store.status().tiers
    assert memory.nbytes <= 8 * CHARGE
    assert 8 * CHARGE < disk.nbytes <= 16 * CHARGE


def test_a_smaller_budget_is_met_by_eviction(open_store: Open) -> None:
    open_store(20 * CHARGE).close()
    store = open_store(20 * CHARGE)
    save(store, chain("a", 20))
    store.close()
    store = open_store(5 * CHARGE)
    assert until(lambda: store.status().tiers[0].nbytes == 5 * CHARGE)
    # Files go after their line in the books.
    assert until(lambda: there(store, chain("a", 20)) == 5)


def test_a_chunk_entered_while_books_are_made_anew_is_kept(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The a new catalog find its file before its entry, and take it for a part that waits for others."""
    store, other = open_store(), open_store()
    (key,) = chain("a", 1)
    real = Folder.enter

    def enter(self: Folder, *entry: object) -> None:
        other.maintenance.rebuild_catalog("a test wants it")
        real(self, *entry)  # type: ignore[arg-type]

    monkeypatch.setattr(Folder, "enter", enter)
    assert save(store, [key]) == 1
    monkeypatch.setattr(Folder, "enter", real)
    # Not before: a keeper's own sweep may come between the catalog and the entry.
    monkeypatch.setattr("pd_connector.pool.store.tier_maintenance.STALE_S", 0.0)
    store.maintenance.sweep()
    assert loads(store, key)
    assert store.status().writing == 0
