# SPDX-License-Identifier: Apache-2.0
"""Catalogs that are held, damaged or gone, file systems without room, folders removed by hand: saves may fail, look-ups do not."""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from chunks import begin, chain, loads, save, there
from support.waits import until
from whole import problems, problems_now, sweep

from pd_connector.errors import ConfigError, PoolError
from pd_connector.pool.store import reconcile as reconciling
from pd_connector.pool.store import tier_lock as claims
from pd_connector.pool.store import tier_maintenance as maintenance
from pd_connector.pool.store.base import Refusal, Why
from pd_connector.pool.store.catalog import CatalogError
from pd_connector.pool.store.folder import Folder, charge_of
from pd_connector.pool.store.local import LocalStore
from pd_connector.pool.store.tier_storage import Space, TierStorage

pytestmark = pytest.mark.quiet  # it waits for other processes, which must have their processor

CHARGE = charge_of(10_000)
Open = Callable[..., LocalStore]
HOLDER = """
import os, signal, sys
from pathlib import Path
from pd_connector.pool.store.tier_storage import Space
from pd_connector.pool.store.local import LocalStore
store = LocalStore(Space(Path(sys.argv[1]), 1 << 26))
with store._catalog.transaction(reading=sys.argv[2] == "reads", wait_s=10):
    store._catalog._connection.execute("SELECT * FROM chunks").fetchall()
    print("holds", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.fixture(params=["writes", "reads"])
def holder(
    request: pytest.FixtureRequest, folder: Path
) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts a process that is stopped within a transaction."""
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        arguments = [sys.executable, "-c", HOLDER, str(folder / "pool"), request.param]
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        assert until(lambda: "T (stopped)" in Path(f"/proc/{process.pid}/status").read_text())
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_what_is_held_is_told_although_the_books_are_held_for_a_moment(
    open_store: Open, holder: Callable[[], subprocess.Popen[str]]
) -> None:
    store = open_store()
    threading.Timer(0.3, holder().kill).start()
    assert not store.status().problem


