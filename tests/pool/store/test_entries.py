# SPDX-License-Identifier: Apache-2.0
"""Entries of chunks that a rotten byte, or somebody, has altered: they cost their chunk, and nothing else."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chunks import begin, chain, loads, save, there
from support.waits import until
from whole import problems, problems_now

from pd_connector.pool.store import reconcile as stocktaking
from pd_connector.pool.store.base import Refusal, Why
from pd_connector.pool.store.catalog_ops import DISK_TIER, write_leaving
from pd_connector.pool.store.eviction import make_room
from pd_connector.pool.store.folder import Folder
from pd_connector.pool.store.local import LocalStore

pytestmark = pytest.mark.quiet  # it waits for the threads of stores

Open = Callable[..., LocalStore]


@pytest.mark.parametrize("entry", ["", "1|nonsense", "of other sizes"])
def test_a_chunk_whose_entry_was_altered_is_found_again(
    open_store: Open, folder: Path, entry: str
) -> None:
    """The catalog says what the entry was. Until stock is taken, the chunk's files keep their room."""
    store, (key,) = open_store(), chain("a", 1)
    store.maintenance.stop()  # it could hold the catalog while this test looks into them
    assert save(store, [key]) == 1
    path = folder / "pool" / "v1" / "index" / key.hex()
    other = str(path.readlink()).replace(":", ":1") if entry == "of other sizes" else entry
    path.unlink()
    if other:
        path.symlink_to(other)
    assert problems_now(store), "nothing was altered"
    stocktaking.reconcile(store._tier_storage)
    assert problems_now(store) == []
    assert loads(store, key)


def test_a_chunk_of_the_disk_whose_entry_was_altered_is_found_once_it_would_be_saved_again(
    open_store: Open, tmp_path: Path
) -> None:
    """Otherwise each save of it would be refused, because it exists, and no look-up would find it."""
    store, (key,) = open_store(disk=64 << 20), chain("a", 1)
    store.maintenance.stop()
    assert save(store, [key]) == 1
    assert store.maintenance.copy(key, DISK_TIER)
    memory, _ = store._folders
    store._tier_storage.forget(memory, key, memory.text(key))
    path = tmp_path / "disk" / "v1" / "index" / key.hex()
    path.unlink()
    path.symlink_to("1|nonsense")
    assert there(store, [key]) == 0
    refused = begin(store, key)
    assert isinstance(refused, Refusal)
    assert refused.why is Why.EXISTS
    assert loads(store, key)


@pytest.mark.parametrize("rotten", ["|a|", ":"], ids=["tenant", "colon"])
@pytest.mark.parametrize("lost", ["", "its row", "the catalog"])
@pytest.mark.usefixtures("impatient")
def test_an_entry_that_is_not_utf_8_costs_its_chunk_and_no_books(
    open_store: Open, folder: Path, rotten: str, lost: str
) -> None:
    store, (key,) = open_store(), chain("a", 1)
    assert save(store, [key], tenant="a") == 1
    root = folder / "pool" / "v1"
    path = root / "index" / key.hex()
    text = bytearray(os.fsencode(path.readlink()))
    text[text.index(rotten.encode()) + len(rotten) // 2] |= 0x80
    path.unlink()
    path.symlink_to(os.fsdecode(bytes(text)))
    if lost == "its row":
        with store._catalog.transaction(wait_s=10) as catalog:
            catalog.execute("DELETE FROM chunks")
    elif lost:
        (root / "books").unlink()
    before = store._catalog.name
    other = open_store()
    stocktaking.reconcile(other._tier_storage)
    assert problems(other) == []
    assert save(store, chain("b", 1), patience_s=30) == 1
    assert (store._catalog.name == before) is (lost != "the catalog")
    save(store, [key], tenant="a", patience_s=30)
    assert loads(store, key)


@pytest.mark.parametrize("nbytes", ["0", "-1", "1" + 400 * "0", "10001"])
def test_an_entry_that_lies_about_its_bytes_is_not_counted_with(
    open_store: Open, folder: Path, nbytes: str
) -> None:
    """Engines divide by the bytes of what they load, and multiply them by a time."""
    store, (key,) = open_store(), chain("a", 1)
    store.maintenance.stop()  # it could take stock meanwhile
    assert save(store, [key]) == 1
    path = folder / "pool" / "v1" / "index" / key.hex()
    other = str(path.readlink()).replace("|10000|", f"|{nbytes}|")
    path.unlink()
    path.symlink_to(other)
    if nbytes != "10001":
        assert there(store, [key]) == 0
    assert store.pin([key], for_s=1) == 0
    save(store, [key], patience_s=30)
    assert loads(store, key)


def test_an_engine_starts_although_an_entry_cannot_be_made(open_store: Open, folder: Path) -> None:
    """Its memory is full, or a folder has its name."""
    store, (key, *others) = open_store(), chain("a", 3)
    assert save(store, [key, *others]) == 3
    index = folder / "pool" / "v1" / "index"
    for one in (key, others[0]):
        (index / one.hex()).unlink()
    (index / key.hex()).mkdir()
    store.maintenance.stop()
    with store._catalog.transaction(wait_s=10) as catalog:
        catalog.execute("DELETE FROM counters WHERE name LIKE 'stock_taken%'")
    store._catalog.damaged = "a test wants it"
    other = open_store()
    stocktaking.reconcile(other._tier_storage)
    assert loads(other, others[0])
    staged = folder / "pool" / "v1" / "staged"
    until(lambda: not list(staged.iterdir()), "the other store's thread takes stock as well")


def test_an_evicted_chunk_whose_row_says_nonsense_leaves_nothing(open_store: Open) -> None:
    store = open_store()
    assert save(store, chain("a", 1)) == 1
    with store._catalog.transaction(wait_s=10) as catalog:
        catalog.execute("UPDATE chunks SET entry = 'nonsense'")
        evicted = make_room(catalog, 0, 10_000, "", full=True)
        write_leaving(catalog, evicted, store._tier_storage.alive.name)
    store._tier_storage.erase(evicted)
    stocktaking.reconcile(store._tier_storage)
    assert problems(store) == []


def test_a_chunk_whose_row_was_altered_is_kept_as_its_entry_says(open_store: Open) -> None:
    """What the folders say holds. Its files were removed as those of the altered row, and its entry stayed."""
    store, (key,) = open_store(), chain("a", 1)
    store.maintenance.stop()
    assert save(store, [key]) == 1
    with store._catalog.transaction(wait_s=10) as catalog:
        catalog.execute("UPDATE chunks SET entry = replace(entry, ':', ':1')")
    stocktaking.reconcile(store._tier_storage)
    assert problems_now(store) == []
    assert loads(store, key)


def test_an_entry_that_is_made_while_its_chunk_is_removed_does_not_stay(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another process makes it that takes stock: it still finds all files."""
    store, (key,) = open_store(), chain("a", 1)
    store.maintenance.stop()
    assert save(store, [key]) == 1
    folder, discard = store._tier_storage.folders[0], Folder.discard
    entry = folder.entry(key)
    assert entry

    def enters(*arguments: Any) -> None:
        folder.enter(key, entry, store._tier_storage.stamp())
        discard(*arguments)

    monkeypatch.setattr(Folder, "discard", enters)
    store.remove([key])
    assert there(store, [key]) == 0
    assert problems_now(store) == []
