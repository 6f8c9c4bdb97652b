# SPDX-License-Identifier: Apache-2.0
"""What a person sees while services start: a spinner for each, or plain lines without a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
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


class Display(Protocol):
    """Shows what one service is doing."""

    def __call__(self, service: Service, phase: str, *, done: bool = False) -> None: ...


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
                        show(service, "ready", done=True)
                    elif service.waited_s > READY_TIMEOUT_S:
                        raise StartError(service.late())
                    else:
                        show(service, service.phase())
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
    columns = (SpinnerColumn(finished_text="[green]✓[/]"), TextColumn("{task.description}"))
    progress = Progress(*columns, TimeElapsedColumn(), console=console, transient=False)
    with progress:
        tasks = {s.name: progress.add_task(f"{s.name:{width}}", total=1) for s in services}

        def show(service: Service, phase: str, *, done: bool = False) -> None:
            words = f"{service.name:{width}}  {phase}"
            progress.update(tasks[service.name], description=words, completed=int(done))

        yield show


class _Lines:
    """One line whenever something changes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._said: dict[str, str] = {}

    def __call__(self, service: Service, phase: str, *, done: bool = False) -> None:
        if self._said.get(service.name) != phase:
            self._said[service.name] = phase
            self._console.print(f"{service.waited_s:5.0f} s  {service.name}: {phase}")
