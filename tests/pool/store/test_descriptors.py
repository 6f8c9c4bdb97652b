# SPDX-License-Identifier: Apache-2.0
"""Descriptors that threads share. A file is closed once, also if two threads end it at once: its number may be another file's by
then. A folder's list is whole, also while another thread lists it."""

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from chunks import begin, chain, loads, save
from support.pool_stores import patient, store
from support.waits import until

from pd_connector.errors import Miss, PoolError
from pd_connector.pool.store import parts, process_lock, tier_maintenance
from pd_connector.pool.store.base import Refusal
from pd_connector.pool.store.local import LocalStore
from pd_connector.pool.store.tier_storage import Space

__all__ = ["patient", "store"]


@pytest.mark.parametrize("what", ["read", "write"])
def test_a_file_that_another_thread_ends_at_the_same_time_is_closed_once(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    (key,) = chain("a", 1)
    opened: Any
    if what == "read":
        assert save(store, [key]) == 1
        opened = store.read(key, "r0")
        end = opened.close
    else:
        opened = begin(store, key)
        assert not isinstance(opened, Refusal)
        end = opened.cancel
    closed, close = list[int](), os.close

    def closes(descriptor: int) -> None:
        closed.append(descriptor)
        if len(closed) == 1:
            end()  # the other thread
        close(descriptor)

    monkeypatch.setattr(parts.os, "close", closes)
    end()
    monkeypatch.undo()
    assert len(closed) == len(set(closed))


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_process_without_descriptors_or_memory_keeps_the_chunk_that_it_cannot_read(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, error: int, call: str
) -> None:
    """The chunk is whole: other processes load it, and this one does later."""
    (key,) = chain("a", 1)
    assert save(store, [key]) == 1
    opens = os.open

    def fails(name: Any, *args: Any, **more: Any) -> int:
        if call == "open" and not str(name).startswith(key.hex()):
            return opens(name, *args, **more)
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patched:
        patched.setattr(parts.os, call, fails)
        with pytest.raises(PoolError) as refused:
            loads(store, key)
    assert refused.value.cause is Miss.REFUSED
    assert loads(store, key)


@pytest.mark.parametrize(("error", "alive"), [(errno.EMFILE, True), (errno.ENOENT, False)])
def test_a_process_is_not_taken_for_dead_for_lack_of_descriptors(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, error: int, alive: bool
) -> None:
    """It would lose its pins."""

    def fails(*_: Any, **__: Any) -> int:
        raise OSError(error, os.strerror(error))

    lock = store._tier_storage.alive
    with monkeypatch.context() as patched:
        patched.setattr(process_lock.os, "open", fails)
        assert lock.is_alive(lock.name) == alive


def test_threads_that_list_a_folder_at_the_same_time_find_every_name(store: LocalStore) -> None:
    """A list is read from the descriptor's position, which all threads share. A process that missed its own name did not find what
    it advertised; reconciled with half a list, the catalog would lose chunks."""
    save(store, chain("a", 3))
    storage = store._tier_storage
    memory = storage.folders[0]
    lists: tuple[Callable[[], int], ...] = (
        lambda: len(storage.alive.names()),
        lambda: len(memory.entered()),
        lambda: sum(1 for _ in memory.names(memory.index, memory.data)),
    )
    with ThreadPoolExecutor(4) as threads:
        for count in lists:
            whole = count()
            assert whole
            assert set(threads.map(lambda _, count=count: count(), range(4000))) == {whole}


def test_a_store_whose_thread_takes_long_closes_nothing_that_the_thread_still_uses(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread puts folders that were removed in their places, by number. Closed, these numbers are other files'."""
    store = LocalStore(Space(folder / "pool", 64 << 20))
    storage, maintenance = store._tier_storage, store.maintenance
    begun, goes_on = threading.Event(), threading.Event()

    def turn() -> None:
        begun.set()
        goes_on.wait()
        maintenance.restore_folders()

    monkeypatch.setattr(maintenance, "turn", turn)
    monkeypatch.setattr(tier_maintenance, "_STOPS_S", 0.01)
    assert begun.wait(60)
    store.close()
    with ExitStack() as opened:
        files = [os.memfd_create("another") for _ in range(16)]
        for file in files:
            opened.callback(os.close, file)
        before = [os.fstat(file).st_ino for file in files]
        goes_on.set()
        maintenance._thread.join(60)
        until(lambda: not storage.alive.is_held, "the end of the thread, and of the store")
        assert [os.fstat(file).st_ino for file in files] == before


@pytest.mark.parametrize("what", ["process lock", "tier locks"])
def test_a_child_that_is_forked_meanwhile_closes_no_number_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A child closes the locks of its parent, by number, at the fork. Another thread may be about to close them."""
    store = LocalStore(Space(folder / "pool", 64 << 20), Space(tmp_path / "disk", 64 << 20))
    store.maintenance.stop()
    alive, tiers = store._tier_storage.alive, store._tier_storage._tier_locks
    closed_again, close = list[int](), os.close

    def closes(descriptor: int) -> None:
        close(descriptor)
        if descriptor in (alive._lock, *tiers._locks):  # what a child would close now
            closed_again.append(descriptor)

    monkeypatch.setattr(process_lock.os, "close", closes)
    if what == "tier locks":
        tiers.renew()
    store.close()
    monkeypatch.undo()
    assert not closed_again


def test_what_is_advertised_while_a_lock_is_taken_again_stays(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.maintenance.stop()
    alive = store._tier_storage.alive
    alive.advertise(b"before")
    os.unlink(alive.name, dir_fd=alive._folder)
    write, others = os.pwrite, list[threading.Thread]()

    def writes(descriptor: int, data: bytes, offset: int) -> int:
        if not others:
            others.append(threading.Thread(target=alive.advertise, args=(b"after",)))
            others[0].start()
            others[0].join(0.2)  # it waits for this thread, or was faster
        return write(descriptor, data, offset)

    monkeypatch.setattr(process_lock.os, "pwrite", writes)
    alive.renew()
    others[0].join()
    assert alive.advertised() == [b"after"]


def test_a_reader_finds_a_whole_text_while_another_one_is_written(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.maintenance.stop()
    alive = store._tier_storage.alive
    first, second = b"a" * 3000, b"b" * 3000
    alive.advertise(first)
    os.pwrite(alive._lock, second[:1000], 0)  # another process is in the middle of its write
    read = os.pread

    def reads(descriptor: int, nbytes: int, offset: int) -> bytes:
        found = read(descriptor, nbytes, offset)
        os.pwrite(alive._lock, second, 0)
        return found

    monkeypatch.setattr(process_lock.os, "pread", reads)
    assert alive.advertised() == [second]
