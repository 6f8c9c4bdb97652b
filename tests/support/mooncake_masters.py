# SPDX-License-Identifier: Apache-2.0
"""A Mooncake master of a test, and clients without our key. Mooncake listens on all addresses: only in a network namespace."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mooncake.store import MooncakeDistributedStore

from support.waits import until


@contextmanager
def own_folder() -> Iterator[Path]:
    """The working folder of a program in a network namespace of its own, whose loopback is brought up."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with tempfile.TemporaryDirectory(
        prefix="pd-pool-test-", dir="/dev/shm", ignore_cleanup_errors=True
    ) as folder:
        os.chdir(folder)
        yield Path(folder)


@contextmanager
def mooncake_master(port: int, *more: str) -> Iterator[None]:
    """A master that answers."""
    program = [sys.executable, "-m", "mooncake.cli", "--port", str(port), *more]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    master = subprocess.Popen(program, **quiet)
    try:
        # A client that is set up before tries for 90 s.
        until(lambda: answers(port), "the master", 60)
        yield
    finally:
        master.kill()
        master.wait()


def answers(port: int) -> bool:
    with socket.socket() as channel:
        return channel.connect_ex(("127.0.0.1", port)) == 0


def client(port: int, lent: int = 0) -> Any:
    made = MooncakeDistributedStore()
    address = f"127.0.0.1:{port}"
    until(lambda: made.setup("127.0.0.1", "P2PHANDSHAKE", lent, 64 << 20, "tcp", "", address) == 0)
    return made
