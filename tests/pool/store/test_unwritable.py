# SPDX-License-Identifier: Apache-2.0
"""A tier whose file system takes no chunk is named in the log, counted, and shown by `pool status`, until it does again."""

import contextlib
import errno
import logging
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chunks import chain, loads, save, there
from support.waits import until
from typer.testing import CliRunner

from pd_connector.errors import ConfigError, PoolError
from pd_connector.pool.store import troubles
from pd_connector.pool.store.base import DISK, MEMORY
from pd_connector.pool.store.folder import Folder
from pd_connector.pool.store.local import LocalStore
from pd_connector.pool.store.tier_storage import Space
from pd_connector.tools.cli import pool

Mount = Callable[..., Path]
LOG = "pd_connector.pool.store.troubles"


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Makes small file systems."""
    mounted: list[Path] = []

    def small(options: str = "size=64m") -> Path:
        path = tmp_path / f"mounted{len(mounted)}"
        path.mkdir(exist_ok=True)
        asked = ["mount", "-t", "tmpfs", "-o", f"{options},mode=700", "none", str(path)]
        if subprocess.run(asked, capture_output=True, check=False).returncode:
            pytest.skip("mounting needs root")
        mounted.append(path)
        return path

    yield small
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture
def opens(folder: Path) -> Iterator[Callable[[Path], LocalStore]]:
    """Opens a store whose memory is smaller than what is saved, above this folder of a disk."""
    opened: list[LocalStore] = []

    def store(disk: Path) -> LocalStore:
        made = LocalStore(Space(folder / "pd_connector" / "pool", 1 << 20), Space(disk, 1 << 30))
        opened.append(made)
        return made

    (folder / "pd_connector").mkdir(mode=0o700)
    yield store
    for each in opened:
        each.close()


def fill(path: Path) -> None:
    """Leave no room in a file system."""
    left = os.statvfs(path)
    with (path / "other").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, left.f_bavail * left.f_frsize)


def spend_inodes(path: Path) -> None:
    with contextlib.suppress(OSError):
        for number in range(100_000):
            (path / f"other{number}").touch()
    assert not os.statvfs(path).f_favail


def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel makes a disk read-only that fails; nobody else can while files are open."""
    create = Folder.create

    def creates(folder: Folder, name: str, nbytes: int) -> int:
        if folder.name == DISK:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return create(folder, name, nbytes)

    monkeypatch.setattr(Folder, "create", creates)


def writable(path: Path) -> None:
    subprocess.run(["mount", "-o", "remount,rw,size=64m,nr_inodes=1000", str(path)], check=True)
    for file in path.glob("other*"):
        file.unlink()


@pytest.mark.parametrize(
    ("harm", "cause", "what", "remedy"),
    [
        (fill, "no_room", "no room left", "lower pool.disk"),
        (spend_inodes, "no_inodes", "no inodes left", "remove files"),
    ],
)
def test_a_disk_that_cannot_be_written_is_told_everywhere_until_it_can(
    mount: Mount,
    opens: Callable[[Path], LocalStore],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    harm: Callable[[Path], None],
    cause: str,
    what: str,
    remedy: str,
) -> None:
    monkeypatch.setenv("PD_CONNECTOR_SHM", str(folder))
    monkeypatch.setattr(pool, "memory_folder", lambda: folder / "pd_connector" / "pool")
    disk = mount("size=64m,nr_inodes=1000")
    store = opens(disk / "pool")
    harm(disk)
    caplog.set_level(logging.INFO, LOG)
    save(store, chain("a", 100), nbytes=20_000)  # the memory holds the half of them
    failures: dict[tuple[str, str], int] = {}
    until(lambda: failures.update(store.take_failures()) or failures)
    assert set(failures) == {(DISK, cause)}
    until(lambda: what in caplog.text)
    (told,) = store.status().unwritable
    assert told.tier == DISK
    for text in (caplog.text, told.why, CliRunner().invoke(pool.app, ["status"]).output):
        told_words = " ".join(text.split())
        assert what in told_words
        assert remedy in told_words
        assert "pool.dir" in told_words
    assert str(disk / "pool") in told.why
    until(store.take_failures)  # it is tried again
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1, "and not logged again at once"

    writable(disk)
    keys = chain("b", 100)
    save(store, keys, nbytes=20_000)
    until(lambda: "takes chunks again" in caplog.text)
    assert store.status().unwritable == []
    whole = []
    for key in keys:
        if there(store, [key]):
            with contextlib.suppress(PoolError):  # evicted meanwhile
                whole.append(loads(store, key))
    assert whole
    assert all(whole)


def test_a_memory_that_is_full_of_other_files_is_told(
    mount: Mount, caplog: pytest.LogCaptureFixture
) -> None:
    memory = mount("size=8m")
    store = LocalStore(Space(memory / "pool", 4 << 20))
    try:
        fill(memory)
        assert save(store, chain("a", 1), nbytes=600_000, patience_s=0.0) == 0
        assert set(store.take_failures()) == {(MEMORY, "no_room")}
        assert "the memory tier" in caplog.text
        assert "PD_CONNECTOR_SHM" in caplog.text
    finally:
        store.close()


