# SPDX-License-Identifier: Apache-2.0
"""Ranks in processes of their own, to be killed, stopped and started again."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from support.agents import Rank
from support.transports import MeddlingTransport
from support.waits import until

FORKS = multiprocessing.get_context("forkserver")
"""Makes processes that are forked from one which has imported the agent: the import takes seconds."""
FORKS.set_forkserver_preload(["pd_connector.agent.agent"])


class Child:
    """A rank in another process. Calls are made there; results must be picklable."""

    def __init__(
        self,
        settings: dict[str, Any],
        chunks: int | None,
        before: Callable[[], object],
        options: dict[str, Any],
    ) -> None:
        self._pipe, theirs = FORKS.Pipe()
        told = theirs, settings, chunks, before, options
        self._process = FORKS.Process(target=_live, args=told)
        self._process.start()
        theirs.close()

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the rank (or read an attribute) and wait for the result."""
        self._pipe.send((method, args, kwargs))
        assert self._pipe.poll(60), f"{method} returns"
        return self._pipe.recv()

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)
        if number == signal.SIGSTOP:  # its threads may run on for a moment
            until(self._stopped, "all threads are stopped")

    def _stopped(self) -> bool:
        try:
            stats = [
                (thread / "stat").read_text()
                for thread in Path(f"/proc/{self._process.pid}/task").iterdir()
            ]
        except FileNotFoundError:  # a thread has just ended
            return False
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.join()

    def end(self) -> None:
        if self._process.is_alive():
            self.kill()
        self._process.join()
        self._process.close()
        self._pipe.close()


class Children:
    """Starts children, and ends those that are left."""

    def __init__(self) -> None:
        self._started: list[Child] = []

    def __call__(
        self,
        settings: dict[str, Any],
        *,
        chunks: int | None = None,
        before: Callable[[], object] = int,
        **options: Any,
    ) -> Child:
        """A child that writes the first `chunks` chunks and swallows all others (None: writes all). It calls
        `before` before it makes its rank."""
        child = Child(settings, chunks, before, options)
        self._started.append(child)
        return child

    def end(self) -> None:
        for child in self._started:
            child.end()


@pytest.fixture(scope="session")
def nursery() -> None:
    """The process that children are forked from: before any test counts descriptors."""
    forkserver.ensure_running()


@pytest.fixture
def children(nursery: None) -> Iterator[Children]:
    made = Children()
    yield made
    made.end()


def _live(
    pipe: Connection,
    settings: dict[str, Any],
    chunks: int | None,
    before: Callable[[], object],
    options: dict[str, Any],
) -> None:
    before()
    written: list[int] = []

    def meddle(header: bytes, payload: bytes, slot: int) -> tuple[bytes, bytes, int] | None:
        written.append(slot)
        return (header, payload, slot) if chunks is None or len(written) <= chunks else None

    rank = Rank(settings, wrap=lambda inner: MeddlingTransport(inner, meddle), **options)
    while True:
        try:
            method, args, kwargs = pipe.recv()
        except EOFError:
            break
        found = getattr(rank, method)
        pipe.send(found(*args, **kwargs) if callable(found) else found)
    rank.agent.close()
