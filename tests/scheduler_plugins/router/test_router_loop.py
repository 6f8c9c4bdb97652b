# SPDX-License-Identifier: Apache-2.0
"""The process's event loop, however the process was started, and its deadlines after a standstill."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from router_fakes import until

from scheduler_plugins.router.loop import MOST_S, AsyncioLoop, is_behind, new_loop, ran_s

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


LOOPS = pytest.mark.parametrize("loop", [AsyncioLoop, new_loop], ids=["asyncio", "installed"])
Loop = Callable[[], asyncio.AbstractEventLoop]
LIMIT_S = MOST_S + 0.2


def on(loop: Loop, scenario: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(scenario)


async def by_timeout(waited_for: Awaitable[bytes]) -> bytes:
    async with asyncio.timeout(LIMIT_S):
        return await waited_for


async def by_timeout_at(waited_for: Awaitable[bytes]) -> bytes:
    async with asyncio.timeout_at(asyncio.get_running_loop().time() + LIMIT_S):
        return await waited_for


async def by_wait(waited_for: Awaitable[bytes]) -> bytes:
    task = asyncio.ensure_future(waited_for)
    done, _ = await asyncio.wait({task}, timeout=LIMIT_S)
    task.cancel()
    return task.result() if done else b""


@LOOPS
@pytest.mark.parametrize("left_s", [LIMIT_S, MOST_S / 2])
@pytest.mark.parametrize("limited", [by_timeout, by_timeout_at, by_wait])
def test_a_deadline_that_passed_in_a_standstill_looks_at_its_socket_once_more(
    loop: Loop, limited: Callable[[Awaitable[bytes]], Awaitable[bytes]], left_s: float
) -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours, theirs:
            received = asyncio.get_running_loop().sock_recv(ours, 10)
            task = asyncio.ensure_future(limited(received))
            await asyncio.sleep(LIMIT_S - left_s)
            theirs.send(b"here")
            time.sleep(LIMIT_S + MOST_S)  # noqa: ASYNC251 - the process stands still
            assert await task == b"here"

    on(loop, scenario())


@LOOPS
def test_a_standstill_does_not_count(loop: Loop) -> None:
    async def scenario() -> None:
        begun_s, before_s = time.monotonic(), ran_s()
        waits = asyncio.create_task(asyncio.sleep(LIMIT_S))
        await asyncio.sleep(0)
        time.sleep(3 * LIMIT_S)  # noqa: ASYNC251 - the process stands still
        assert is_behind()
        await waits
        await until(lambda: not is_behind(), "it has caught up")
        assert time.monotonic() - begun_s >= 3 * LIMIT_S + LIMIT_S - MOST_S
        assert ran_s() - before_s < time.monotonic() - begun_s - (3 * LIMIT_S - MOST_S - 0.01)

    on(loop, scenario())


@LOOPS
def test_without_a_standstill_deadlines_pass(loop: Loop) -> None:
    async def scenario() -> None:
        never = asyncio.get_running_loop().create_future()
        with pytest.raises(TimeoutError):
            await by_timeout(never)
        called = []
        timer = asyncio.get_running_loop().call_later(LIMIT_S, called.append, "never")
        timer.cancel()
        assert timer.cancelled()
        asyncio.get_running_loop().call_later(MOST_S, called.append, "long")
        asyncio.get_running_loop().call_later(MOST_S / 10, called.append, "short")
        await asyncio.sleep(2 * LIMIT_S)
        assert called == ["short", "long"]

    on(loop, scenario())
