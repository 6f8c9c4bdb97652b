# SPDX-License-Identifier: Apache-2.0
"""Hosts that reach a Redis server. Engines wait for a carrier as long as a busy machine takes."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.far_hosts import KEY, Host, NewHost
from support.redis_servers import RedisServer, redis_server

from pd_connector.pool.carrier import asking


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIND_S", "SILENT_S", "BRING_S"):
        monkeypatch.setattr(asking, name, 30.0)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as server:
        yield server


@contextmanager
def hosts_of(redis: RedisServer) -> Iterator[NewHost]:
    """Starts hosts that reach a server."""
    folder = Path(tempfile.mkdtemp(prefix="pd-pool-test-", dir="/dev/shm"))
    with ExitStack() as opened:

        def starts(
            name: str,
            keys: tuple[bytes, ...] = (KEY,),
            memory: int = 64 << 20,
            deadline_s: float = 30.0,
        ) -> Host:
            host = Host(folder / name, redis.address, keys, memory, deadline_s)
            opened.callback(host.close)
            return host.ready()

        yield starts
    shutil.rmtree(folder)


@pytest.fixture
def new_host(redis: RedisServer) -> Iterator[NewHost]:
    """Starts a host that reaches the Redis server of the test."""
    with hosts_of(redis) as starts:
        yield starts


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host, RedisServer]]:
    """Two hosts and their server, for several tests."""
    with (
        redis_server(tmp_path_factory.mktemp("pair")) as server,
        hosts_of(server) as starts,
    ):
        yield starts("a"), starts("b"), server
