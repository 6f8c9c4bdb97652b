# SPDX-License-Identifier: Apache-2.0
"""Faults at every step of two hosts with carriers of their own and a real Redis: nothing is wrong, nobody waits long, and all is well
afterwards. `PD_POOL_FAULTS=1000` runs the long form."""

import contextlib
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from chunks import chain, loads, save
from support.redis_servers import RedisServer, redis_server
from support.waits import until

from pd_connector.errors import PoolError
from pd_connector.pool.carrier import asking
from pd_connector.pool.carrier.asking import BRING_S, FIND_S, SILENT_S
from pd_connector.pool.settings import SHM_VARIABLE, memory_folder
from pd_connector.pool.store.local import LocalStore, Space
from pd_connector.pool.store.reaching import ReachingStore

STEPS = int(os.environ.get("PD_POOL_FAULTS", "8"))
_CHUNKS = 4
WAITS = {"FIND_S": FIND_S, "SILENT_S": SILENT_S, "BRING_S": BRING_S}
"""As engines have them while faults happen."""
_PROGRAM = """
import sys
import pd_connector.pool.carrier.client as client
client._FIRST_PAUSE_S = client._LONGEST_PAUSE_S = 0.1
from pd_connector.tools.cli.app import main
sys.argv[0] = "pd-connector"
main()
"""
"""A carrier that opens a broken client again at once, so that faults meet work."""


class Carried:
    """A host whose carrier is a process."""

    def __init__(self, shm: Path, redis: RedisServer, key: Path) -> None:
        shm.mkdir()
        self.environment = {
            **os.environ,
            SHM_VARIABLE: str(shm),
            "PD_CONNECTOR_FAR": redis.address,
        }
        memory = memory_folder({SHM_VARIABLE: str(shm)})
        memory.parent.mkdir(mode=0o700)
        self.own = LocalStore(Space(memory, 64 << 20))
        self.store = ReachingStore(self.own, memory)
        self.command = [sys.executable, "-c", _PROGRAM, "pool", "carry"]
        self.command += ["--key-file", str(key), "--answers-within", "0.25"]
        self.log = shm / "carrier.log"
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.carrier = subprocess.Popen(
                self.command, env=self.environment, stdout=log, stderr=log
            )

    def children(self) -> list[int]:
        path = Path(f"/proc/{self.carrier.pid}/task")
        found: list[int] = []
        with contextlib.suppress(OSError):
            for task in path.iterdir():
                found += map(int, (task / "children").read_text().split())
        return found

    def ready(self) -> bool:
        status = self.store.carrier.status()
        return status is not None and not status.problem

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.carrier.send_signal(signal.SIGCONT)
        self.carrier.terminate()
        self.carrier.wait(30)
        self.store.close()


class Site:
    def __init__(self, folder: Path, opened: ExitStack) -> None:
        key = folder / "key"
        key.write_text(secrets.token_hex(32))
        key.chmod(0o600)
        self.redis = opened.enter_context(redis_server(folder))
        self.hosts = []
        for name in "ab":
            host = Carried(folder / name, self.redis, key)
            opened.callback(host.close)
            self.hosts.append(host)

    def settled(self) -> None:
        until(lambda: all(host.ready() for host in self.hosts), "carriers and far clients", 120)


@pytest.fixture
def site() -> Iterator[Site]:
    folder = Path(tempfile.mkdtemp(prefix="pd-pool-test-", dir="/dev/shm"))
    with ExitStack() as opened:
        yield Site(folder, opened)
    shutil.rmtree(folder)


def stopped(pid: int, rng: random.Random) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(rng.uniform(0.05, 0.8))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def server_stopped(site: Site, rng: random.Random) -> None:
    stopped(site.redis.process.pid, rng)


def server_killed(site: Site, rng: random.Random) -> None:
    site.redis.stop()
    time.sleep(rng.uniform(0, 0.3))
    site.redis.start()


def child_killed(site: Site, rng: random.Random) -> None:
    for child in rng.choice(site.hosts).children():
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def child_stopped(site: Site, rng: random.Random) -> None:
    if children := rng.choice(site.hosts).children():
        stopped(rng.choice(children), rng)


def carrier_stopped(site: Site, rng: random.Random) -> None:
    stopped(rng.choice(site.hosts).carrier.pid, rng)


def carrier_killed(site: Site, rng: random.Random) -> None:
    host = rng.choice(site.hosts)
    host.carrier.kill()
    host.carrier.wait()
    host.start()


def evicted(site: Site, rng: random.Random) -> None:
    with contextlib.suppress(Exception):
        site.redis.client().flushall()


def altered(site: Site, rng: random.Random) -> None:
    with contextlib.suppress(Exception):
        stranger = site.redis.client()
        for name in stranger.keys("*"):
            stranger.setrange(name, rng.randrange(stranger.strlen(name)), rng.randbytes(3))


FAULTS: list[Callable[[Site, random.Random], None]] = [
    server_stopped, server_killed, child_killed, child_stopped, carrier_stopped, carrier_killed, evicted, altered,
]  # fmt: skip


def test_faults_cost_misses_only(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_PAUSE_S", "LONGEST_PAUSE_S"):  # a store that was silent is asked again soon
        monkeypatch.setattr(f"pd_connector.pool.load_breakeven.{name}", 0.1)
    site.settled()
    patient = {name: getattr(asking, name) for name in WAITS}
    for name, seconds in WAITS.items():
        monkeypatch.setattr(asking, name, seconds)
    rng, seen = random.Random(17), Counter[str]()
    writer, reader = site.hosts
    longest_s = 0.0
    for step in range(STEPS):
        keys, fault = chain(f"step {step}", _CHUNKS), FAULTS[step % len(FAULTS)]
        with contextlib.suppress(AssertionError):
            until(lambda: all(host.ready() for host in site.hosts), timeout_s=10)
        thread = threading.Timer(rng.uniform(0, 0.8), fault, (site, rng))
        thread.start()
        assert save(writer.own, keys, nbytes=200_000) == _CHUNKS, "a host saves whatever is afar"
        time.sleep(rng.uniform(0.2, 0.8))
        reader.store.find(keys)  # a probe, if the far store was silent
        time.sleep(0.05)
        began_s = time.monotonic()
        hit = sum(each is not None for each in reader.store.find(keys))
        longest_s = max(longest_s, time.monotonic() - began_s)
        for key in keys[:hit]:
            began_s = time.monotonic()
            try:
                found = reader.store.bring(key)
            except PoolError as error:
                seen[str(error.cause)] += 1
                break
            finally:
                longest_s = max(longest_s, time.monotonic() - began_s)
            assert found is None or loads(reader.store, key), "wrong bytes"
            seen["right"] += found is not None
        thread.join()
    print(f"{STEPS} faults: {dict(seen)}, longest wait {longest_s:.2f} s")
    assert longest_s < 60, "nobody waits without end"
    for name, seconds in patient.items():
        monkeypatch.setattr(asking, name, seconds)
    site.settled()
    keys = chain("afterwards", _CHUNKS)
    save(writer.own, keys, nbytes=200_000)
    until(lambda: sum(map(bool, reader.store.find(keys))) == _CHUNKS, "all is well again", 90)
    assert all(reader.store.bring(key) and loads(reader.store, key) for key in keys)
