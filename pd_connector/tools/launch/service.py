# SPDX-License-Identifier: Apache-2.0
"""An HTTP server run as a family of processes: started, waited for, ended, started again."""

from __future__ import annotations

import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, Self

from pd_connector.errors import PDConnectorError
from pd_connector.tools.launch import start_log
from pd_connector.tools.launch.client import Client, Samples
from pd_connector.tools.launch.family import POLITE_S, Family, Popen, stop_all
from pd_connector.tools.launch.ports import Port

READY_TIMEOUT_S = 600.0
"""Generous, because several engines may be starting on two busy cores."""
POLL_S = 0.2
LOG_LINES = 60


class StartError(PDConnectorError):
    """A service did not become ready; the message has the likely cause and the end of its log."""


class Network(Protocol):
    """Another network on this machine, in which a service may run: a network namespace."""

    @property
    def prefix(self) -> list[str]:
        """Words before a command to run it there."""

    @property
    def management(self) -> str:
        """The address at which this process reaches it."""

    @property
    def address(self) -> str:
        """The address for data between services."""

    def port(self) -> int:
        """A port there that was not given out before."""


LINK = "link0"
"""Name of the device for data in such a network."""


class Service(ABC):
    """One server on one port. The port stays reserved over restarts, until the exit.

    With a namespace the server runs there, and listens on that namespace's management address.
    """

    def __init__(
        self,
        name: str,
        log_path: Path | None,
        namespace: Network | None = None,
        *,
        port: int | None = None,
    ) -> None:
        self.name = name
        self.namespace = namespace
        self.host = namespace.management if namespace else "127.0.0.1"
        self._reserved: list[Port] = []
        self.port = self.reserve() if port is None else port
        self.log_path = log_path or log_folder() / f"{name}.log"
        self.base_url = f"http://{self.host}:{self.port}"
        self.client = Client(self.base_url)
        self.family: Family | None = None
        self.popen: Popen = subprocess.Popen
        self.started_at = 0.0
        self._log_from_bytes = 0

    @abstractmethod
    def command(self) -> list[str]:
        """Program and arguments."""

    def environment(self) -> dict[str, str]:
        """Variables added to this process's own."""
        return {}

    def reserve(self) -> int:
        """A port in the server's namespace that no other caller gets."""
        if self.namespace is not None:
            return self.namespace.port()
        self._reserved.append(Port(self.host))
        return self._reserved[-1].number

    def phase(self) -> str:
        """The present phase of its start, in a few words."""
        return start_log.phase(self.log_path, self._log_from_bytes)

    def last_line(self) -> str:
        """The last line that it has logged since its start, without the logger's own fields; empty if there is none."""
        return start_log.last_line(self.log_path, self._log_from_bytes)

    @property
    def running(self) -> bool:
        """Whether the server's main process runs. Other processes of its family may run without it."""
        return self.family is not None and self.family.returncode is None

    @property
    def waited_s(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self.started_at

    def start(self) -> Self:
        """Start it, without waiting. The log continues after an earlier run's."""
        if self.family is not None:
            raise RuntimeError(f"{self.name} has been started already: stop or kill it first")
        command = [*(self.namespace.prefix if self.namespace else ()), *self.command()]
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("a") as log:
            self._log_from_bytes = log.tell()
            log.write(f"$ {' '.join(command)}\n")
        environment = self.environment()
        self.family = Family(command, env=environment, log=self.log_path, popen=self.popen)
        self.started_at = time.monotonic()
        return self

    def ready(self) -> bool:
        """Whether it answers now. Raises StartError if it has ended."""
        if not self.running:
            raise StartError(self._report("it ended"))
        return self.client.healthy()

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> Self:
        """Wait until it answers.

        Raises:
            StartError: it ended, or did not answer in time. It is stopped then.
        """
        try:
            while not self.ready():
                if self.waited_s > timeout_s:
                    raise StartError(self.late())
                time.sleep(POLL_S)
        except BaseException:
            self.kill()
            raise
        return self

    def late(self) -> str:
        """The report of a start that takes too long."""
        return self._report(f"it is not ready after {self.waited_s:.0f} s ({self.phase()})")

    def metrics(self) -> Samples:
        """All samples of its `/metrics`."""
        return self.client.metrics()

    def stop(self, polite_s: float = POLITE_S) -> None:
        """End it and its whole family, with SIGTERM first. Does nothing if it is not started."""
        if self.family is not None:
            self.family.stop(polite_s)
            self.family = None

    def kill(self) -> None:
        """End it and its whole family at once, as a crash of the machine would."""
        if self.family is not None:
            self.family.kill()
            self.family = None

    def pause(self) -> None:
        """Freeze its whole family: it neither works nor answers, but its sockets stay open."""
        if self.family is not None:
            self.family.pause()

    def resume(self) -> None:
        """Let a paused service continue."""
        if self.family is not None:
            self.family.resume()

    def _report(self, what: str) -> str:
        code = self.family.returncode if self.family else None
        lines = start_log.tail(self.log_path, None, self._log_from_bytes)
        ended = f" with code {code}" if code is not None else ""
        cause = start_log.likely_cause(lines, code) or "unknown, see the log"
        return (
            f"{self.name} did not start: {what}{ended}. Likely cause: {cause}.\n"
            f"End of {self.log_path}:\n" + "\n".join(f"  | {line}" for line in lines[-LOG_LINES:])
        )

    def __enter__(self) -> Self:
        return self.start() if self.family is None else self

    def __exit__(self, *error: object) -> None:
        self.stop()


def stop_services(services: Iterable[Service], polite_s: float = POLITE_S) -> None:
    """End several services at the same time."""
    services = list(services)
    stop_all([s.family for s in services if s.family is not None], polite_s)
    for service in services:
        service.family = None


def log_folder() -> Path:
    """A new folder for logs. It is kept after this process ends, for the user to read."""
    return Path(tempfile.mkdtemp(prefix="pd-connector-"))
