# SPDX-License-Identifier: Apache-2.0
"""Threads that move KV go before pollers, where the process may ask for it."""

import contextlib
import os
import threading
from pathlib import Path

import pytest
import zmq

from pd_connector.agent.thread_priority import prefer_own_threads, prefer_short_slices


def nice_of(thread: int | str) -> int:
    return os.getpriority(os.PRIO_PROCESS, int(thread))


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


def test_the_asking_thread_and_zeromqs_go_first_and_no_other():
    before = nice_of(threading.get_native_id())
    with zmq.Context() as context, context.socket(zmq.DEALER):
        allowed, nice = asked_in_a_thread()
        if not allowed:
            pytest.skip("this process may not raise priorities")
        assert nice == -10
        by_name: dict[str, set[int]] = {}
        for task in Path("/proc/self/task").iterdir():
            # Threads of other tests, and the one above, may end while this looks at them.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                name = (task / "comm").read_text().strip()
                by_name.setdefault(name, set()).add(nice_of(task.name))
        assert -10 in by_name["ZMQbg/IO/0"]
        assert nice_of(threading.get_native_id()) == before


def test_where_it_may_not_nothing_changes(monkeypatch: pytest.MonkeyPatch):
    def refuse(*what: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    assert asked_in_a_thread() == (False, nice_of(0))
