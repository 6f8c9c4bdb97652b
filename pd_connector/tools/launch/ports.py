# SPDX-License-Identifier: Apache-2.0
"""Free ports that stay ours from the moment they are chosen.

A port that is looked up, closed and handed to a program may be taken in between by another test run.
Here a socket that never listens keeps it bound. The kernel then offers it to nobody who asks for any
free port, while a server that asks for this one by number and sets SO_REUSEADDR or SO_REUSEPORT, as
servers do, binds it beside us and gets all its connections.
"""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Self


class Port:
    """A TCP port of one address, reserved until `release`."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._socket = socket.socket(family, kind, protocol)
        self._socket.bind(address)
        # Only now: a socket that allows sharing while it chooses may be given a shared port.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self.number: int = self._socket.getsockname()[1]

    def release(self) -> None:
        """Give the port up: for servers that do not share it, just before they start."""
        self._socket.close()

    def __int__(self) -> int:
        return self.number

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
