# SPDX-License-Identifier: Apache-2.0
"""Ports for a server that is told its port."""

import contextlib
import itertools
import os
import socket

_FIRST, _STOP = 21000, 32000
"""The system gives away none of these by itself."""
_tried = itertools.count(os.getpid() % 100 * 100)
"""Test processes that run at the same time begin at different ports: what is free now could else be taken by another one."""


def free_ports(count: int) -> range:
    """Ports in a row that are free now. Each call gives others."""
    for _ in range(_STOP - _FIRST):
        first = _FIRST + next(_tried) % (_STOP - _FIRST - count)
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            for _ in range(count - 1):
                next(_tried)
            return range(first, first + count)
    raise AssertionError("no ports are free")
