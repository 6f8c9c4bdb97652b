# SPDX-License-Identifier: Apache-2.0
"""`--workers 2` as a user starts it: real processes in front of fake engines."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families
from router_fakes import DONE, FakeEngine, event, stream, until

LIMIT_S = 120.0

ADMIN_KEY = "0123456789abcdef0123-administrator"
TOKEN = {"Authorization": f"Bearer {ADMIN_KEY}"}


class Processes:
    """A router in several processes, and its engines."""

    def __init__(self, port: int, admin: int, supervisor: asyncio.subprocess.Process) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.admin = f"http://127.0.0.1:{admin}/engines"
        self.supervisor = supervisor

    @property
    def workers(self) -> set[int]:
        children = Path(f"/proc/{self.supervisor.pid}/task/{self.supervisor.pid}/children")
        return {int(pid) for pid in children.read_text().split()}

    async def ask(self, method: str, url: str, body: Any = None) -> Any:
        """One request on a connection of its own, so that the system chooses a worker again."""
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, url, json=body, headers=TOKEN) as response,
        ):
            text = await response.text()
            return await response.json() if text.startswith("{") else text

    async def complete(self) -> str:
        body = {"model": "m", "prompt": "hello"}
        told = await self.ask("POST", self.url + "/v1/completions", body)
        return str(told.get("served_by"))

    async def metric(self, name: str) -> float:
        text = await self.ask("GET", self.url + "/metrics")
        families = text_string_to_metric_families(text)
        found = [s.value for family in families for s in family.samples if s.name == name]
        return sum(found)


async def until_all(condition: Callable[[], Any], what: str) -> None:
    """Wait until an awaited condition holds; a connection that breaks meanwhile is not an answer."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            with suppress(aiohttp.ClientError, OSError):
                if await condition():
                    return
            await asyncio.sleep(0.05)
    raise AssertionError(what)


@asynccontextmanager
async def router(*engines: str, shutdown_s: float = 1.0) -> AsyncIterator[Processes]:
    command = [sys.executable, "-m", "scheduler_plugins.router", "--workers", "2", *engines]
    command += ["--port", "0", "--admin-port", "0", "--health-interval-s", "0.1"]
    command += ["--policy", "round_robin", "--shutdown-timeout-s", str(shutdown_s)]
    supervisor = await asyncio.create_subprocess_exec(
        *command,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PD_ROUTER_ADMIN_KEY": ADMIN_KEY},
    )
    assert supervisor.stderr is not None
    found: dict[str, int] = {}
    said = asyncio.create_task(asyncio.sleep(0))
    try:
        async with asyncio.timeout(LIMIT_S):
            while "Running on" not in found:
                line = (await supervisor.stderr.readline()).decode()
                assert line, "the router has ended"
                if match := re.search(r"(Running on|Admin API on) http://127\.0\.0\.1:(\d+)", line):
                    found[match[1]] = int(match[2])
        said = asyncio.create_task(_read(supervisor.stderr))
        yield Processes(found["Running on"], found["Admin API on"], supervisor)
    finally:
        if supervisor.returncode is None:
            supervisor.kill()
        await supervisor.wait()
        said.cancel()


async def _read(stream: asyncio.StreamReader) -> None:
    while await stream.readline():
        pass


def alive(pids: set[int]) -> set[int]:
    found = set()
    for pid in pids:
        with suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.add(pid)
    return found


def test_two_workers_are_one_router() -> None:
    async def scenario() -> None:
        fakes = [FakeEngine("p", "engine-p"), FakeEngine("d0"), FakeEngine("d1")]
        for fake in fakes:
            await fake.start()
        sides = ["--prefill", fakes[0].url, "--decode", fakes[1].url, fakes[2].url]
        async with router(*sides) as running:
            first = running.workers
            assert len(first) == 2

            served = [await running.complete() for _ in range(16)]
            assert set(served) == {"d0", "d1"}

            async def counted() -> bool:
                return await running.metric("pd_router:requests_total") == 16

            await until_all(counted, "every request is counted, whichever worker served it")
            assert await running.metric("pd_router:workers") == 2
            checks = fakes[1].health_checks
            assert checks > 0, "all watch"

            await running.ask("POST", running.admin + "/drain", {"url": fakes[1].url})

            async def drained() -> bool:
                return {await running.complete() for _ in range(12)} == {"d1"}

            await until_all(drained, "no worker asks the drained engine")

            killed = next(iter(first))
            os.kill(killed, signal.SIGKILL)

            async def restarted() -> bool:
                now = running.workers
                both = len(now) == 2 and killed not in now
                return both and await running.metric("pd_router:workers") == 2

            await until_all(restarted, "the dead worker has a successor")
            assert await running.metric("pd_router:requests_total") >= 16, "counters do not fall"
            assert await running.metric("pd_router:worker_restarts_total") == 1
            assert {await running.complete() for _ in range(12)} == {"d1"}, (
                "it was told of the drain"
            )

            last = running.workers
            running.supervisor.send_signal(signal.SIGTERM)
            async with asyncio.timeout(LIMIT_S):
                assert await running.supervisor.wait() == 0
            assert not alive(last)
        for fake in fakes:
            await fake.die()

    asyncio.run(scenario())


