# SPDX-License-Identifier: Apache-2.0
"""The config key `pool`: what it means, and what is refused with key, value and remedy."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from pd_connector.errors import ConfigError
from pd_connector.pool import room, settings
from pd_connector.pool.settings import load, memory_folder
from pd_connector.pool.store.base import Refusal

GIB = 1 << 30


@pytest.fixture
def environment() -> Iterator[Mapping[str, str]]:
    """A tmpfs of its own, as far as the pool can tell."""
    path = tempfile.mkdtemp(prefix="pd-pool-test-", dir="/dev/shm")
    yield {settings.SHM_VARIABLE: path}
    shutil.rmtree(path)


@pytest.fixture
def leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/shm leaves 8 GiB, the machine 20 GiB, no container limits it."""
    rooms = [
        room.Room(8 * GIB, "/dev/shm", "Docker's --shm-size=16g"),
        room.Room(20 * GIB, "the machine", "buy more"),
    ]
    monkeypatch.setattr(settings, "memory_rooms", lambda shm, own: rooms)


@pytest.mark.usefixtures("leaves")
def test_true_takes_a_quarter_of_what_is_left(environment: Mapping[str, str]) -> None:
    found = load(True, environment)
    assert found is not None
    assert found.memory.budget == 2 * GIB
    assert not found.memory.chosen
    assert found.disk is None
    assert found.read
    assert found.write
    assert load(False, environment) is None


