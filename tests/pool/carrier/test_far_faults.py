# SPDX-License-Identifier: Apache-2.0
"""Faults at every step of two hosts with carriers of their own and a real far store: nothing is wrong, nobody waits long, and all is
well afterwards. `PD_POOL_FAULTS=1000` runs the long form."""

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from chunks import chain, loads, save
from support.namespaces import Star
from support.redis_servers import MISSING, redis_server
from support.waits import until

from pd_bench.netns import available
from pd_connector.errors import Miss, PoolError
from pd_connector.pool.carrier import asking
from pd_connector.pool.carrier.asking import BRING_S, FIND_S, SILENT_S
from pd_connector.pool.far import mooncake_client
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

    def __init__(
        self, shm: Path, far: str, key: Path, prefix: Sequence[str] = (), within_s: float = 0.25
    ) -> None:
        shm.mkdir()
        self.environment = {**os.environ, SHM_VARIABLE: str(shm), "PD_CONNECTOR_FAR": far}
        memory = memory_folder({SHM_VARIABLE: str(shm)})
        memory.parent.mkdir(mode=0o700)
        self.own = LocalStore(Space(memory, 64 << 20))
        self.store = ReachingStore(self.own, memory)
        self.command = [*prefix, sys.executable, "-c", _PROGRAM, "pool", "carry"]
        self.command += ["--key-file", str(key), "--answers-within", str(within_s)]
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
    """Two hosts.

    Attributes:
        cut: set when a partition has begun.
        read: set when the reader has read what it can: a partition lasts until then.
    """

    def __init__(self, folder: Path, opened: ExitStack) -> None:
        self.folder, self.opened = folder, opened
        self.key = folder / "key"
        self.key.write_text(secrets.token_hex(32))
        self.key.chmod(0o600)
        self.hosts: list[Carried] = []
        self.cut, self.read = threading.Event(), threading.Event()

    def add(self, name: str, far: str, *more: Any) -> Carried:
        host = Carried(self.folder / name, far, self.key, *more)
        self.opened.callback(host.close)
        self.hosts.append(host)
        return host

    def settled(self) -> None:
        until(lambda: all(host.ready() for host in self.hosts), "carriers and far clients", 180)


class RedisSite(Site):
    """With Redis on loopback."""

    def __init__(self, folder: Path, opened: ExitStack) -> None:
        super().__init__(folder, opened)
        self.redis = opened.enter_context(redis_server(folder))
        for name in "ab":
            self.add(name, self.redis.address)


class StarSite(Site):
    """Each host in a namespace of its own, and the far store in a third one."""

    def __init__(self, folder: Path, opened: ExitStack, store: str) -> None:
        super().__init__(folder, opened)
        self.star = opened.enter_context(Star("a", "b"))
        self.far = f"{store}://{self.star.middle}:7951"
        for command in _SERVERS[store]:
            with (folder / "store.log").open("ab") as log:
                words = [*self.star.prefix(), *command]
                server = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
            opened.callback(ended, server)
        for name in "ab":
            self.add(name, self.far, self.star.prefix(name))


_LENDS = """
import signal, sys, time
from mooncake.store import MooncakeDistributedStore
own, master = sys.argv[1:]
while True:
    lent = MooncakeDistributedStore()
    if lent.setup(own, "P2PHANDSHAKE", 256 << 20, 64 << 20, "tcp", "", master) == 0:
        break
    time.sleep(0.2)
signal.pause()
"""
_SERVERS = {
    "redis": [
        ["redis-server", "--port", "7951", "--bind", Star.middle, "--protected-mode", "no", "--save", ""],
    ],
    "mooncake": [
        [sys.executable, "-m", "mooncake.cli", "--port", "7951", "--metrics_port", "7952"],
        [sys.executable, "-c", _LENDS, Star.middle, f"{Star.middle}:7951"],
    ],
}  # fmt: skip


