# SPDX-License-Identifier: Apache-2.0
"""Threads that move KV go before pollers, where the process may ask for it."""

import contextlib
import os
import platform
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from support.agents import Ranks, ranks
from support.waits import until

from pd_connector.agent.pool_loads import Readers
from pd_connector.agent.thread_priority import (
    prefer_own_threads,
    prefer_short_slices,
    prefer_short_turns,
)

__all__ = ["ranks"]

KERNEL = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])


def nice_of(thread: int | str) -> int:
    return os.getpriority(os.PRIO_PROCESS, int(thread))


def names() -> set[str]:
    """Names of this process's threads."""
    return {(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}


def asked_in_a_thread() -> tuple[bool, int]:
    found: list[tuple[bool, int]] = []

    def ask() -> None:
        allowed = prefer_own_threads()
        prefer_short_slices()
        found.append((allowed, nice_of(threading.get_native_id())))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.skipif(
    KERNEL < (6, 12)
    or platform.machine() not in ("x86_64", "aarch64")
    or not Path("/proc/self/sched").exists(),
    reason="the kernel grants no slices",
)
def test_the_kernel_grants_the_asking_thread_a_short_slice_and_its_priority_stays():
    found: list[tuple[bool, str, int]] = []

    def ask() -> None:
        thread = threading.get_native_id()
        agreed = prefer_short_slices()
        found.append((agreed, Path(f"/proc/self/task/{thread}/sched").read_text(), nice_of(thread)))

    before = nice_of(threading.get_native_id())
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    ((agreed, told, nice),) = found
    assert agreed
    assert nice == before
    assert re.search(r"se\.slice\s*:\s*100000\b", told), told


def test_the_asking_thread_and_zeromqs_go_first_and_no_other():
    before = nice_of(threading.get_native_id())
    with zmq.Context() as context, context.socket(zmq.DEALER):
        until(lambda: "ZMQbg/IO/0" in names(), "ZeroMQ's thread has named itself")
        allowed, nice = asked_in_a_thread()
        if not allowed:
            pytest.skip("this process is not allowed to raise priorities")
        assert nice == -10
        by_name: dict[str, set[int]] = {}
        for task in Path("/proc/self/task").iterdir():
            # Threads of other tests, and the one above, may end while this looks at them.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                name = (task / "comm").read_text().strip()
                by_name.setdefault(name, set()).add(nice_of(task.name))
        assert -10 in by_name["ZMQbg/IO/0"]
        assert nice_of(threading.get_native_id()) == before


def test_threads_that_the_asking_thread_starts_have_the_engines_priority():
    found: list[int] = []

    def ask() -> None:
        prefer_own_threads()
        prefer_short_slices()
        child = threading.Thread(target=lambda: found.append(nice_of(threading.get_native_id())))
        child.start()
        child.join()

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    # The kernel takes back what was granted to 0, whatever priority the engine has.
    assert found[0] in {0, nice_of(threading.get_native_id())}


def test_threads_that_read_chunks_of_the_pool_go_first():
    threads = Readers().threads
    allowed, nice = asked_in_a_thread()
    if not allowed:
        pytest.skip("this process is not allowed to raise priorities")
    assert threads.submit(lambda: nice_of(threading.get_native_id())).result() == nice
    threads.shutdown()


def test_where_it_may_not_nothing_changes(monkeypatch: pytest.MonkeyPatch):
    def refuse(*what: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    assert asked_in_a_thread() == (False, nice_of(0))


@pytest.fixture
def pythons_own() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("pythons_own")
def test_turns_are_made_shorter_and_never_longer():
    for longest_ms, found_s in ((5.0, 0.005), (0.5, 0.0005), (2.0, 0.0005), (0.1, 0.0001)):
        prefer_short_turns(longest_ms)
        assert sys.getswitchinterval() == pytest.approx(found_s)


@pytest.mark.usefixtures("pythons_own")
@pytest.mark.parametrize(("setting_ms", "found_s"), [(5.0, 0.005), (0.5, 0.0005)])
def test_an_agent_asks_for_what_its_config_says(ranks: Ranks, setting_ms: float, found_s: float):
    producer, consumer = ranks.pair({"switch_interval_ms": setting_ms})
    producer.offer("r", pages=(0,))
    consumer.load(producer.source, "r", pages=(1,))
    assert consumer.loaded("r").cause is None  # both threads have begun
    assert sys.getswitchinterval() == pytest.approx(found_s)