@pytest.mark.usefixtures("leaves")
def test_an_object_says_more(environment: Mapping[str, str], tmp_path: Path) -> None:
    value = {"memory": "1.5GiB", "dir": str(tmp_path / "kv"), "disk": "500MB", "write": False}
    found = load(value, environment)
    assert found is not None
    assert found.disk is not None
    assert (found.memory.budget, found.disk.budget) == (3 * GIB // 2, 500_000_000)
    assert found.disk.path == tmp_path / "kv"
    assert (found.read, found.write) == (True, False)
    with_default = load({"dir": str(tmp_path / "kv")}, environment)
    assert with_default is not None
    assert with_default.disk is not None
    assert 0 < with_default.disk.budget <= shutil.disk_usage(tmp_path).free


@pytest.mark.usefixtures("leaves")
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("yes", "pool 'yes': must be true"),
        ({"memry": "1GiB"}, "'pool.memry': did you mean 'memory'"),
        ({"memory": 16}, 'pool.memory 16: must be a size such as "16GiB"'),
        ({"memory": "lots"}, "pool.memory 'lots': must be a size"),
        ({"memory": "9" * 400 + "GiB"}, "must be a size"),
        ({"memory": "-1GiB"}, "pool.memory '-1GiB': must be a size"),
        ({"memory": "1MiB"}, "pool.memory '1MiB': must be 64 MiB or more"),
        ({"memory": "9GiB"}, "/dev/shm leaves 8 GiB. Ask for less, or: Docker's --shm-size=16g"),
        ({"disk": "1GiB"}, "set pool.dir"),
        ({"dir": "kv"}, "pool.dir 'kv': must be the absolute path"),
        ({"dir": "/nowhere/at/all"}, "there is no folder /nowhere/at"),
        ({"dir": "/dev/null"}, "/dev/null: is not a folder"),
        ({"read": 1}, "pool.read 1: must be true or false"),
        ({"codec": "int9"}, "pool.codec 'int9': did you mean 'int8'"),
        ({"codec": "fp8_e4m3"}, "pool.codec 'fp8_e4m3': must be raw or int8. The error of"),
        ({"codec": ["int8"]}, "pool.codec ['int8']: "),
        ({"tenants": "a"}, "pool.tenants 'a': must be a list of names"),
        ({"tenants": ["a", ""]}, "pool.tenants ['a', '']: must be a list of names"),
        ({"read": False, "write": False}, "leave out the config key pool"),
    ],
)
def test_refused_with_key_value_and_remedy(
    value: object, said: str, environment: Mapping[str, str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(value, environment)
    assert said in str(caught.value)
    assert "pool" in str(caught.value)


@pytest.mark.usefixtures("leaves")
def test_more_disk_than_there_is(environment: Mapping[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pool\.disk 9000TiB: .* leaves"):
        load({"dir": str(tmp_path / "kv"), "disk": "9000TiB"}, environment)


def test_a_shared_memory_too_small_for_the_default(
    environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    docker = os.statvfs_result((4096, 4096, 16384, 16384, 16384, 0, 0, 0, 0, 255))
    monkeypatch.setattr(room.os, "statvfs", lambda path: docker)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"leaves 64 MiB.*--shm-size"):
        load(True, environment)


@pytest.mark.usefixtures("leaves")
def test_a_folder_open_to_others_is_refused(environment: Mapping[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o750)
    with pytest.raises(ConfigError, match=rf"{folder}/kv, .* or chmod 700 {folder}"):
        load({"dir": str(folder)}, environment)
    folder.chmod(0o1777)
    with pytest.raises(ConfigError, match="name a folder within it"):
        load({"dir": str(folder)}, environment)


@pytest.mark.usefixtures("leaves")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user")
def test_a_folder_of_another_user_is_refused(
    environment: Mapping[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to user 12345, not to 0"):
        load({"dir": str(folder)}, environment)
    mine = memory_folder(environment).parent
    mine.mkdir(mode=0o700)
    os.chown(mine, 12345, 12345)
    found = load({"memory": "64MiB"}, environment)
    assert found is not None
    with pytest.raises(ConfigError, match="belongs to user 12345, not to 0"):
        found.open()


@pytest.mark.usefixtures("leaves")
def test_a_link_is_not_followed(environment: Mapping[str, str], tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="symbolic link: name the folder itself"):
        load({"dir": str(tmp_path / "link")}, environment)


@pytest.mark.usefixtures("leaves")
@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.s3fs", "9p"])
def test_a_network_file_system_is_refused(
    kind: str, environment: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = [f"server:/export {tmp_path}/with\\040space {kind} rw 0 0"]
    real = room._lines
    monkeypatch.setattr(
        room, "_lines", lambda path: real(path) + (mounts if path.name == "mounts" else [])
    )
    with pytest.raises(ConfigError, match=rf"network file system \({kind}\)"):
        load({"dir": str(tmp_path / "with space" / "kv")}, environment)
    assert load({"dir": str(tmp_path / "kv")}, environment)


def test_memory_outside_a_tmpfs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not tmpfs"):
        load(True, {settings.SHM_VARIABLE: str(tmp_path)})


def test_a_tmpfs_folder_that_is_not_there_is_refused(environment: Mapping[str, str]) -> None:
    """In a container without `/dev/shm`, `/dev` is a tmpfs."""
    nowhere = f"{environment[settings.SHM_VARIABLE]}/none"
    with pytest.raises(ConfigError, match=f"{nowhere}: is not there"):
        load(True, {settings.SHM_VARIABLE: nowhere})


@pytest.mark.parametrize(
    ("line", "root", "limit", "usage", "dropped"),
    [
        ("0::/pod/engine", "", "memory.max", "memory.current", "inactive_file"),
        (
            "4:memory:/pod/engine",
            "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_the_containers_memory_limit_counts(
    line: str,
    root: str,
    limit: str,
    usage: str,
    dropped: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pod = tmp_path / root / "pod"
    (pod / "engine").mkdir(parents=True)
    for folder, most in ((pod, str(10 * GIB)), (pod / "engine", "max")):
        (folder / limit).write_text(most)
        (folder / usage).write_text(str(7 * GIB))
        (folder / "memory.stat").write_text(f"anon 5\n{dropped} {2 * GIB}\n")
    real = room._lines
    monkeypatch.setattr(room, "_CGROUPS", tmp_path)
    monkeypatch.setattr(
        room, "_lines", lambda path: [line] if path.name == "cgroup" else real(path)
    )
    assert room._cgroup_room() == 5 * GIB


@pytest.mark.usefixtures("leaves")
def test_what_the_pool_holds_already_is_its_own_to_use(
    environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the default would shrink with every engine that starts."""
    found = load({"memory": "64MiB"}, environment)
    assert found is not None
    store = found.open()
    writing = store.begin(b"key", parent=b"", part="r0", parts=1, nbytes=10 << 20)
    assert not isinstance(writing, Refusal)
    assert writing.publish()
    seen: list[int] = []

    def rooms(shm: Path, own: int) -> list[room.Room]:
        seen.append(own)
        return [room.Room(8 * GIB, "", "")]

    monkeypatch.setattr(settings, "memory_rooms", rooms)
    load(True, environment)
    store.close()
    assert seen == [10 << 20]
