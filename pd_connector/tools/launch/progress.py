# SPDX-License-Identifier: Apache-2.0
"""Shows progress while services start, or work is done: spinners, or plain lines without a terminal.

It never stands still for long: at least every BEAT_S it shows the seconds, and the services that it waits for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from pd_connector.tools.launch.service import (
    POLL_S,
    READY_TIMEOUT_S,
    Service,
    StartError,
    stop_services,
)

BEAT_S = 7.0
"""Longest time without a line where there is no terminal, but for a poll."""


class Display(Protocol):
    """Shows what one service is doing."""

    def __call__(self, service: Service, phase: str, line: str, *, done: bool = False) -> None: ...


def wait_all(services: Iterable[Service], console: Console | None = None) -> None:
    """Wait until all services, which are already started, answer. Show their progress meanwhile.

    Raises:
        StartError: a service ended or took too long. All of them are stopped then.
    """
    services = list(services)
    waiting = list(services)
    try:
        with _display(console or Console(stderr=True), services) as show:
            while waiting:
                for service in list(waiting):
                    if service.ready():
                        waiting.remove(service)
                        show(service, "ready", "", done=True)
                    elif service.waited_s > READY_TIMEOUT_S:
                        raise StartError(service.late())
                    else:
                        show(service, service.phase(), service.last_line())
                if waiting:
                    time.sleep(POLL_S)
    except BaseException:
        stop_services(services, polite_s=2.0)
        raise


@contextmanager
def _display(console: Console, services: list[Service]) -> Iterator[Display]:
    if not console.is_terminal:
        yield _Lines(console)
        return
    width = max((len(service.name) for service in services), default=0)
    columns = (
        SpinnerColumn(finished_text="[green]✓[/]"),
        TextColumn("{task.description}", markup=False),
    )
    progress = Progress(*columns, TimeElapsedColumn(), console=console, transient=False)
    with progress:
        tasks = {s.name: progress.add_task(f"{s.name:{width}}", total=1) for s in services}

        def show(service: Service, phase: str, line: str, *, done: bool = False) -> None:
            words = _cut(
                f"{service.name:{width}}  {phase}{line and f': {line}'}", console.width - 12
            )
            progress.update(tasks[service.name], description=words, completed=int(done))

        yield show


class _Lines:
    """One line whenever something changes, and every BEAT_S with the last line of the service's log."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._said: dict[str, tuple[str, float]] = {}

    def __call__(self, service: Service, phase: str, line: str, *, done: bool = False) -> None:
        said, at = self._said.get(service.name, ("", 0.0))
        now = time.monotonic()
        if said == phase:
            if now - at < BEAT_S:
                return
            phase += f": {line or 'nothing in its log yet'}"
        else:
            said = phase
        self._said[service.name] = said, now
        _print(self._console, service.waited_s, f"{service.name}: {phase}")


@contextmanager
def working(console: Console, words: str) -> Iterator[Callable[[str], None]]:
    """Show progress: a spinner, or a line every BEAT_S. Yields a function that changes the text."""
    if console.is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False))
        with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
            task = progress.add_task(words, total=None)
            yield lambda words: progress.update(task, description=words)
        return
    started, ended, now = time.monotonic(), threading.Event(), [words]

    def beat() -> None:
        while not ended.wait(BEAT_S):
            _print(console, time.monotonic() - started, now[0])

    thread = threading.Thread(target=beat, name="progress", daemon=True)
    thread.start()
    try:
        yield lambda words: now.__setitem__(0, words)
    finally:
        ended.set()
        thread.join()


def _print(console: Console, seconds: float, words: str) -> None:
    console.print(
        f"{seconds:5.0f} s  {_cut(words, 150)}", markup=False, highlight=False, soft_wrap=True
    )


def _cut(words: str, most: int) -> str:
    return words if len(words) <= most else f"{words[: most - 3]}..."
