# SPDX-License-Identifier: Apache-2.0
"""Faults at every process around Mooncake, between two hosts: a program for a network namespace of its own. Prints what it has seen
as JSON. Its argument is the number of faults."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from chunks import chain, loads, save

from pd_connector.errors import PoolError
from pd_connector.pool import load_breakeven
from pd_connector.pool.carrier import client as far_client
from support.far_hosts import KEY, Host
from support.mooncake_masters import answers, client, own_folder
from support.mooncake_site import ADDRESS, MASTER, be_patient
from support.waits import until

_CHUNKS = 4
_LENDS = """
import signal
from support.mooncake_masters import client
from support.mooncake_site import MASTER
lent = client(MASTER, 128 << 20)
print("lent", flush=True)
signal.pause()
"""


class Site:
    """A master, a node that lends memory, and two hosts."""

    def __init__(self, folder: Path) -> None:
        self.start_master()
        until(lambda: answers(MASTER), "the master", 60)
        self.start_node()
        self.hosts = [Host(folder / name, ADDRESS, (KEY,), 64 << 20, 0.5) for name in "ab"]

    def start_master(self) -> None:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        program = [sys.executable, "-m", "mooncake.cli"]
        self.master = subprocess.Popen(
            [*program, "--port", str(MASTER), "--metrics_port", "7952"],
            start_new_session=True,
            **quiet,
        )

    def start_node(self) -> None:
        self.node = subprocess.Popen(
            [sys.executable, "-c", _LENDS], stderr=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        assert self.node.stdout
        self.node.stdout.readline()

    def end_master(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.master.pid, signal.SIGKILL)
        self.master.wait()

    def end_node(self) -> None:
        self.node.kill()
        self.node.wait()

    def children(self, rng: random.Random) -> list[int]:
        return rng.choice(self.hosts).carrier.children()

    def ready(self) -> bool:
        return all(len(host.carrier.children()) == 3 for host in self.hosts)

    def close(self) -> None:
        for host in self.hosts:
            host.close()
        self.end_node()
        self.end_master()


def stopped(pids: list[int], rng: random.Random) -> None:
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if number == signal.SIGSTOP:
            time.sleep(rng.uniform(0.05, 1.2))


def master_stopped(site: Site, rng: random.Random) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(site.master.pid, signal.SIGSTOP)
        time.sleep(rng.uniform(0.05, 1.2))
        os.killpg(site.master.pid, signal.SIGCONT)


def node_stopped(site: Site, rng: random.Random) -> None:
    stopped([site.node.pid], rng)


def child_stopped(site: Site, rng: random.Random) -> None:
    stopped(site.children(rng)[:1], rng)


def child_killed(site: Site, rng: random.Random) -> None:
    for pid in site.children(rng):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def putter_killed(site: Site, rng: random.Random) -> None:
    """In the middle of a put, if it meets one."""
    with contextlib.suppress(ProcessLookupError, IndexError):
        os.kill(site.hosts[0].carrier.children()[-1], signal.SIGKILL)


def all_removed(site: Site, rng: random.Random) -> None:
    """Evicted between `find` and `bring`."""
    with contextlib.suppress(Exception):
        stranger = client(MASTER)
        stranger.remove_all(True)
        stranger.close()


def master_killed(site: Site, rng: random.Random) -> None:
    site.end_master()
    time.sleep(rng.uniform(0, 0.3))
    site.start_master()


def node_killed(site: Site, rng: random.Random) -> None:
    site.end_node()
    time.sleep(rng.uniform(0, 0.3))
    site.start_node()


FAULTS: list[Callable[[Site, random.Random], None]] = [
    master_stopped, child_killed, all_removed, node_stopped, putter_killed, child_stopped, node_killed, master_killed,
]  # fmt: skip


def step(site: Site, number: int, rng: random.Random, seen: Counter[str]) -> float:
    """One fault while a host saves and the other one reads. Returns the longest wait, in seconds."""
    writer, reader = site.hosts
    keys = chain(f"step {number}", _CHUNKS)
    thread = threading.Timer(rng.uniform(0, 0.8), FAULTS[number % len(FAULTS)], (site, rng))
    thread.start()
    assert save(writer.own, keys, nbytes=200_000) == _CHUNKS, "a host saves whatever is afar"
    time.sleep(rng.uniform(0.2, 0.8))
    reader.store.find(keys)
    time.sleep(0.05)
    began_s = time.monotonic()
    hit = sum(each is not None for each in reader.store.find(keys))
    longest_s = time.monotonic() - began_s
    for key in keys[:hit]:
        began_s = time.monotonic()
        try:
            found = reader.store.bring(key)
        except PoolError as error:
            seen[str(error.cause)] += 1
            break
        finally:
            longest_s = max(longest_s, time.monotonic() - began_s)
        if found is not None:
            seen["right" if loads(reader.store, key) else "wrong"] += 1
    thread.join()
    return longest_s


def came(reader: Host, keys: list[bytes]) -> int:
    """Chunks that the reader's host has now."""
    there = sum(map(bool, reader.store.find(keys)))
    with contextlib.suppress(PoolError):
        return sum(bool(reader.store.bring(key)) for key in keys[:there])
    return 0


def main(faults: int) -> None:
    far_client._FIRST_PAUSE_S = far_client._LONGEST_PAUSE_S = 0.1
    load_breakeven.FIRST_PAUSE_S = load_breakeven.LONGEST_PAUSE_S = 0.1
    with own_folder() as folder:
        site = Site(folder)
        try:
            rng, seen = random.Random(23), Counter[str]()
            longest_s = 0.0
            for number in range(faults):
                with contextlib.suppress(AssertionError):
                    until(site.ready, "far clients", 10)
                longest_s = max(longest_s, step(site, number, rng, seen))
            until(site.ready, "far clients", 120)
            writer, reader = site.hosts
            keys = chain("afterwards", _CHUNKS)
            save(writer.own, keys, nbytes=200_000)
            be_patient()
            until(lambda: came(reader, keys) == _CHUNKS, "all is well again", 120)
            after = sum(loads(reader.store, key) for key in keys)
            print(
                "SEEN " + json.dumps({**seen, "longest_s": longest_s, "after": after}), flush=True
            )
        finally:
            site.close()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
