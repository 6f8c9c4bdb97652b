# SPDX-License-Identifier: Apache-2.0
"""Waiting for what another thread or process does."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def until(condition: Callable[[], Any], what: str = "", timeout_s: float = 60.0) -> Any:
    """Wait until `condition()` is true; returns what it returned."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what or condition}"
        time.sleep(0.005)
    return found


@contextmanager
def meanwhile(call: Any, *arguments: Any) -> Iterator[threading.Event]:
    """Call something in a thread; the event is set when it has returned."""
    returned = threading.Event()

    def run() -> None:
        call(*arguments)
        returned.set()

    thread = threading.Thread(target=run)
    thread.start()
    yield returned
    thread.join(60.0)
    assert returned.is_set()