def ended(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def in_memory() -> Iterator[tuple[Path, ExitStack]]:
    folder = Path(tempfile.mkdtemp(prefix="pd-pool-test-", dir="/dev/shm"))
    with ExitStack() as opened:
        yield folder, opened
    shutil.rmtree(folder)


@pytest.fixture
def site() -> Iterator[RedisSite]:
    with in_memory() as where:
        yield RedisSite(*where)


@pytest.fixture(params=list(_SERVERS))
def star_site(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StarSite]:
    if request.param == "redis":
        pytest.importorskip("redis", reason=MISSING)
        if not shutil.which("redis-server"):
            pytest.skip(MISSING)
    elif mooncake_client.MooncakeDistributedStore is None:
        pytest.skip("needs Mooncake's client (ci/setup-tests)")
    if reason := available():
        pytest.skip(f"no network namespaces here: {reason}")
    paths = [os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[3] / ".venv/far")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    with in_memory() as where:
        folder, opened = where
        try:
            site = StarSite(folder, opened, request.param)
        except subprocess.CalledProcessError as error:  # a kernel without bridges
            pytest.skip(f"no network of three namespaces here: {error.stderr or error}")
        yield site


def stopped(pid: int, rng: random.Random) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(rng.uniform(0.05, 0.8))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def server_stopped(site: RedisSite, rng: random.Random) -> None:
    stopped(site.redis.process.pid, rng)


def server_killed(site: RedisSite, rng: random.Random) -> None:
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


def evicted(site: RedisSite, rng: random.Random) -> None:
    with contextlib.suppress(Exception):
        site.redis.client().flushall()


def altered(site: RedisSite, rng: random.Random) -> None:
    with contextlib.suppress(Exception):
        stranger = site.redis.client()
        for name in stranger.keys("*"):
            stranger.setrange(name, rng.randrange(stranger.strlen(name)), rng.randbytes(3))


FAULTS: list[Callable[[Any, random.Random], None]] = [
    server_stopped, server_killed, child_killed, child_stopped, carrier_stopped, carrier_killed, evicted, altered,
]  # fmt: skip


def partitioned(names: str, how: str) -> Callable[[StarSite, random.Random], None]:
    """Hosts whose links to the far store are cut until the reader has read."""

    def fault(site: StarSite, rng: random.Random) -> None:
        for name in names:
            site.star.cut(name, how)
        site.cut.set()
        site.read.wait(120)
        for name in names:
            site.star.mend(name)

    return fault


PARTITIONS = [partitioned(names, how) for how in Star.CUTS for names in ("a", "b", "ab")]


def meets(
    site: Site,
    faults: Sequence[Callable[[Any, random.Random], None]],
    steps: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    parts: bool = False,
) -> Counter[str]:
    """A host saves while the other one reads, and a fault meets them, in each step. Returns what became of chunks.

    Args:
        parts: whether faults are partitions. Half of them begin between a look-up and its load.
    """
    for name in ("FIRST_PAUSE_S", "LONGEST_PAUSE_S"):  # a store that was silent is asked again soon
        monkeypatch.setattr(f"pd_connector.pool.load_breakeven.{name}", 0.1)
    site.settled()
    patient = {name: getattr(asking, name) for name in WAITS}
    for name, seconds in WAITS.items():
        monkeypatch.setattr(asking, name, seconds)
    rng, seen = random.Random(17), Counter[str]()
    writer, reader = site.hosts
    longest_s = 0.0
    for step in range(steps):
        keys, fault = chain(f"step {step}", _CHUNKS), faults[step % len(faults)]
        with contextlib.suppress(AssertionError):
            until(lambda: all(host.ready() for host in site.hosts), timeout_s=10)
        site.cut.clear()
        site.read.clear()
        between = parts and rng.random() < 0.5
        thread = threading.Timer(0 if between else rng.uniform(0, 0.8), fault, (site, rng))
        if not between:
            thread.start()
        assert save(writer.own, keys, nbytes=200_000) == _CHUNKS, "a host saves whatever is afar"
        time.sleep(rng.uniform(0.2, 0.8))
        if between:
            until(lambda: all(reader.store.find(keys)), "chunks that a load can look for", 120)  # noqa: B023
        for _ in range(2):  # the first one is a probe, if the far store was silent
            began_s = time.monotonic()
            hit = sum(each is not None for each in reader.store.find(keys))
            longest_s = max(longest_s, time.monotonic() - began_s)
            time.sleep(0.05)
        if between:
            thread.start()
            assert site.cut.wait(60)
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
        site.read.set()
        thread.join()
    print(f"{steps} faults: {dict(seen)}, longest wait {longest_s:.2f} s")
    assert longest_s < 60, "nobody waits without end"
    for name, seconds in patient.items():
        monkeypatch.setattr(asking, name, seconds)
    site.settled()
    keys = chain("afterwards", _CHUNKS)
    save(writer.own, keys, nbytes=200_000)
    come(reader, keys)
    return seen


def come(reader: Carried, keys: Sequence[bytes]) -> None:
    """All of these chunks come from the far store, and are right."""

    def is_here(key: bytes) -> bool:
        with contextlib.suppress(
            PoolError
        ):  # a client whose connection has broken, or a node that is not known yet
            return reader.store.bring(key) is not None
        return False

    until(lambda: all(map(is_here, keys)), "all is well again", 90)
    assert all(loads(reader.store, key) for key in keys)


def test_faults_cost_misses_only(site: RedisSite, monkeypatch: pytest.MonkeyPatch) -> None:
    meets(site, FAULTS, STEPS, monkeypatch)


@pytest.mark.netns
def test_partitions_cost_misses_only(star_site: StarSite, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = meets(star_site, PARTITIONS, STEPS + 1, monkeypatch, parts=True)
    assert seen["late"], "a load has met a partition"
    reader = star_site.hosts[1]
    for step in range(max(0, STEPS - 4), STEPS + 1):  # as long as the writer has them
        come(reader, chain(f"step {step}", _CHUNKS))


@pytest.mark.netns
@pytest.mark.parametrize("star_site", ["redis"], indirect=True)
def test_without_deadlines_a_reader_waits_as_long_as_a_partition_lasts(star_site: StarSite) -> None:
    """The control: the deadlines end the waits above, not the network."""
    star = star_site.star
    patient = star_site.add("c", star_site.far, star.prefix("b"), 30.0)
    star_site.settled()
    writer, reader, _ = star_site.hosts
    keys = chain("prompt", 2)
    assert save(writer.own, keys, nbytes=200_000) == 2
    for host in (reader, patient):
        until(lambda: sum(map(bool, host.store.find(keys))) == 2, "found")  # noqa: B023
    star.cut("b", "detached")
    answers: dict[str, object] = {}

    def bring(name: str, host: Carried) -> None:
        try:
            answers[name] = host.store.bring(keys[0])
        except PoolError as error:
            answers[name] = error.cause

    threads = [
        threading.Thread(target=bring, args=each)
        for each in (("deadlines", reader), ("none", patient))
    ]
    for thread in threads:
        thread.start()
    threads[0].join(20)
    assert answers == {"deadlines": Miss.LATE}
    star.mend("b")
    threads[1].join(60)
    assert loads(patient.store, keys[0])
