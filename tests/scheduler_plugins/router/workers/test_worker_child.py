# SPDX-License-Identifier: Apache-2.0
"""A worker's place is never left empty for good."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from router_fakes import run, sockets, until

from scheduler_plugins.router.workers.child import Child


def test_a_worker_that_cannot_be_started_now_is_started_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        tried, before = list[float](), sockets()

        async def no_process(*_: Any, **__: Any) -> None:
            tried.append(asyncio.get_running_loop().time())
            raise BlockingIOError("no process is left")

        monkeypatch.setattr(asyncio, "create_subprocess_exec", no_process)
        child = Child(1, lambda _: (), lambda *_: None, lambda _: None)
        task = asyncio.create_task(child.run())
        await until(lambda: len(tried) >= 2 or task.done(), "it is tried again")
        assert not task.done()
        assert sockets() <= before
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    run(scenario())
