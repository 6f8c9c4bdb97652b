# SPDX-License-Identifier: Apache-2.0
"""LMCache between two hosts, in an environment of its own. Without one the tests that need it are skipped:

python3 -m venv .venv-lmcache && .venv-lmcache/bin/pip install lmcache==0.5.6
"""

import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from chunks import chain, loads, save
from support.far_hosts import KEY, Host
from support.redis_servers import redis_server
from support.waits import until

from pd_connector.errors import ConfigError, PoolError
from pd_connector.pool.far.lmcache import LMCacheStore
from pd_connector.pool.far.registry import far_address

ROOT = Path(__file__).parents[3]
PYTHON = os.environ.get("PD_LMCACHE_PYTHON") or str(ROOT / ".venv-lmcache/bin/python")
here = pytest.mark.skipif(
    not Path(PYTHON).exists(), reason=f"needs LMCache in an environment of its own ({PYTHON})"
)


def arguments(folder: Path, **tier: object) -> str:
    """The address of a far store with one tier."""
    path = folder / "lmcache.args"
    spec = json.dumps(tier)
    path.write_text(f"--l1-size-gb 0.25 --eviction-policy LRU  # L1\n--l2-adapter '{spec}'\n")
    return f"lmcache:{path}"


@pytest.fixture
def shm() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="pd-pool-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def host(folder: Path, address: str, keys: tuple[bytes, ...] = (KEY,)) -> Host:
    return Host(folder, address, keys, 64 << 20, 20.0, PYTHON)


def brought(reader: Host, keys: list[bytes]) -> tuple[int, int]:
    """Chunks that came, and those of them that are wrong."""
    came = wrong = 0
    for key in keys:
        try:
            if reader.store.bring(key):
                came, wrong = came + 1, wrong + (not loads(reader.store, key))
        except PoolError:
            continue
    return came, wrong


@here
def test_hosts_share_through_files_and_a_stranger_causes_misses(shm: Path, tmp_path: Path) -> None:
    files = tmp_path / "files"
    address = arguments(tmp_path, type="fs", base_path=str(files))
    for keys_of_hosts, wrong in (((KEY,), 0), ((), 2)):  # the second is the control
        name = "sealed" if keys_of_hosts else "plain"
        writer, reader = (host(shm / name / each, address, keys_of_hosts) for each in "ab")
        try:
            keys = chain(name, 4)
            save(writer.own, keys, nbytes=300_000)
            writer.ready()
            reader.ready()
            until(lambda: writer.count("put") == len(keys), "the chunks in LMCache", 60)  # noqa: B023
            assert len(reader.carrier.find(keys).sizes) == len(keys)
            assert brought(reader, keys[:2]) == (2, 0)
            for key in keys[2:]:
                flip(files, reader.carrier._seal.names(key)[0])
            assert brought(reader, keys[2:]) == (wrong, wrong)
            left = 2 if keys_of_hosts else 4
            until(lambda: len(list(files.glob("pd-connector-*@*.data"))) == left, "removal")  # noqa: B023
            shutil.rmtree(files)
            files.mkdir()
        finally:
            writer.close()
            reader.close()


def flip(files: Path, name: str) -> None:
    (path,) = files.glob(f"pd-connector-*@{name}.data")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@here
def test_hosts_share_through_redis(shm: Path, tmp_path: Path) -> None:
    with redis_server(tmp_path) as redis:
        address = arguments(tmp_path, type="resp", host="127.0.0.1", port=redis.port)
        writer, reader = host(shm / "a", address), host(shm / "b", address)
        try:
            keys = chain("prompt", 3)
            for place, key in enumerate(keys):  # LMCache wants equal lengths in a model
                save(writer.own, [key], nbytes=100_000 * (place + 1))
            writer.ready()
            reader.ready()
            until(lambda: writer.count("put") == len(keys), "the chunks in LMCache", 60)
            assert len(reader.carrier.find(keys).sizes) == len(keys)
            assert brought(reader, keys) == (3, 0)
        finally:
            writer.close()
            reader.close()
    assert not list(Path("/dev/shm").glob("lmcache*")), "the clients leave nothing behind"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an environment with LMCache."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, "must be arguments of `lmcache server`"),
        ("--l1-size-gb 1", "has no --l2-adapter"),
        ("--l2-adapter {type:fs}", "must be arguments of `lmcache server`"),
        ("--l2-adapter '{", "No closing quotation"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_a_wrong_file_is_refused(tmp_path: Path, text: str | None, found: str) -> None:
    path = tmp_path / "lmcache.args"
    if text is not None:
        path.write_text(text)
    assert found in LMCacheStore.problem(urlsplit(f"lmcache:{path}"))


@pytest.mark.usefixtures("installed")
def test_a_key_is_always_needed(tmp_path: Path) -> None:
    address = arguments(tmp_path, type="resp", host="127.0.0.1", port=1)
    with pytest.raises(ConfigError, match="the L2 tiers that"):
        far_address(address, sealed=False)
    far_address(address, sealed=True)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--client-python"):
        far_address("lmcache:x", sealed=True)
