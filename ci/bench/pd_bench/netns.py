# SPDX-License-Identifier: Apache-2.0
"""Two network namespaces joined by a link of limited rate: two machines' network on one machine.

    root namespace
      |  mgmt (unlimited, one each)  |
    [ namespace ] === link (limited both ways) === [ namespace ]

Everything that a process in one namespace sends to the other passes the limited link, because there is no other
route. The root namespace reaches each of them over its own management link, so HTTP clients can stay there.
Namespaces divide only the network. Shared memory still joins both sides, so a transport that would use it must
be told not to.

Needs root and iproute2; `available` says why not. A launcher that is killed leaves its namespaces behind. Their names
tell their owner, and the next `Bed` removes them.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from pd_connector.errors import PDConnectorError
from pd_connector.tools.launch import proc
from pd_connector.tools.launch.service import LINK

MANAGEMENT = "mgmt0"
"""Name of the second device in each namespace; the first is `LINK`."""

BURST = "256k"
"""Burst of the link: at 1 Gbit/s, two milliseconds."""
QUEUE = "50ms"
"""How long a packet may wait before the link; then it is dropped."""

FIRST_PORT = 8000
"""Below the range from which the system chooses ports, so that no program gets one of these by chance."""

_NETWORKS = 250
_claiming = threading.Lock()
_FOLDER = Path("/run/netns")
# pd, the owner's pid and start time (a pid is reused), the network's number, the side.
_NAME = re.compile(r"pd-(\d+)-(\d+)-\d+-[ab]")


class NetnsError(PDConnectorError):
    """A namespace or a link could not be made."""


@dataclass(frozen=True, eq=False)
class Namespace:
    """One side of a bed."""

    name: str
    address: str  # on the limited link: for data between the two sides
    management: str  # reachable from the root namespace, not from the other side
    _ports: Iterator[int] = field(default_factory=lambda: itertools.count(FIRST_PORT), repr=False)

    @property
    def prefix(self) -> list[str]:
        """Words before a command to run it here. Pid, group and environment stay the same."""
        return ["ip", "netns", "exec", self.name]

    def port(self) -> int:
        """A port of this namespace that was not given out before."""
        return next(self._ports)


class Bed:
    """Two namespaces with loopback, a limited link and management links, for a `with` block.

    Args:
        rate_mbit: rate of the link each way, in Mbit/s.

    Raises:
        NetnsError: on entry, if they cannot be made. Parts that were made are removed again.
    """

    def __init__(self, rate_mbit: float = 1000.0) -> None:
        if not rate_mbit > 0:
            raise ValueError(f"rate_mbit {rate_mbit}: must be more than 0")
        self.rate_mbit = rate_mbit
        self._sides: tuple[Namespace, ...] = ()

    @property
    def namespaces(self) -> tuple[Namespace, Namespace]:
        """Both sides, while inside the block."""
        if not self._sides:
            raise RuntimeError("the namespaces exist only inside the `with` block of their bed")
        left, right = self._sides
        return left, right

    def __enter__(self) -> Self:
        remove_stale()
        try:
            with _claiming:
                self._claim()
            left, right = (side.name for side in self._sides)
            peer = ["type", "veth", "peer", "name", LINK, "netns", right]
            _do("ip", "-n", left, "link", "add", LINK, *peer)
            for side in self._sides:
                _do("ip", "-n", side.name, "link", "set", "lo", "up")
                _do("ip", "-n", side.name, "address", "add", f"{side.address}/30", "dev", LINK)
                _do("ip", "-n", side.name, "link", "set", LINK, "up")
                limit = ["rate", f"{round(self.rate_mbit * 1000)}kbit", "burst", BURST]
                tbf = ["root", "tbf", *limit, "latency", QUEUE]
                _do("tc", "-n", side.name, "qdisc", "add", "dev", LINK, *tbf)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._remove()

    def _claim(self) -> None:
        """Find an unused number: only one device of this name can exist."""
        for number in range(_NETWORKS):
            if Path(f"/sys/class/net/{_outside(number, 'a')}").exists():
                continue
            self._sides = tuple(_namespace(number, side) for side in "ab")
            try:
                for side in self._sides:
                    _do("ip", "netns", "add", side.name)
                _join_root(number, self._sides)
            except NetnsError as error:
                self._remove()
                if "File exists" not in str(error):
                    raise
            else:
                return
        raise NetnsError(f"{_NETWORKS} networks are in use already: see `ip netns`")

    def _remove(self) -> None:
        for side in self._sides:
            _delete(side.name)
        self._sides = ()


@functools.cache
def available() -> str:
    """Why namespaces are impossible here, in words; empty if they are possible. Tried once."""
    try:
        with Bed():
            return ""
    except NetnsError as error:
        return str(error)


def remove_stale() -> list[str]:
    """Remove namespaces whose owner has ended; returns their names. Processes in them continue."""
    removed = []
    for name in _names():
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        pid, started = map(int, match.groups())
        owner = proc.read(pid)
        if owner is None or owner.started != started or not owner.alive:
            _delete(name)
            removed.append(name)
    return removed


def _names() -> list[str]:
    try:
        return sorted(os.listdir(_FOLDER))
    except OSError:
        return []


def _namespace(number: int, side: str) -> Namespace:
    """A namespace's addresses. 198.18.0.0/15 is reserved for benchmarks (RFC 2544): no real network uses it."""
    owner = proc.read(os.getpid())
    assert owner is not None, "/proc shows this process"
    index = "ab".index(side)
    return Namespace(
        f"pd-{owner.pid}-{owner.started}-{number}-{side}",
        f"198.19.{number}.{1 + index}",
        f"198.18.{number}.{2 + 4 * index}",
    )


def _outside(number: int, side: str) -> str:
    """The root namespace's end of a management link."""
    return f"pdm{number}{side}"


def _join_root(number: int, sides: tuple[Namespace, ...]) -> None:
    for index, side in enumerate(sides):
        outside = _outside(number, side.name[-1])
        peer = ["type", "veth", "peer", "name", MANAGEMENT, "netns", side.name]
        _do("ip", "link", "add", outside, *peer)
        _do("ip", "address", "add", f"198.18.{number}.{1 + 4 * index}/30", "dev", outside)
        _do("ip", "link", "set", outside, "up")
        inside = ["ip", "-n", side.name]
        _do(*inside, "address", "add", f"{side.management}/30", "dev", MANAGEMENT)
        _do(*inside, "link", "set", MANAGEMENT, "up")


def _delete(name: str) -> None:
    """Delete a namespace with its links, if they exist.

    Links are deleted by name: a namespace in which a process still runs outlives its name, and so would its links.
    """
    _attempt("ip", "-n", name, "link", "delete", LINK)
    _attempt("ip", "-n", name, "link", "delete", MANAGEMENT)
    _attempt("ip", "netns", "delete", name)


def _do(*command: str) -> None:
    problem = _attempt(*command)
    if problem:
        raise NetnsError(f"`{' '.join(command)}`: {problem}")


def _attempt(*command: str) -> str:
    """Run a command; returns why it failed, empty if it succeeded."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return f"`{command[0]}` is missing: install iproute2"
    except PermissionError as error:
        return str(error)
    return "" if done.returncode == 0 else done.stderr.strip() or f"status {done.returncode}"
