# SPDX-License-Identifier: Apache-2.0
"""Network namespaces of tests: whether there are any, and several of them around one, with links that can be cut."""

import contextlib
import os
import secrets
import shutil
import subprocess
from typing import Self

import pytest

_LINK = "eth0"
"""The end of a link that is not in the middle."""
_NOBODY = "02:00:00:00:00:99"
"""An address of a network card that nobody has."""


def skip_without_namespaces() -> None:
    """Skip the test where this machine has no network namespaces, or none of the programs that are used there."""
    for program, package in (("ip", "iproute2"), ("curl", "curl")):
        if not shutil.which(program):
            pytest.skip(f"no {package}")
    probe = ["unshare", "--net", "ip", "link", "set", "lo", "up"]
    if (tried := subprocess.run(probe, capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"no namespaces: {tried.stderr.strip()}")


class Star:
    """A namespace in the middle, and one for each name, joined to it by a link of its own. For a `with` block."""

    CUTS = ("down", "detached", "one way")
    """The link has no carrier; or frames are dropped and neither side hears of it; or only those towards the middle are."""
    middle = "198.19.254.1"

    def __init__(self, *names: str) -> None:
        own = f"pdt-{os.getpid()}-{secrets.token_hex(2)}"
        self._middle = f"{own}-middle"
        self._sides = {name: f"{own}-{name}" for name in names}

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for each in (self._middle, *self._sides.values()):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", each)

    def _make(self) -> None:
        for each in (self._middle, *self._sides.values()):
            _ip("netns", "add", each)
            _ip("-n", each, "link", "set", "lo", "up")
        _ip("-n", self._middle, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._middle, "address", "add", f"{self.middle}/24", "dev", "bridge")
        _ip("-n", self._middle, "link", "set", "bridge", "up")
        for place, (name, side) in enumerate(self._sides.items(), 2):
            _ip(
                *("-n", self._middle, "link", "add", _port(name), "type", "veth"),
                *("peer", "name", _LINK, "netns", side),
            )
            _ip("-n", side, "address", "add", f"198.19.254.{place}/24", "dev", _LINK)
            _ip("-n", side, "link", "set", _LINK, "up")
            _ip("-n", self._middle, "link", "set", _port(name), "master", "bridge", "up")

    def prefix(self, name: str = "") -> list[str]:
        """Words before a command, to run it at this name, or in the middle."""
        return ["ip", "netns", "exec", self._sides[name] if name else self._middle]

    def cut(self, name: str, how: str) -> None:
        """Cut a link, in one of the ways of `CUTS`."""
        if how == "down":
            _ip("-n", self._middle, "link", "set", _port(name), "down")
        elif how == "detached":
            _ip("-n", self._middle, "link", "set", _port(name), "nomaster")
        else:
            neighbour = ("neigh", "replace", self.middle, "lladdr", _NOBODY, "dev", _LINK)
            _ip("-n", self._sides[name], *neighbour, "nud", "permanent")

    def mend(self, name: str) -> None:
        """Undo every cut of a link."""
        _ip("-n", self._middle, "link", "set", _port(name), "master", "bridge", "up")
        with contextlib.suppress(subprocess.CalledProcessError):  # it was not cut that way
            _ip("-n", self._sides[name], "neigh", "delete", self.middle, "dev", _LINK)


def _port(name: str) -> str:
    """The middle's end of a link."""
    return f"to-{name}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
