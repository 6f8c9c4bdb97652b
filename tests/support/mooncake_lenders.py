# SPDX-License-Identifier: Apache-2.0
"""Two hosts that lend memory to Mooncake, one of which recalls half of it: a program for a network namespace of its own. Prints
what it has found as JSON."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mooncake.store import ReplicateConfig

from pd_connector.pool.lending.lender import Lender
from pd_connector.pool.settings import SHM_VARIABLE
from support.mooncake_masters import client, mooncake_master, own_folder
from support.waits import until

MASTER, ADMIN, METRICS = 7961, 7962, 7963
ADDRESS = f"mooncake://127.0.0.1:{MASTER}?admin={ADMIN}"
OBJECTS, OBJECT_BYTES = 48, 2 << 20
WITHIN_S = 60


class LendingHost:
    """`pd-connector pool lend` of a host of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        shm = folder / name
        shm.mkdir()
        self.process: Any = None
        self.environment = {**os.environ, SHM_VARIABLE: str(shm), "PD_CONNECTOR_FAR": ADDRESS}

    def command(self, memory: str) -> list[str]:
        within = ["--recall-within", str(WITHIN_S)]
        return [sys.executable, "-m", "pd_connector", "pool", "lend", "--memory", memory, *within]

    def start(self, memory: str, *more: str) -> "LendingHost":
        self.process = subprocess.Popen(
            [*self.command(memory), *more], env=self.environment, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout
        self.ready = self.process.stdout.readline()
        return self

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def resize(self, memory: str) -> str:
        ended = subprocess.run(
            self.command(memory), env=self.environment, check=True, capture_output=True, text=True
        )
        return ended.stdout

    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


class HotReader(threading.Thread):
    """Reads objects again and again, and counts what it does not find."""

    def __init__(self, reader: Any, keys: list[str], contents: dict[str, bytes]) -> None:
        super().__init__(daemon=True)
        self._reader, self._keys, self._contents = reader, keys, contents
        self.rounds = self.missed = self.wrong = 0
        self.ends = threading.Event()

    def run(self) -> None:
        while not self.ends.wait(0.05):
            for key in self._keys:
                data = self._reader.get(key)
                self.missed += not data
                self.wrong += bool(data) and data != self._contents[key]
            self.rounds += 1


def absent(reader: Any, contents: dict[str, bytes]) -> int:
    return sum(reader.get(key) != data for key, data in contents.items())


def main() -> None:
    with (
        own_folder() as folder,
        # Leases of 2 s, so that what is not in use can be moved soon.
        mooncake_master(MASTER, "--metrics_port", str(ADMIN), "--default_kv_lease_ttl", "2000"),
    ):
        hosts = [LendingHost(folder, name) for name in "ab"]
        try:
            found = scene(*hosts) | {"control": without_copying(), "alone": last_node(hosts[1])}
            print("FOUND " + json.dumps(found), flush=True)
        finally:
            for host in hosts:
                host.end()
    os._exit(0)


def scene(lender: LendingHost, other: LendingHost) -> dict[str, Any]:
    lender.start("256MiB", "--metrics", f"127.0.0.1:{METRICS}")
    writer = client(MASTER)
    contents = {f"pd:{place:02}": os.urandom(OBJECT_BYTES) for place in range(OBJECTS)}
    assert all(writer.put(key, data) == 0 for key, data in contents.items())
    other.start("256MiB")
    hot = HotReader(client(MASTER), list(contents)[: OBJECTS // 4], contents)
    hot.start()
    until(lambda: hot.rounds > 1)
    full = lender.resident_bytes()
    began_s = time.monotonic()
    half = lender.resize("128MiB")
    found: dict[str, Any] = {
        "ready": lender.ready,
        "half": half,
        "half_s": time.monotonic() - began_s,
        "freed": full - lender.resident_bytes(),
        "absent": absent(writer, contents),
        "metrics": metrics(),
    }
    lender.process.send_signal(signal.SIGTERM)
    began_s = time.monotonic()
    found["end"] = lender.process.wait(WITHIN_S + 60)
    found["end_s"] = time.monotonic() - began_s
    hot.ends.set()
    hot.join()
    assert lender.process.stdout
    return found | {
        "rest": lender.process.stdout.read(),
        "absent_then": absent(writer, contents),
        "missed": hot.missed,
        "wrong": hot.wrong,
        "rounds": hot.rounds,
    }


def metrics() -> dict[str, float]:
    """What the first host tells Prometheus."""
    with urllib.request.urlopen(f"http://127.0.0.1:{METRICS}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return {
        name: float(value)
        for name, value in (line.split() for line in lines if not line.startswith("#"))
    }


def without_copying() -> int:
    """The control: how many of four hot objects a recall loses that drains only."""
    lender = Lender(urlsplit(ADDRESS), 64 << 20, 5.0)
    lender.lend(64 << 20)
    writer, near = client(MASTER), ReplicateConfig()
    near.preferred_segment = lender._pieces[0].name
    contents = {f"pd:control-{place}": os.urandom(OBJECT_BYTES) for place in range(4)}
    assert all(writer.put(key, data, near) == 0 for key, data in contents.items())
    hot = HotReader(client(MASTER), list(contents), contents)
    hot.start()
    until(lambda: hot.rounds > 1)
    lender._copy = lambda *_: (0, 0, "")  # type: ignore[method-assign]
    lender.recall(0, WITHIN_S)
    hot.ends.set()
    hot.join()
    return absent(writer, contents)


def last_node(host: LendingHost) -> str:
    """What it says when there is no other node."""
    host.process.send_signal(signal.SIGTERM)
    assert host.process.wait(WITHIN_S + 60) == 0
    return str(host.process.stdout.read())


if __name__ == "__main__":
    main()
