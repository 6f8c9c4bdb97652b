# SPDX-License-Identifier: Apache-2.0
"""`pd-connector pool`: what an operator sees of the KV pool of a host."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pd_connector.pool.settings import SHM_VARIABLE, PoolSettings, load
from pd_connector.pool.store.base import Refusal
from pd_connector.pool.store.local import LocalStore
from pd_connector.tools.cli.pool import app

NBYTES = 1 << 20


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolSettings]:
    """A pool of this test alone."""
    shm = tempfile.mkdtemp(prefix="pd-pool-test-", dir="/dev/shm")
    monkeypatch.setenv(SHM_VARIABLE, shm)
    found = load({"memory": "64MiB", "dir": str(tmp_path / "kv"), "disk": "128MiB"})
    assert found is not None
    yield found
    shutil.rmtree(shm)


@pytest.fixture
def store(settings: PoolSettings) -> Iterator[LocalStore]:
    """The store of an engine, with three chunks."""
    opened = settings.open()
    for number in range(3):
        writing = opened.begin(
            bytes([number]) * 32,
            parent=b"",
            part="0-2.0of1",
            parts=1,
            nbytes=NBYTES,
            tenant=f"team {number % 2}",
        )
        assert not isinstance(writing, Refusal)
        writing.write(0, memoryview(os.urandom(NBYTES)))
        assert writing.publish()
    yield opened
    opened.close()


def call(*arguments: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(app, arguments, input=answer)


def test_without_a_pool_it_says_how_one_comes_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SHM_VARIABLE, str(tmp_path))
    for command in ("status", "ls", "verify", "clear"):
        result = call(command)
        assert result.exit_code == 1
        assert "config key `pool`" in result.output
        assert SHM_VARIABLE in result.output


@pytest.mark.usefixtures("store")
def test_status_shows_tiers_tenants_and_engines(settings: PoolSettings) -> None:
    told = json.loads(call("status", "--json").output)
    memory, disk = told["tiers"]
    assert (memory["chunks"], memory["budget"], memory["path"]) == (
        3,
        64 << 20,
        str(settings.memory.path),
    )
    assert (disk["chunks"], disk["budget"]) == (0, 128 << 20)
    assert set(memory["tenants"]) == {"team 0", "team 1"}
    assert told["engines"] == 1
    shown = call("status").output
    assert "64 MiB" in shown
    assert "tenant team 1" in shown


@pytest.mark.usefixtures("store")
def test_a_command_changes_no_budget() -> None:
    for command in ("status", "ls", "verify"):
        assert call(command).exit_code == 0
    assert [tier["budget"] for tier in json.loads(call("status", "--json").output)["tiers"]] == [
        64 << 20,
        128 << 20,
    ]


@pytest.mark.usefixtures("store")
def test_ls_lists_chunks_of_all_or_one_tenant() -> None:
    assert len(call("ls").output.splitlines()) == 3
    (line,) = call("ls", "--tenant", "team 1", "--json").output.splitlines()
    chunk = json.loads(line)
    assert (chunk["key"], chunk["nbytes"], chunk["parts"]) == ("01" * 32, NBYTES, ["0-2.0of1"])


def test_verify_finds_a_file_that_was_cut_and_removes_it_when_told_to(
    store: LocalStore, settings: PoolSettings
) -> None:
    assert "3 chunks with 3 MiB read, 0 damaged" in call("verify").output
    (file,) = (settings.memory.path / "v1" / "data").glob("01*")
    os.truncate(file, 5)
    result = call("verify", "--remove")
    assert result.exit_code == 1
    assert f"damaged: {'01' * 32}" in result.output
    assert call("verify").exit_code == 0
    assert store.find([bytes([1]) * 32]) == [None]


def test_verify_believes_the_check(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "pd_connector.tools.cli.pool.CHECK",
        lambda key, part, reading: "rotten" if key[0] == 2 else "",
    )
    result = call("verify")
    assert result.exit_code == 1
    assert f"damaged: {'02' * 32}: 0-2.0of1: rotten" in result.output
    assert store.find([bytes([2]) * 32])[0], "removed only with --remove"


def test_clear_asks_and_removes_all_while_an_engine_uses_the_pool(store: LocalStore) -> None:
    assert call("clear", answer="n\n").exit_code == 1
    assert store.find([bytes(32)])[0]
    assert "3 chunks removed" in call("clear", "--yes").output
    assert not store.find([bytes(32)])[0]
    assert "0 chunks removed" in call("clear").output


def test_what_is_left_on_the_disk_after_a_reboot_is_shown(
    store: LocalStore, settings: PoolSettings
) -> None:
    assert settings.disk is not None
    assert store.keeper.copy(bytes(32), 1)
    store.close()
    shutil.rmtree(settings.memory.path.parent)
    assert call("ls").exit_code == 1
    (line,) = call("ls", "--dir", str(settings.disk.path)).output.splitlines()
    assert "disk" in line
