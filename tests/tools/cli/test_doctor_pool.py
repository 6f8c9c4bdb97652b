# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of the KV pool."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.pool_stores import patient

from pd_connector.pool.advertised import AdvertisedEngine
from pd_connector.pool.settings import memory_folder
from pd_connector.pool.store.base import Writing
from pd_connector.pool.store.local import LocalStore
from pd_connector.pool.store.tier_storage import Space
from pd_connector.tools.cli.checks import pool
from pd_connector.tools.cli.checks.facts import Facts, Pool
from pd_connector.tools.cli.checks.finding import Finding, Status

__all__ = ["patient"]
pytestmark = pytest.mark.usefixtures("patient")
MIB = 1 << 20
USED = Pool(
    "/dev/shm/pd_connector-0/pool",
    "tmpfs",
    4096 * MIB,
    1024 * MIB,
    held=(("memory", "/dev/shm/pd_connector-0/pool", 7, 70 * MIB, 1024 * MIB),),
    engines=2,
)


@pytest.fixture
def shm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="pd-test-", dir="/dev/shm"))
    monkeypatch.setenv("PD_CONNECTOR_SHM", str(folder))
    yield folder
    shutil.rmtree(folder)


def found(facts: Pool) -> dict[str, Finding]:
    return {one.name: one for one in pool.check(Facts(pool=facts))}


def test_a_pool_in_use_is_told_with_its_folder_budget_and_contents() -> None:
    told = found(USED)
    assert {one.status for one in told.values()} == {Status.OK}
    assert "tmpfs, 4 GiB" in told["folder"].found
    assert "by default 1 GiB" in told["folder"].found
    assert told["memory"].found.startswith("7 chunks, 70 MiB of 1 GiB")
    assert told["engines"].found == "2 processes use it"


def test_a_tier_that_cannot_be_written_is_told_with_what_to_do() -> None:
    why = "/mnt/kv: its file system has no room left; free some, or name another folder in pool.dir"
    told = found(replace(USED, unwritable=(("disk", why),)))["saves in disk"]
    assert told.status is Status.WARN
    assert told.found == "/mnt/kv: its file system has no room left"
    assert told.advice == "free some, or name another folder in pool.dir"


def test_what_engines_say_of_a_tier_is_seen(shm: Path) -> None:
    folder = memory_folder()
    folder.parent.mkdir(mode=0o700)
    store = LocalStore(Space(folder, MIB))
    try:
        told = store._tier_storage.troubles
        told.failed(store._folders[0], OSError(errno.EIO, "Input/output error"))
        ((tier, why),) = pool.look().unwritable
        assert (tier, str(folder) in why) == ("memory", True)
    finally:
        store.close()


def test_why_a_pool_is_off_comes_with_what_to_do() -> None:
    refused = found(
        replace(USED, refused="pool true: 64MiB are left; start it with --shm-size=16g")
    )
    assert refused["folder"].status is Status.WARN
    assert "--shm-size=16g" in refused["folder"].advice
    unsure = found(replace(USED, unknown=("engine-1",), problem="the books are held"))
    assert "engine-1" in unsure["off at"].found
    assert "without a version" in unsure["off at"].advice
    assert unsure["saves"].status is Status.WARN


def test_a_tmpfs_that_cannot_be_written_is_told(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pool.look().refused == ""
    writable = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != shm and writable(path, mode))
    told = found(pool.look())["folder"]
    assert told.status is Status.WARN
    assert f"{shm}: this user cannot write there" in told.advice


def test_it_looks_at_what_is_there_and_changes_nothing(shm: Path) -> None:
    assert pool.look().held == ()
    assert list(shm.iterdir()) == []
    folder = memory_folder()
    folder.parent.mkdir(mode=0o700)
    store = LocalStore(Space(folder, 8 * MIB))
    try:
        store.advertise(AdvertisedEngine(engine="engine-1", model="").encode())
        writing = store.begin(b"k" * 32, parent=b"", part="a", parts=1, nbytes=100)
        assert isinstance(writing, Writing)
        with writing:
            assert writing.publish()
        told = pool.look()
    finally:
        store.close()
    ((tier, _, chunks, _, budget),) = told.held
    assert (tier, chunks, budget) == ("memory", 1, 8 * MIB)
    assert (told.engines, told.unknown, told.refused) == (1, ("engine-1",), "")


def test_a_folder_that_others_can_open_is_said_to_prevent_engines(shm: Path) -> None:
    folder = memory_folder()
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    told = found(pool.look())["folder"]
    assert told.status is Status.WARN
    assert str(folder) in told.advice
