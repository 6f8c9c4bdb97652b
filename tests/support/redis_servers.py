# SPDX-License-Identifier: Apache-2.0
"""Redis servers of tests, on loopback."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

MISSING = "needs the package redis and a redis-server (Debian: apt install redis-server)"


class RedisServer:
    """A server that keeps nothing on a disk."""

    def __init__(self, port: int, folder: Path, *settings: str) -> None:
        self.port = port
        program = shutil.which("redis-server")
        assert program
        quiet = ("--save", "", "--appendonly", "no", "--bind", "127.0.0.1", "--dir", str(folder))
        self._command = [program, "--port", str(port), *quiet, *settings]
        self._log = folder / f"redis-{port}.log"
        self.start()

    @property
    def address(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def log(self) -> str:
        """What the server has said."""
        return self._log.read_text()

    def client(self) -> Any:
        """A stranger's client."""
        import redis

        return redis.Redis(port=self.port, socket_timeout=10)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def redis_server(folder: Path, *settings: str) -> Iterator[RedisServer]:
    """A server on a free port. Skips the test where there is none."""
    pytest.importorskip("redis", reason=MISSING)
    if not shutil.which("redis-server"):
        pytest.skip(MISSING)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = RedisServer(port, folder, *settings)
    try:
        until_s = time.monotonic() + 20
        while time.monotonic() < until_s:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.02)
        else:
            pytest.fail(f"redis-server does not answer: {server.log()}")
        yield server
    finally:
        server.stop()
