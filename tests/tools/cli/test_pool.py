# SPDX-License-Identifier: Apache-2.0
"""`pd-connector pool`: what an operator sees of the KV pool of a host."""

import io
import json
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from support.pool_records import record, sealed
from support.pool_stores import patient
from support.redis_servers import RedisServer, redis_server
from support.waits import until
from typer.testing import CliRunner, Result

from pd_connector.pool.carrier.carrier import Carrier
from pd_connector.pool.carrier.messages import Status as CarrierStatus
from pd_connector.pool.carrier.server import CarrierServer
from pd_connector.pool.chunk_layout import coded_run
from pd_connector.pool.far.seal import Seal
from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.pool.record import Record, Writer, encode
from pd_connector.pool.settings import SHM_VARIABLE, PoolSettings, load
from pd_connector.pool.store.base import Refusal
from pd_connector.pool.store.local import LocalStore
from pd_connector.tools.cli.pool import app, show_carrier

__all__ = ["patient"]
pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolSettings]:
    """A pool of this test alone."""
    shm = tempfile.mkdtemp(prefix="pd-pool-test-", dir="/dev/shm")
    monkeypatch.setenv(SHM_VARIABLE, shm)
    found = load({"memory": "64MiB", "dir": str(tmp_path / "kv"), "disk": "128MiB"})
    assert found is not None
    yield found
    shutil.rmtree(shm)


def part_of(first_token: int, **fields: Any) -> tuple[bytes, Record]:
    """The bytes of a part, and its record."""
    tokens = range(first_token, first_token + CHUNK_TOKENS)
    empty = record(tokens, parts=1, **fields)
    payload = random.Random(first_token).randbytes(empty.payload_bytes)
    layers = sealed(empty.form, empty.geometry, memoryview(payload))
    whole = msgspec.structs.replace(empty, layers=layers)
    return encode(whole) + payload, whole


PARTS = [part_of(number * CHUNK_TOKENS) for number in range(3)]
KEYS = [one.key for _, one in PARTS]
NBYTES = len(PARTS[0][0])


@pytest.fixture
def store(settings: PoolSettings) -> Iterator[LocalStore]:
    """The store of an engine, with three chunks."""
    opened = settings.open().host  # type: ignore[attr-defined]
    for number, part in enumerate(PARTS):
        put(opened, *part, f"team {number % 2}")
    yield opened
    opened.close()


def put(store: LocalStore, data: bytes, told: Record, tenant: str = "") -> None:
    names = {"parent": told.parent, "part": told.part, "parts": 1, "tenant": tenant}
    writing = store.begin(told.key, nbytes=len(data), **names)
    assert not isinstance(writing, Refusal)
    writing.write(0, memoryview(data))
    assert writing.publish()


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


def test_chunks_kept_in_int8_are_told_apart_counted_and_verified(store: LocalStore) -> None:
    raw, writer = len(PARTS) * NBYTES, Writer("vllm 0.32.0", "e1", "int8")
    data, coded = part_of(999, form=(coded_run((0, 2), "int8"),), writer=writer)
    put(store, data, coded)
    memory, _ = json.loads(call("status", "--json").output)["tiers"]
    assert memory["codecs"] == {"raw": raw, "int8": len(data)}
    assert "memory, codec int8: " in call("status").output
    lines = [json.loads(line) for line in call("ls", "--json").output.splitlines()]
    assert {line["key"]: line["codec"] for line in lines} == {
        **dict.fromkeys((key.hex() for key in KEYS), "raw"),
        coded.key.hex(): "int8",
    }
    assert "4 chunks with" in call("verify").output


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
    assert (
        "no chunk of tenant 'team 9' is there; chunks of "
        in call("ls", "--tenant", "team 9").output
    )
    (line,) = call("ls", "--tenant", "team 1", "--json").output.splitlines()
    chunk = json.loads(line)
    assert (chunk["key"], chunk["nbytes"], chunk["parts"]) == (
        KEYS[1].hex(),
        NBYTES,
        [PARTS[1][1].part],
    )