def test_nothing_is_evicted_for_a_disk_that_is_read_only(
    tmp_path: Path, opens: Callable[[Path], LocalStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path
    store = opens(disk / "pool")
    keys = chain("a", 100)
    for first in range(0, 100, 10):  # saves are quicker than the thread that copies them
        save(store, keys[first : first + 10], keys[first - 1] if first else b"", nbytes=20_000)
        until(lambda: not store.maintenance.is_behind())
    read_only(monkeypatch)
    (_, before) = store.status().tiers
    assert before.chunks > 20
    save(store, chain("b", 100), nbytes=20_000)
    until(lambda: (DISK, "read_only") in store.take_failures())
    (_, tier) = store.status().tiers
    assert tier.chunks == before.chunks == len(os.listdir(disk / "pool/v1/index"))


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "read_only"),
        (errno.EACCES, "permission"),
        (errno.EIO, "failed"),
    ],
)
def test_other_errors_have_a_cause_too(folder: Path, error: int, cause: str) -> None:
    tier = Folder(DISK, folder / "disk", "pool.dir")
    found = troubles.Troubles([Folder(MEMORY, folder / "pool", "pool.memory"), tier])
    text = found.failed(tier, OSError(error, os.strerror(error)))
    assert found.take() == {(DISK, cause): 1}
    assert found.take() == {}
    assert str(folder / "disk") in text


def test_a_folder_that_was_removed_is_no_trouble_of_its_disk(folder: Path) -> None:
    tier = Folder(DISK, folder / "disk", "pool.dir")
    found = troubles.Troubles([Folder(MEMORY, folder / "pool", "pool.memory"), tier])
    found.failed(tier, OSError(errno.ENOENT, os.strerror(errno.ENOENT)))
    assert found.take() == {}
    assert troubles.unwritable(found._folders[0]) == []


def test_the_same_trouble_is_logged_again_after_a_while(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = Folder(DISK, folder / "disk", "pool.dir")
    found = troubles.Troubles([Folder(MEMORY, folder / "pool", "pool.memory"), tier])
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for _ in range(3):
        found.failed(tier, full)
    assert len(caplog.records) == 1
    monkeypatch.setattr(troubles, "_AGAIN_S", 0.0)
    found.failed(tier, full)
    assert len(caplog.records) == 2


def test_a_tier_that_takes_chunks_again_is_not_shown_as_one_that_does_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several threads write: one may find the tier well while another one tells that it is not."""
    tier = Folder(DISK, folder / "disk", "pool.dir")
    found = troubles.Troubles([Folder(MEMORY, folder / "pool", "pool.memory"), tier])
    tell, others = found._tell, list[threading.Thread]()

    def tells(name: str, text: str) -> None:
        others.append(threading.Thread(target=found.well, args=(tier,)))
        others[0].start()
        others[0].join(0.2)  # it waits for this thread, or was faster
        tell(name, text)

    monkeypatch.setattr(found, "_tell", tells)
    found.failed(tier, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    others[0].join()
    assert troubles.unwritable(found._folders[0]) == []


def test_a_folder_of_a_file_system_without_files_is_refused_for_what_it_is() -> None:
    with pytest.raises(ConfigError) as refused:
        Folder(DISK, Path("/proc/pool"), "pool.dir")
    assert "keeps no files" in str(refused.value)
    assert "create it" not in str(refused.value)
    assert "pool.dir" in str(refused.value)


def test_a_folder_that_cannot_be_created_again_is_told_once(
    tmp_path: Path, opens: Callable[[Path], LocalStore], caplog: pytest.LogCaptureFixture
) -> None:
    store = opens(tmp_path / "disk")
    shutil.rmtree(tmp_path / "disk")
    (tmp_path / "disk").touch()
    until(lambda: "is not a folder" in caplog.text)
    turns: list[None] = []
    turn = store.maintenance.turn

    def counted() -> None:
        turns.append(None)
        turn()

    store.maintenance.turn = counted  # type: ignore[method-assign]
    until(lambda: len(turns) > 2)
    assert caplog.text.count("nothing is saved there: ") == 1
    assert "created again" not in caplog.text
    save(store, chain("a", 1))
    (store.maintenance._store.folders[0].path / "books").unlink()
    until(lambda: store._catalog.name, "the memory goes on with a new catalog")
    assert save(store, chain("b", 1)) == 1
    assert "pool.dir" in caplog.text


def test_nothing_is_written_beneath_a_disk_that_is_unmounted(
    mount: Mount, opens: Callable[[Path], LocalStore], caplog: pytest.LogCaptureFixture
) -> None:
    """It would fill the file system beneath, and stay there unseen once the disk is mounted again."""
    disk = mount()
    store = opens(disk / "pool")
    subprocess.run(["umount", "-l", str(disk)], check=True)
    until(lambda: f"no longer mounted at {disk}" in caplog.text)
    assert save(store, chain("a", 10)) == 10
    assert list(disk.iterdir()) == []
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=700", "none", str(disk)], check=True)
    until((disk / "pool" / "v1" / "index").is_dir)
    assert save(store, chain("b", 100), nbytes=20_000) == 100
    until(lambda: list((disk / "pool" / "v1" / "index").iterdir()))
