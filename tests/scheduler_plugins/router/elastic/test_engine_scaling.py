# SPDX-License-Identifier: Apache-2.0
"""A real router starts and stops mock engines by the user's commands, and loses no request."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from router_fakes import until

from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.cost.profile import save
from scheduler_plugins.router.elastic import task
from scheduler_plugins.router.endpoints.app_keys import SHARED
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.roles import slo
from scheduler_plugins.router.roles.scaling import Limits
from scheduler_plugins.router.server import RouterServer
from scheduler_plugins.router.settings import elastic
from scheduler_plugins.router.settings.config import RouterConfig
from scheduler_plugins.sim.mock.server import MockEngine
from scheduler_plugins.sim.mock.settings import MockSettings

COSTS = CostModel(a=4e-3, c=0.02, d0=0.005, d1=1e-4, d2=1e-7, chunk_tokens=512)
"""A prompt of 100 tokens takes 0.42 s: one engine has 2.4 a second, two have 4.8."""
TEXT = "a prompt of some words " * 20
START = """\
import os, subprocess, sys, time
folder, speed, costs = sys.argv[1:4]
assert sys.argv[4] == "--role=" + os.environ["PD_ROLE"]
run = "import sys; from scheduler_plugins.sim.mock.command import main; sys.exit(main())"
log = os.path.join(folder, os.environ["PD_ROLE"] + str(os.getpid()))
with open(log, "w") as out:
    args = [sys.executable, "-c", run, "--cost-model", costs, "--speed", speed]
    process = subprocess.Popen(args, stdout=out, stderr=out, start_new_session=True)
url = ""
while not url:
    time.sleep(0.05)
    assert process.poll() is None, open(log).read()
    url = open(log).read().partition(" on ")[2].strip()
open(os.path.join(folder, url.rpartition(":")[2]), "w").write(str(process.pid))
print("some chatter"); print(url)
"""
STOP = """\
import os, signal, sys
path = os.path.join(sys.argv[1], sys.argv[2].rpartition(":")[2])
if os.path.exists(path):  # not one of the test's own process
    os.kill(int(open(path).read()), signal.SIGTERM)
    os.rename(path, path + ".killed")
open(path + ".stopped", "w").close()
"""


def run(scenario: Coroutine[Any, Any, None], limit_s: float = 100) -> None:
    async def limited() -> None:
        async with asyncio.timeout(limit_s):
            await scenario

    asyncio.run(limited())


@pytest.fixture
def commands(tmp_path: Path) -> Any:
    """A folder, and settings with commands that start and stop mock engines. Engines that are left are killed."""
    (tmp_path / "start.py").write_text(START)
    (tmp_path / "stop.py").write_text(STOP)
    save(tmp_path / "costs.json", COSTS)
    python = shlex.quote(sys.executable)
    yield (
        tmp_path,
        {
            "start_command": f"{python} {tmp_path}/start.py {tmp_path} 1 {tmp_path}/costs.json --role={{role}}",
            "stop_command": f"{python} {tmp_path}/stop.py {tmp_path} {{url}}",
        },
    )
    for path in tmp_path.iterdir():
        if path.name.isdigit():
            os.kill(int(path.read_text()), signal.SIGKILL)


async def engine(stack: AsyncExitStack) -> str:
    mock = MockEngine(MockSettings(costs=COSTS))
    await mock.start()
    stack.push_async_callback(mock.close)
    return f"http://127.0.0.1:{mock.port}"


def test_engines_come_and_go_with_the_load_and_no_request_is_lost(
    commands: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 - 2 - 1 prefill engines by `slo`. Its times are shortened; its rules are not."""
    folder, settings = commands
    for module, name, value in (
        (task, "EVERY_S", 0.2),
        (slo, "BIN_S", 1),
        (slo, "BIN_S", 1),
        (slo, "TREND_S", 5.0),
        (slo, "MIX_S", 10.0),
        (slo, "QUEUE_S", 3.0),
        (elastic, "Limits", partial(Limits, settle_s=2.0)),
    ):
        monkeypatch.setattr(module, name, value)

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            urls = {"prefill": (await engine(stack),), "decode": (await engine(stack),)}
            config = RouterConfig(
                **urls,
                **settings,
                port=0,
                roles="slo",
                max_prefill=2,
                max_decode=1,
                engine_start_s=2.0,
                health_interval_s=0.2,
                profile=str(folder / "costs.json"),
            )
            router = await stack.enter_async_context(RouterServer(config))
            session = await stack.enter_async_context(aiohttp.ClientSession())
            pool = router.app[SHARED].pool
            answers = list[tuple[int, int, bool]]()

            async def ask(n: int) -> None:
                body = {"model": "mock", "prompt": f"{n} {TEXT}", "max_tokens": 40, "stream": True}
                url = f"http://127.0.0.1:{router.port}/v1/completions"
                async with session.post(url, json=body) as answer:
                    raw = await answer.read()
                whole = raw.endswith(b"data: [DONE]\n\n")
                answers.append((answer.status, raw.count(b" word"), whole))

            def serving() -> list[str]:
                return [
                    e.url
                    for e in pool.engines
                    if e.role is Role.PREFILL and e.up and not e.draining
                ]

            async with asyncio.TaskGroup() as asked:
                n = 0
                while len(serving()) < 2:
                    asked.create_task(ask(n := n + 1))
                    await asyncio.sleep(0.25)
                assert await wanted(session, router.port) == {"prefill": 2, "decode": 1}
                for _ in range(8):
                    asked.create_task(ask(n := n + 1))
                    await asyncio.sleep(0.25)
                while len([e for e in pool.engines if e.role is Role.PREFILL]) > 1:
                    asked.create_task(ask(n := n + 1))
                    await asyncio.sleep(2.5)
                await until(lambda: bool(list(folder.glob("*.stopped"))), "it was stopped")
            assert answers == [(200, 40, True)] * n
            assert await wanted(session, router.port) == {"prefill": 1, "decode": 1}

    run(scenario())


async def wanted(session: aiohttp.ClientSession, port: int) -> dict[str, int]:
    async with session.get(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = (await answer.text()).split("\n")
    found = [line for line in lines if line.startswith("pd_router:engines_wanted{")]
    return {
        line.partition('role="')[2].partition('"')[0]: int(float(line.split()[-1]))
        for line in found
    }