def flip(file: Path, place: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(place)
        (byte,) = opened.read(1)
        opened.seek(place)
        opened.write(bytes([byte ^ 1]))


def swap(file: Path, place: int) -> None:
    """Put the file of another chunk in its place."""
    (other,) = file.parent.glob(f"{KEYS[2].hex()}.*")
    other.replace(file)


@pytest.mark.parametrize(
    ("harm", "place", "said"),
    [
        (os.truncate, 5, "has 5 bytes"),
        (flip, 0, "not a file of the pool"),
        (flip, 100, "record differs from its sum"),
        (flip, NBYTES - 1, "the bytes of layer 1 differ from their sum"),
        (swap, 0, f"of chunk {KEYS[2].hex()}"),
    ],
    ids=["cut", "magic", "record", "payload", "swapped"],
)
def test_verify_finds_damage_and_removes_it_when_told_to(
    harm: Callable[[Path, int], object],
    place: int,
    said: str,
    store: LocalStore,
    settings: PoolSettings,
) -> None:
    assert "3 chunks with" in call("verify").output
    (file,) = (settings.memory.path / "v1" / "data").glob(f"{KEYS[1].hex()}.*")
    harm(file, place)
    result = call("verify", "--remove")
    assert result.exit_code == 1
    assert f"damaged: {KEYS[1].hex()}" in result.output
    assert said in result.output
    assert call("verify").exit_code == 0
    assert store.find([KEYS[1]]) == [None]
    assert store.find([KEYS[0]])[0]


def test_verify_alone_removes_nothing(store: LocalStore, settings: PoolSettings) -> None:
    (file,) = (settings.memory.path / "v1" / "data").glob(f"{KEYS[1].hex()}.*")
    flip(file, NBYTES - 1)
    assert call("verify").exit_code == 1
    assert store.find([KEYS[1]])[0]


def test_clear_asks_and_removes_all_while_an_engine_uses_the_pool(store: LocalStore) -> None:
    for answer, said in (("n\n", "failed: nothing is removed"), ("", "give --yes")):
        refused = call("clear", answer=answer)
        assert refused.exit_code == 1
        assert said in refused.output
    assert store.find([KEYS[0]])[0]
    assert "3 chunks removed" in call("clear", "--yes").output
    assert not store.find([KEYS[0]])[0]
    assert "0 chunks removed" in call("clear").output


def test_what_is_left_on_the_disk_after_a_reboot_is_shown(
    store: LocalStore, settings: PoolSettings
) -> None:
    assert settings.disk is not None
    assert store.maintenance.copy(KEYS[0], 1)
    store.close()
    shutil.rmtree(settings.memory.path.parent)
    assert call("ls").exit_code == 1
    (line,) = call("ls", "--dir", str(settings.disk.path)).output.splitlines()
    assert "disk" in line


@pytest.mark.parametrize("command", ["status", "ls", "verify", "clear"])
def test_a_folder_without_a_pool_is_named_and_left_as_it_is(
    store: LocalStore, tmp_path: Path, command: str
) -> None:
    (empty := tmp_path / "empty").mkdir(mode=0o700)
    for folder in (tmp_path / "nothing", empty):
        result = call(command, "--dir", str(folder))
        assert result.exit_code == 1
        assert f"no pool in {folder}" in " ".join(result.output.split())
    assert not (tmp_path / "nothing").exists()
    assert not list(empty.iterdir())


SEAL = Seal((b"k" * 32,))


@pytest.fixture
def redis(settings: PoolSettings, tmp_path: Path) -> Iterator[RedisServer]:
    """A server that a carrier of this host has put three chunks into."""
    with redis_server(tmp_path) as server:
        store: LocalStore = settings.open().host  # type: ignore[attr-defined]
        for part in PARTS:
            put(store, *part)
        carrier = Carrier(store, SEAL, server.address, 512 << 20, 5.0)
        serving = CarrierServer(carrier, settings.memory.path)
        try:
            until(lambda: carrier.status().counts.get("put") == len(PARTS), "the chunks", 60)
            until(lambda: not carrier.status().problem, "all far clients", 60)
            yield server
        finally:
            serving.close()
            carrier.close()
            store.close()


def test_without_a_carrier_it_says_how_to_start_one(settings: PoolSettings) -> None:
    settings.open().close()
    for command in ("ls", "verify"):
        result = call(command, "--far")
        assert result.exit_code == 1
        assert "pd-connector pool carry" in " ".join(result.output.split())


def test_ls_lists_what_was_put_and_whether_this_host_has_it(
    redis: RedisServer, settings: PoolSettings
) -> None:
    call("clear", "--yes")
    lines = [json.loads(line) for line in call("ls", "--far", "--json").output.splitlines()]
    assert {line["key"] for line in lines} == {key.hex() for key in KEYS}
    assert not any(line["here"] for line in lines)
    store = settings.open().host  # type: ignore[attr-defined]
    put(store, *PARTS[0])
    store.close()
    here = [line for line in call("ls", "--far").output.splitlines() if "here, too" in line]
    assert [line[:16] for line in here] == [KEYS[0].hex()[:16]]


def test_verify_reads_all_and_finds_and_removes_what_a_stranger_has_changed(
    redis: RedisServer,
) -> None:
    assert "3 chunks with" in call("verify", "--far").output
    stranger, name = redis.client(), f"pd:{SEAL.names(KEYS[1])[0]}"
    data = bytearray(stranger.get(name))
    data[-1] ^= 1
    stranger.set(name, bytes(data))
    result = call("verify", "--far")
    assert result.exit_code == 1
    assert f"damaged: {KEYS[1].hex()}" in result.output
    assert stranger.exists(name), "without --remove it stays"
    assert call("verify", "--far", "--remove").exit_code == 1
    assert not stranger.exists(name)
    assert "2 chunks with" in call("verify", "--far").output


def test_verify_finds_what_opens_and_is_no_sound_chunk(
    redis: RedisServer, settings: PoolSettings
) -> None:
    """What a host with the key puts is looked at as closely as a file of this host."""
    stranger, (name, other) = redis.client(), (f"pd:{SEAL.names(key)[0]}" for key in KEYS[:2])
    contents = SEAL.open(name[3:], memoryview(stranger.get(name)))
    contents[-1] ^= 1
    room = bytearray(SEAL.sealed_bytes(len(contents)))

    def read(buffer: memoryview, offset: int) -> None:
        buffer[:] = contents[offset : offset + len(buffer)]

    SEAL.seal(name[3:], len(contents), read, memoryview(room))
    stranger.set(name, bytes(room))
    result = call("verify", "--far")
    assert "differ from their sum" in result.output
    assert result.output.count("damaged: ") == 1
    assert other


def test_status_says_why_chunks_were_not_put_and_for_how_long_the_store_is_silent() -> None:
    console = Console(record=True, width=200, file=io.StringIO())
    counts = {"put": 3, "not_put": 2, "too_large": 1, "not_brought_late": 4}
    status = CarrierStatus(
        far="redis://h", sealed=True, problem="is gone", since_s=time.time() - 90, counts=counts
    )
    show_carrier(status, console)
    text = console.export_text()
    assert "not put: refused by it 2, too large for it 1\n" in text
    assert "not brought: late 4\n" in text
    assert re.search(r"cannot be used at the moment \(for \d+ s\): is gone", text)
    show_carrier(CarrierStatus(far="redis://h", sealed=True, counts={"put": 3}), console)
    text = console.export_text()
    assert "not put" not in text
    assert "cannot be used" not in text