def test_engines_that_swap_their_roles_do_so_in_all_workers() -> None:
    async def scenario() -> None:
        fakes = [FakeEngine("a", "engine-a"), FakeEngine("b", "engine-b")]
        for fake in fakes:
            await fake.start()
        async with router("--prefill", fakes[0].url, "--decode", fakes[1].url) as running:
            assert {await running.complete() for _ in range(8)} == {"b"}
            swap = [
                {"url": fakes[0].url, "role": "decode"},
                {"url": fakes[1].url, "role": "prefill"},
            ]
            told = await running.ask("POST", running.admin + "/role", swap)
            assert [one["role"] for one in told["engines"]] == ["decode", "prefill"], told

            async def swapped() -> bool:
                return {await running.complete() for _ in range(8)} == {"a"}

            await until_all(swapped, "all workers use them the other way round")

            async def counted() -> bool:
                return await running.metric("pd_router:role_moves_total") == 2

            await until_all(counted, "each move is counted once")
        for fake in fakes:
            await fake.die()

    asyncio.run(scenario())


async def read(url: str, took: list[bytes]) -> bool:
    """A stream on a connection of its own. Returns whether it ended as it should."""
    body = {"model": "m", "prompt": "hello", "stream": True}
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.post(url + "/v1/completions", json=body) as response,
        ):
            async for line in response.content:
                took.append(line)  # noqa: PERF401 - seen while it grows
    except aiohttp.ClientError:
        return False
    return any(b"[DONE]" in line for line in took)


def test_a_worker_that_is_killed_loses_its_own_streams_only() -> None:
    async def scenario() -> None:
        fakes = [FakeEngine("p", "engine-p"), FakeEngine("d")]
        for fake in fakes:
            await fake.start()
        killed = asyncio.Event()

        async def until_killed(engine: FakeEngine, request: Any, body: dict[str, Any]) -> Any:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(event("begun"))
            await killed.wait()
            await response.write(DONE)
            return response

        fakes[1].behave = until_killed
        async with router("--prefill", fakes[0].url, "--decode", fakes[1].url) as running:
            took = [list[bytes]() for _ in range(16)]  # all at one worker: once in 32,768
            tasks = [asyncio.create_task(read(running.url, one)) for one in took]
            await until(lambda: all(took), "all streams have begun")
            os.kill(next(iter(running.workers)), signal.SIGKILL)
            killed.set()
            ended = await asyncio.gather(*tasks)
            assert 0 < ended.count(True) < len(ended)
        for fake in fakes:
            await fake.die()

    asyncio.run(scenario())


def test_open_streams_end_before_workers_do() -> None:
    async def scenario() -> None:
        fakes = [FakeEngine("p", "engine-p"), FakeEngine("d")]
        for fake in fakes:
            await fake.start()
        fakes[1].behave = stream(20, gap_s=0.1)
        sides = ["--prefill", fakes[0].url, "--decode", fakes[1].url]
        async with router(*sides, shutdown_s=LIMIT_S) as running:
            took = [list[bytes]() for _ in range(8)]
            tasks = [asyncio.create_task(read(running.url, one)) for one in took]
            await until(lambda: all(took), "all streams have begun")
            running.supervisor.send_signal(signal.SIGTERM)
            assert await asyncio.gather(*tasks) == [True] * len(took)
            async with asyncio.timeout(LIMIT_S):
                assert await running.supervisor.wait() == 0
        for fake in fakes:
            await fake.die()

    asyncio.run(scenario())


def test_a_changed_settings_file_reaches_all_workers(tmp_path: Path) -> None:
    async def scenario() -> None:
        fakes = [FakeEngine("p", "engine-p"), FakeEngine("d0"), FakeEngine("d1")]
        for fake in fakes:
            await fake.start()
        path = tmp_path / "router.yaml"

        def write(decode: FakeEngine) -> None:
            entries = [(fakes[0].url, "prefill"), (decode.url, "decode")]
            lines = [f"  - {{url: '{url}', role: {role}}}" for url, role in entries]
            path.write_text("\n".join(["engines:", *lines]))

        write(fakes[1])
        async with router("--config", str(path)) as running:
            assert {await running.complete() for _ in range(8)} == {"d0"}
            write(fakes[2])

            async def changed() -> bool:
                # All at one worker, while the other has the old list: once in 2 ** 23.
                return {await running.complete() for _ in range(24)} == {"d1"}

            await until_all(changed, "all workers use the new list")
            os.kill(next(iter(running.workers)), signal.SIGKILL)

            async def restarted() -> bool:
                return await running.metric("pd_router:worker_restarts_total") == 1

            await until_all(restarted, "a successor serves")
            assert {await running.complete() for _ in range(8)} == {"d1"}
        for fake in fakes:
            await fake.die()

    asyncio.run(scenario())


def test_a_router_whose_worker_cannot_listen_says_why_and_ends() -> None:
    """The address of the exchange is bound by a worker."""

    async def scenario() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen(1)
            command = [sys.executable, "-m", "scheduler_plugins.router", "--workers", "2"]
            command += ["--prefill", "127.0.0.1:1", "--decode", "127.0.0.1:1", "--port", "0"]
            command += ["--exchange", f"tcp://127.0.0.1:{taken.getsockname()[1]}"]
            ended = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
            )
            async with asyncio.timeout(LIMIT_S):
                _, stderr = await ended.communicate()
        assert ended.returncode == 1
        assert "take another port with --exchange" in stderr.decode().splitlines()[-1]

    asyncio.run(scenario())


def test_workers_do_not_outlive_their_supervisor() -> None:
    async def scenario() -> None:
        async with router("--prefill", "127.0.0.1:1", "--decode", "127.0.0.1:1") as running:
            workers = running.workers
            assert alive(workers) == workers
            running.supervisor.kill()
            await running.supervisor.wait()

            async def gone() -> bool:
                return not alive(workers)

            await until_all(gone, "no worker is left")

    asyncio.run(scenario())