def test_a_process_stopped_within_a_transaction_costs_saves_only(
    open_store: Open, holder: Callable[[], subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd_connector.pool.store.catalog.PATIENCE_S", 3600.0)
    store = open_store()
    keys = chain("a", 3)
    save(store, keys)
    process = holder()
    refused = begin(store, *chain("b", 1))
    assert isinstance(refused, Refusal)
    assert refused.why is Why.UNWELL
    assert there(store, keys) == 3
    assert store.pin(keys, for_s=1) == 3
    assert all(loads(store, key) for key in keys)
    assert store.status().tiers[0].chunks == 3
    process.send_signal(signal.SIGCONT)
    process.wait(30)
    assert save(store, chain("b", 1)) == 1


def test_what_a_store_cannot_write_down_as_it_closes_others_remove(open_store: Open) -> None:
    """Else room that it had taken would stay taken, and chunks that it had pinned stay pinned, until the host restarts."""
    one, other = open_store(2 * CHARGE), open_store(2 * CHARGE)
    save(one, chain("a", 1))
    one.pin(chain("a", 1), for_s=3600)
    writing = begin(one, *chain("b", 1))
    assert not isinstance(writing, Refusal)
    with other._catalog.transaction(wait_s=10):
        writing.cancel()
        one.close()
    until(lambda: other.status().writing == other.status().pinned == 0, "nobody's any more")
    assert save(other, chain("b", 2)) == 2
    assert problems(other) == []


def test_look_ups_while_the_books_are_held_count_as_uses(open_store: Open) -> None:
    store, other = open_store(2 * CHARGE), open_store(2 * CHARGE)
    for each in (store, other):
        each.maintenance.stop()
    for name in ("used", "unused"):
        save(store, chain(name, 1))
    with other._catalog.transaction(wait_s=10):
        assert there(store, chain("used", 1)) == 1
        assert isinstance(begin(store, *chain("new", 1)), Refusal)
    assert save(store, chain("new", 1)) == 1
    assert [there(store, chain(name, 1)) for name in ("used", "unused", "new")] == [1, 0, 1]


def test_after_a_while_the_others_make_books_of_their_own(
    open_store: Open, holder: Callable[[], subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd_connector.pool.store.catalog.PATIENCE_S", 0.2)
    store = open_store()
    keys = chain("a", 3)
    save(store, keys)
    process = holder()
    assert save(store, chain("b", 2), patience_s=30) == 2
    assert there(store, keys) == 3
    process.send_signal(signal.SIGCONT)
    process.wait(30)
    assert there(store, keys) == 3
    assert store.status().tiers[0].chunks == 5
    sweep(store)
    assert problems(store) == []


def empty(file: Path) -> None:
    os.truncate(file, 0)


def overwrite(file: Path) -> None:
    file.write_bytes(os.urandom(file.stat().st_size))


def half(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def alter_rows(file: Path) -> None:
    """Flip bytes in the pages of tables."""
    data = bytearray(file.read_bytes())
    for place in range(5000, len(data), 501):
        data[place] ^= 0xFF
    file.write_bytes(data)


@pytest.mark.parametrize("harm", [empty, overwrite, half, alter_rows, Path.unlink])
def test_damaged_books_are_made_anew_from_the_files(
    harm: Callable[[Path], None], open_store: Open, folder: Path
) -> None:
    store = open_store(20 * CHARGE)
    keys = chain("a", 10)
    save(store, keys)
    root = folder / "pool" / "v1"
    harm(root / os.readlink(root / "books"))
    assert there(store, keys) == 10
    assert all(loads(store, key) for key in keys)
    for number in range(30):
        assert save(store, chain(f"{number}", 1), patience_s=30) == 1
    sweep(store)
    assert store.status().tiers[0].nbytes <= 20 * CHARGE
    assert len(list((root / "data").iterdir())) <= 20


def test_an_engine_starts_with_books_whose_error_cannot_be_read(
    open_store: Open, folder: Path
) -> None:
    """SQLite quotes the damaged schema in its message, which is not UTF-8 then."""
    save(open_store(), chain("a", 2))
    root = folder / "pool" / "v1"
    catalog = root / os.readlink(root / "books")
    catalog.write_bytes(
        catalog.read_bytes().replace(b"TABLE chunks", b"\xec\xec\xec\xec\xec chunks")
    )
    store = open_store()
    assert save(store, chain("b", 2), patience_s=30) == 2
    assert there(store, chain("a", 2)) == 2


def test_rows_of_damaged_books_that_make_no_sense_make_new_books(open_store: Open) -> None:
    store = open_store(2 * CHARGE)
    save(store, chain("a", 2))
    with store._catalog.transaction(wait_s=10) as catalog:
        catalog.execute("UPDATE tiers SET bytes = x'ff'")
    assert save(store, chain("b", 2), patience_s=30) == 2


@pytest.mark.parametrize(
    "rotten",
    [
        "UPDATE chunks SET entry = CAST(entry AS BLOB)",
        "UPDATE chunks SET key = hex(key)",
        "INSERT INTO leaving SELECT tier, key, CAST(entry AS BLOB), 'nobody', 0 FROM chunks",
        "INSERT INTO leaving SELECT tier, hex(key), entry, 'nobody', 0 FROM chunks",
        "DELETE FROM tiers",
        "UPDATE journal SET tier = 9",
        "UPDATE journal SET key = hex(key)",
    ],
)
def test_values_of_another_type_or_meaning_make_new_books(open_store: Open, rotten: str) -> None:
    """SQLite does not notice a flipped byte of a row."""
    store = open_store(2 * CHARGE)
    save(store, chain("a", 2))
    with store._catalog.transaction(wait_s=10) as catalog:
        catalog.execute(rotten)
    before, names = store._catalog.name, (f"b{number}" for number in itertools.count())

    def begins_anew() -> bool:
        with contextlib.suppress(CatalogError, PoolError):
            reconciling.reconcile(store._tier_storage)
            store.journal(0)
            store.maintenance.is_behind()
            store.maintenance.sweep()
        save(store, chain(next(names), 1))
        return store._catalog.name != before

    assert until(begins_anew)
    assert until(lambda: save(store, chain(next(names), 1)) == 1)
    assert problems(store) == []
    assert {len(event.key) for event in store.journal(0).events} == {32}


@pytest.mark.parametrize("what", ["a link", "a folder", "a file"])
def test_books_of_nobody_knows_what_are_not_followed(
    open_store: Open, folder: Path, what: str
) -> None:
    store = open_store()
    save(store, chain("a", 1))
    link = folder / "pool" / "v1" / "books"
    link.unlink()
    if what == "a link":
        link.symlink_to("/etc/passwd")
    elif what == "a folder":
        link.mkdir()
    else:
        link.touch()
    assert save(store, chain("b", 1), patience_s=30) == 1
    assert there(store, chain("a", 1)) == 1


def test_a_link_to_books_whose_number_is_too_large_makes_new_books(
    open_store: Open, folder: Path
) -> None:
    save(open_store(), chain("a", 1))
    link = folder / "pool" / "v1" / "books"
    number = link.readlink().name.partition("-")[2]
    link.unlink()
    link.symlink_to(f"books.9{'0' * 6}-{number}")
    store = open_store()
    assert save(store, chain("b", 1), patience_s=30) == 1
    assert there(store, chain("a", 1)) == 1
    assert problems(store) == []


def remove(path: Path) -> None:
    """As somebody does by hand. A store's own thread can make a file in a folder that is just being removed."""

    def removed() -> bool:
        with contextlib.suppress(OSError):
            shutil.rmtree(path)
            return True
        return False

    until(removed, f"{path} removed")


@pytest.mark.parametrize("removed", ["", "pool", "pool/v1/data", "pool/v1/staged"])
def test_a_pool_removed_by_hand_begins_anew(open_store: Open, folder: Path, removed: str) -> None:
    store = open_store()
    save(store, chain("a", 2))
    remove(folder / removed)
    if removed != "pool/v1/staged":
        with pytest.raises(PoolError):
            loads(store, *chain("a", 1))
    names = (f"b{number}" for number in itertools.count())

    def saved() -> bool:
        """Not while the store takes stock of its folders."""
        chunks = chain(next(names), 2)
        return save(store, chunks, patience_s=30) == there(store, chunks) == 2

    assert until(saved)
    assert until(lambda: not problems(store))
    assert until(saved)


@pytest.mark.parametrize("removed", ["a file", "the folder"])
def test_processes_whose_locks_were_removed_are_seen_again(
    open_store: Open, folder: Path, removed: str
) -> None:
    """Others would take what they write for that of dead processes, and not hear what they tell."""
    stores = one, other = open_store(), open_store()
    for store in stores:
        store.advertise(store._tier_storage.alive.name.encode())
    writers = folder / "pool" / "v1" / "writers"
    if removed == "a file":
        (writers / one._tier_storage.alive.name).unlink()
    else:
        shutil.rmtree(writers)
    names = {store._tier_storage.alive.name for store in stores}
    for store in (*stores, open_store()):
        assert until(lambda store=store: {told.decode() for told in store.advertised()} >= names)
    assert all(other._tier_storage.alive.is_alive(name) for name in names)


def test_an_engine_that_starts_after_the_memory_was_removed_shares_the_disk(
    open_store: Open, folder: Path
) -> None:
    store = open_store(disk=64 << 20)
    remove(folder)
    assert save(store, chain("a", 1), patience_s=30) == 1
    assert there(open_store(disk=64 << 20), chain("a", 1)) == 1


def test_a_forked_child_keeps_nothing_of_its_dead_parent(open_store: Open, folder: Path) -> None:
    """Such as a worker that an engine has forked and that outlives it."""
    script = (
        "import os, sys, time; sys.path[:0] = sys.argv[2:]; from pathlib import Path\n"
        "from chunks import begin, chain\n"
        "from pd_connector.pool.store.local import LocalStore, Space\n"
        "store = LocalStore(Space(Path(sys.argv[1]), 1 << 26))\n"
        "writing = begin(store, *chain('a', 1))\n"
        "pid = os.fork()\n"
        "if not pid: time.sleep(600)\n"
        "print(pid, flush=True); os._exit(0)\n"
    )
    arguments = [sys.executable, "-c", script, str(folder / "pool"), str(Path(__file__).parent)]
    store = open_store()
    parent = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.wait(30)

    def is_free() -> bool:
        """The child may not have run yet since the fork."""
        sweep(store)
        return store.status().writing == 0

    try:
        until(is_free, "the dead parent's room free")
        assert save(store, chain("a", 1)) == 1
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdout.close()


def test_a_child_of_the_process_cannot_save(open_store: Open) -> None:
    store = open_store()
    save(store, chain("a", 1))
    pid = os.fork()
    if not pid:
        answer = begin(store, *chain("b", 1))
        os._exit(0 if isinstance(answer, Refusal) and there(store, chain("a", 1)) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert save(store, chain("b", 1)) == 1


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    path = tmp_path / "small"
    path.mkdir(mode=0o700)
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "none", path], check=False
    ).returncode:
        pytest.skip("needs root, to mount a small file system")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_a_file_system_that_takes_no_file_is_named_at_the_start(
    folder: Path, small: Path, tier: str
) -> None:
    """It was used, and is read-only since."""

    def start() -> LocalStore:
        memory = Space((small if tier == "memory" else folder) / "pool", 1 << 26)
        return LocalStore(memory, Space(small / "kv", 1 << 26) if tier == "disk" else None)

    start().close()
    subprocess.run(["mount", "-o", "remount,ro", small], check=True)
    with pytest.raises(ConfigError, match=rf"{small}/.*Read-only file system.*pool\."):
        start()


def test_a_lock_of_the_books_that_cannot_be_opened_costs_saves(folder: Path) -> None:
    LocalStore(Space(folder / "pool", 1 << 26)).close()
    for name in (folder / "pool" / "v1").glob("books*"):
        name.unlink()
    (folder / "pool" / "v1" / "books.lock").mkdir()
    store = LocalStore(Space(folder / "pool", 1 << 26))
    try:
        assert isinstance(begin(store, *chain("a", 1)), Refusal)
    finally:
        store.close()


def test_a_pipe_among_the_processes_keeps_nobody_waiting(folder: Path) -> None:
    store = LocalStore(Space(folder / "pool", 1 << 26), visits=True)
    try:
        os.mkfifo(folder / "pool" / "v1" / "writers" / "1x1", 0o600)
        store.advertise(b"about")
        assert store.advertised() == [b"about"]
    finally:
        store.close()


def test_a_full_memory_takes_new_chunks_in_the_place_of_old_ones(small: Path) -> None:
    """Others use the same tmpfs, so it can be full long before the budget is."""
    store = LocalStore(Space(small / "pool", 1 << 30))
    try:
        saved = [save(store, chain(f"{number}", 1), nbytes=30_000) for number in range(100)]
        assert saved == [1] * 100
        assert there(store, chain("99", 1)) == 1
        assert loads(store, *chain("99", 1))
        assert problems(store) == []
    finally:
        store.close()


def test_a_memory_full_of_others_bytes_refuses_and_recovers(small: Path) -> None:
    store = LocalStore(Space(small / "pool", 1 << 30))
    try:
        save(store, chain("a", 1))
        left = os.statvfs(small)
        with (small / "other").open("wb") as other:
            os.posix_fallocate(other.fileno(), 0, left.f_bavail * left.f_frsize)
        refused = begin(store, *chain("b", 1), nbytes=200_000)
        assert isinstance(refused, Refusal)
        assert there(store, chain("c", 1)) == 0
        (small / "other").unlink()
        assert save(store, chain("b", 1), nbytes=200_000, patience_s=30) == 1
        assert problems(store) == []
    finally:
        store.close()


def test_a_full_disk_loses_what_leaves_memory_and_nothing_else(folder: Path, small: Path) -> None:
    store = LocalStore(Space(folder / "pool", 20 * CHARGE), Space(small / "kv", 1 << 30))
    try:
        for number in range(200):
            assert save(store, chain(f"{number}", 1), patience_s=30) == 1
        assert there(store, chain("199", 1)) == 1
        found = [chain(f"{number}", 1)[0] for number in range(200)]
        assert all(loads(store, key) for key in found if store.find([key])[0])
        assert problems(store) == []
    finally:
        store.close()


def test_a_write_that_fails_frees_its_room(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    writing = begin(store, *chain("a", 1))
    assert not isinstance(writing, Refusal)

    def fails(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", fails)
        with pytest.raises(PoolError, match="No space left"):
            writing.write(0, memoryview(b"x"))
    assert not writing.publish()
    assert problems(store) == []
    assert store.status().tiers[0].nbytes == 0


def test_two_pools_do_not_share_a_disk(folder: Path, tmp_path: Path) -> None:
    """Two containers with a /dev/shm of their own each, and one disk."""
    one = LocalStore(Space(folder / "one", 1 << 26), Space(tmp_path / "disk", 1 << 26))
    with pytest.raises(ConfigError, match="uses this folder"):
        LocalStore(Space(folder / "two", 1 << 26), Space(tmp_path / "disk", 1 << 26))
    one.close()
    LocalStore(Space(folder / "two", 1 << 26), Space(tmp_path / "disk", 1 << 26)).close()


def test_engines_of_a_host_name_one_disk_folder(folder: Path, tmp_path: Path) -> None:
    """Their catalog know one: an engine with another one would strike chunks of the first, and fill its disk."""
    memory = Space(folder / "pool", 1 << 26)
    one, two = (Space(tmp_path / name, 1 << 26) for name in ("one", "two"))
    without = LocalStore(memory)
    store = LocalStore(memory, one)
    with pytest.raises(
        ConfigError, match=f"two: this host's pool keeps its chunks in {one.path} already"
    ):
        LocalStore(memory, two)
    LocalStore(memory, one).close()
    shutil.rmtree(one.path)
    store.maintenance.turn()
    LocalStore(memory, one).close()
    with pytest.raises(ConfigError, match="already"):
        LocalStore(memory, two)
    store.close()
    LocalStore(memory, two).close()
    without.close()


def test_books_of_another_disk_folder_are_made_again(folder: Path, tmp_path: Path) -> None:
    memory = Space(folder / "pool", 1 << 26)
    store = LocalStore(memory, Space(tmp_path / "one", 1 << 26))
    keys = chain("a", 3)
    save(store, keys)
    for key in keys:
        until(partial(store.maintenance.copy, key, 1), "a copy on the disk")
    store.close()
    store = LocalStore(memory, Space(tmp_path / "two", 1 << 26))
    try:
        until(lambda: store.status().tiers[1].chunks == 0, "a new catalog")
        assert problems(store) == []
    finally:
        store.close()


def test_processes_that_start_at_the_same_time_share_a_new_disk(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has the lock of the folder alone for a moment."""
    spaces = Space(folder / "pool", 1 << 26), Space(tmp_path / "disk", 1 << 26)
    write, claiming, go_on = claims._Claim.write, threading.Event(), threading.Event()
    opened: list[LocalStore] = []

    def slow(*arguments: Any) -> None:
        write(*arguments)
        claiming.set()
        go_on.wait(30)

    monkeypatch.setattr(claims._Claim, "write", slow)
    first = threading.Thread(target=lambda: opened.append(LocalStore(*spaces)))
    first.start()
    assert claiming.wait(30)
    threading.Timer(0.1, go_on.set).start()
    opened.append(LocalStore(*spaces))
    first.join(30)
    for store in opened:
        store.close()
    assert len(opened) == 2


def test_what_a_reboot_leaves_on_the_disk_is_found_at_once(folder: Path, tmp_path: Path) -> None:
    disk = Space(tmp_path / "disk", 1 << 26)
    store = LocalStore(Space(folder / "pool", 1 << 26), disk)
    keys = chain("a", 3)
    save(store, keys)
    for key in keys:  # another thread may hold the catalog for longer than a copy waits
        until(partial(store.maintenance.copy, key, 1), "a copy on the disk")
    store.close()
    shutil.rmtree(folder / "pool")
    store = LocalStore(Space(folder / "pool", 1 << 26), disk)
    assert there(store, keys) == 3
    assert all(loads(store, key) for key in keys)
    assert store.status().tiers[1].chunks == 3
    store.close()


def test_files_and_folders_are_this_users_alone(open_store: Open, folder: Path) -> None:
    old = os.umask(0)
    try:
        store = open_store()
        save(store, chain("a", 2))
    finally:
        os.umask(old)
    for path in [folder / "pool", *(folder / "pool").rglob("*")]:
        if not path.is_symlink():
            assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_what_is_published_while_books_are_made_anew_is_found_although_stocktaking_fails_first(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "_RECONCILE_LIMIT_S", 0.1)
    maker, other = open_store(), open_store()
    for store in (maker, other):
        store.maintenance.stop()  # its own stocktaking could meet the failure
    keys, failures = chain("a", 3), [CatalogError("the machine is busy")]

    def fill(*arguments: Any) -> None:
        reconciling.fill(*arguments)
        assert save(other, keys) == 3, "into the catalog that is in force still"

    def reconcile(store: TierStorage) -> None:
        if failures:
            raise failures.pop()
        reconciling.reconcile(store)

    monkeypatch.setattr(maintenance, "fill", fill)
    monkeypatch.setattr(maintenance, "reconcile", reconcile)
    with pytest.raises(CatalogError):
        maker.maintenance.rebuild_catalog("a test wants it")
    assert there(other, keys) == 3
    until(
        lambda: other.maintenance._reconcile() or not problems_now(other), "stock was taken again"
    )


def test_a_chunk_that_no_books_have_is_not_kept(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its catalog was replaced while it was published, and the new one cannot be written."""
    maker, writer = open_store(), open_store()
    monkeypatch.setattr(maintenance, "reconcile", lambda _: None)
    enter, (key,) = Folder.enter, chain("a", 1)

    def enters(*arguments: Any) -> None:
        enter(*arguments)
        maker.maintenance.rebuild_catalog("a test wants it")

    def adopts(*_: Any, **__: Any) -> None:
        raise CatalogError("the machine is busy")

    monkeypatch.setattr(Folder, "enter", enters)
    monkeypatch.setattr(TierStorage, "adopt", adopts)
    assert save(writer, [key], patience_s=0) == 0
    assert there(writer, [key]) == 0
    assert problems(writer) == []
