# SPDX-License-Identifier: Apache-2.0
"""The process's event loop, however the process was started."""

import os
import subprocess
import sys

PROGRAM = """
import asyncio
from scheduler_plugins.router.loop import run

async def main():
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    server.close()
    await server.wait_closed()

run(main())
"""


def test_a_router_without_standard_files_is_not_aborted_when_it_closes_a_socket() -> None:
    """As `pd-router serve >&- 2>&-`: the listening socket would be number 1 or 2."""

    def close() -> None:
        for file in (0, 1, 2):
            os.close(file)

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=False, preexec_fn=close, timeout=60
    )
    assert done.returncode == 0
