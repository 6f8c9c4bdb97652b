# SPDX-License-Identifier: Apache-2.0
"""The event loop of a router's process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from typing import Any


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run until `main` returns. Uses uvloop if it is installed, because it takes less CPU time; else asyncio's own
    loop."""
    _open_standard_files()
    try:
        import uvloop
    except ModuleNotFoundError:
        asyncio.run(main)
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


def _open_standard_files() -> None:
    """Open standard input, output and error if the process was started without. A socket would get such a number, and
    libuv aborts the process when it closes one."""
    while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(file)
