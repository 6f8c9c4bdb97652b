# SPDX-License-Identifier: Apache-2.0
"""`pd-connector pool carry`: refuses by name what it cannot use, serves until SIGTERM, and `pool status` shows it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.free_ports import free_ports
from support.redis_servers import redis_server
from support.waits import until
from typer.testing import CliRunner

from pd_connector.pool.settings import SHM_VARIABLE, load, make_above
from pd_connector.pool.store.local import LocalStore
from pd_connector.tools.cli import carry, pool

COMMAND = [sys.executable, "-m", "pd_connector", "pool"]


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    shm = tempfile.mkdtemp(prefix="pd-pool-test-", dir="/dev/shm")
    yield {**os.environ, SHM_VARIABLE: shm}
    shutil.rmtree(shm)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--far", "ftp://h"], "there are lmcache, mooncake, redis, rediss, s3"),
        (["--far", "redis://localhost", "--client-python", "/absent"], "--client-python /absent"),
        (["--far", "redis://:secret@10.0.0.1"], "without a key only this machine's loopback"),
        (["--far", "redis://localhost", "--key-file", "/absent"], "/absent: cannot be read"),
        (["--far", "redis://localhost", "--answers-within", "0"], "--answers-within"),
        (
            ["--far", "redis://localhost", "--metrics", "9105"],
            "--metrics '9105': must be HOST:PORT",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    environment: dict[str, str], arguments: list[str], found: str
) -> None:
    ended = subprocess.run(
        [*COMMAND, "carry", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode
    assert found in " ".join((ended.stdout + ended.stderr).split())
    assert "secret" not in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["carry", "--far", "redis://localhost"],
        ["lend", "--memory", "64MiB", "--far", "mooncake://h"],
    ],
)
def test_without_prometheus_client_metrics_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr(pool, "find_spec", lambda name: None)
    ended = CliRunner().invoke(pool.app, [*arguments, "--metrics", "127.0.0.1:0"])
    assert ended.exit_code == 2
    assert "pip install prometheus-client" in " ".join(ended.output.replace("│", "").split())


def test_without_an_engine_it_serves_the_disk_that_engines_have_used(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that lacked the disk, and was alone, would take the disk's chunks out of the catalog."""
    monkeypatch.setenv(SHM_VARIABLE, environment[SHM_VARIABLE])
    settings = load({"memory": "64MiB", "dir": str(tmp_path / "kv"), "disk": "64MiB"})
    assert settings is not None
    make_above(settings.memory.path)
    LocalStore(settings.memory, settings.disk).close()  # an engine
    for folder in (None, settings.disk.path if settings.disk else None):
        store, memory = carry._host_store(folder)
        try:
            assert memory == settings.memory.path
            assert [tier.name for tier in store.status().tiers] == ["memory", "disk"]
        finally:
            store.close()


def test_it_serves_until_it_is_told_to_end(environment: dict[str, str], tmp_path: Path) -> None:
    with redis_server(tmp_path) as redis:
        environment["PD_CONNECTOR_FAR"] = redis.address
        metrics = f"127.0.0.1:{free_ports(1)[0]}"
        carrier = subprocess.Popen(
            [*COMMAND, "carry", "--metrics", metrics],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert carrier.stdout
            line = carrier.stdout.readline()
            assert line.startswith("carrier ready: ")
            assert line.endswith("not sealed\n")
            # A carrier on a busy machine may not answer in time.
            shown = until(lambda: (one := status(environment)) and not one["problem"] and one)
            assert shown["far"] == redis.address
            with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=60) as answer:
                assert b"\npd_connector:carrier_far_up 1.0\n" in answer.read()
            carrier.send_signal(signal.SIGTERM)
            assert carrier.wait(60) == 0
        finally:
            carrier.kill()
            carrier.wait()
        assert status(environment) is None


def status(environment: dict[str, str]) -> dict[str, object] | None:
    printed = subprocess.run(
        [*COMMAND, "status", "--json"], env=environment, capture_output=True, text=True, check=True
    )
    carrier: dict[str, object] | None = json.loads(printed.stdout)["carrier"]
    return carrier


_INTERRUPTED = """
import signal, threading, types
from pathlib import Path
from pd_connector.tools.cli import carry

ready = []
wait = threading.Condition.wait

def interrupted(self, timeout=None):
    if ready and threading.current_thread() is threading.main_thread():
        signal.raise_signal(signal.SIGTERM)
    return wait(self, timeout)

def shows(*words, **how):
    print(*words, **how)
    ready.append(True)

part = types.SimpleNamespace(close=lambda: None, most_bytes=1)
threading.Condition.wait = interrupted
carry.print = shows
carry.Carrier = carry.CarrierServer = lambda *_: part
carry.far_address = lambda *_, **__: (part, None)
carry._host_store = lambda _: (part, Path("memory"))
carry.run("redis://127.0.0.1", None, 1.0, "", "", None)
"""


def test_a_signal_in_the_moment_in_which_it_begins_to_wait_ends_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTED], stdout=subprocess.PIPE, text=True
    ) as carrier:
        try:
            assert carrier.stdout
            assert carrier.stdout.readline().startswith("carrier ready")
            carrier.send_signal(signal.SIGTERM)
            assert carrier.wait(60) == 0
        finally:
            carrier.kill()
