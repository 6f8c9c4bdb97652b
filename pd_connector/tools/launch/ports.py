# SPDX-License-Identifier: Apache-2.0
"""Free ports that stay reserved from the moment they are chosen.

If a port is looked up, closed and passed to a program, another test run may take it in between. Here a socket
that never listens keeps the port bound. The kernel then does not offer it to programs that ask for any free
port. A server that asks for this port by number and sets SO_REUSEADDR or SO_REUSEPORT, as servers do, binds it
as well and gets all connections.
"""

from __future__ import annotations

import socket
from typing import Self


class Port:
    """A TCP port of one address, reserved until `release`."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._socket = socket.socket(family, kind, protocol)
        self._socket.bind(address)
        # Set only now: a socket that allows sharing while it chooses may be given a shared port.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self.number: int = self._socket.getsockname()[1]

    def release(self) -> None:
        """Release the port just before the start of a server that does not share it."""
        self._socket.close()

    def __int__(self) -> int:
        return self.number

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()
