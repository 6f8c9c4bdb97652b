# SPDX-License-Identifier: Apache-2.0
"""Engines of role `cpu_prefill` behind the live router: long prompts that nobody waits for go there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import msgspec
import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from router_fakes import FakeEngine, World, answer, hang, run, status, until

from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.qos.classes import QosClass, Slo
from scheduler_plugins.qos.rules import ClassRule, Match
from scheduler_plugins.router.client.admin_auth import AdminAuth
from scheduler_plugins.router.endpoints.admin import create_admin
from scheduler_plugins.router.endpoints.app_keys import MOVER, SHARED
from scheduler_plugins.router.endpoints.page import state
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.policies.length import MAX_UNCACHED, MIN_UNCACHED
from scheduler_plugins.router.prompt.describe import BYTES_PER_TOKEN
from scheduler_plugins.router.recent_history import BEAT_S
from scheduler_plugins.router.settings.config import RouterConfig
from scheduler_plugins.router.settings.settings_file import parse

CLASSES = (
    QosClass(name="chat", reserved_fraction=0.5, priority=1),
    QosClass(name="nightly", reserved_fraction=0.5, priority=2, interactive=False),
)
ROUTES = (ClassRule(match=Match(header="x-batch: 1"), qos="nightly"),)
CLASSED = {"classes": CLASSES, "routes": ROUTES}
NIGHTLY = {"X-Batch": "1"}
_NUMBERS = count()
LONG = "x" * (2 * MAX_UNCACHED * BYTES_PER_TOKEN)
SHORT = "x" * (4 * MIN_UNCACHED * BYTES_PER_TOKEN)


async def waits_for_the_cpu(
    engine: FakeEngine, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    """A decode engine that gets no KV from `c0`."""
    params = body.get("kv_transfer_params") or {}
    behave = hang if params.get("remote_engine_id") == "engine-c0" else answer
    return await behave(engine, request, body)


async def ask(world: World, prompt: str, **headers: str) -> None:
    """Send a prompt of which nobody has anything cached; all is over afterwards."""
    body = {"model": "m", "prompt": f"{next(_NUMBERS)} {prompt}"}
    reply = await world.post("/v1/completions", body, **headers)
    assert reply.status == 200
    assert reply.json["served_by"].startswith("d")
    await world.idle()


@asynccontextmanager
async def world_with_cpu(
    policy: str = "length:round_robin",
) -> AsyncIterator[tuple[World, FakeEngine]]:
    """One engine of each role."""
    cpu = FakeEngine("c0", engine_id="engine-c0")
    await cpu.start()
    try:
        async with World(policy=policy, cpu_prefill=(cpu.url,), **CLASSED) as world:
            yield world, cpu
    finally:
        await cpu.end()


async def computed_by(world: World, cpu: FakeEngine, prompt: str, **headers: str) -> str:
    """Name of the engine that was sent the prefill copy."""
    before = len(world.p[0].bodies), len(cpu.bodies)
    await ask(world, prompt, **headers)
    more = len(world.p[0].bodies) - before[0], len(cpu.bodies) - before[1]
    return {(1, 0): "p0", (0, 1): "c0", (0, 0): "nobody"}[more]


def test_a_long_prompt_that_nobody_waits_for_is_computed_without_a_gpu() -> None:
    async def scenario() -> None:
        async with world_with_cpu() as (world, cpu):
            assert await computed_by(world, cpu, LONG, **NIGHTLY) == "c0"
            assert world.d[0].params[-1]["remote_engine_id"] == "engine-c0"
            assert await computed_by(world, cpu, LONG) == "p0", "somebody waits"
            assert await computed_by(world, cpu, SHORT, **NIGHTLY) == "p0", "it is short"
            assert await world.metric("cpu_prefills_total", cause="background") == 1
            later_s = asyncio.get_running_loop().time() + BEAT_S
            beats = world.app[SHARED].metrics.pulse.beats(later_s)
            assert sum(beat.overflows for beat in beats) == 0, "nobody was late"
            health = (await world.get("/health")).json
            (told,) = [one for one in health["engines"] if one["url"] == cpu.url]
            assert (told["role"], told["hands_over_kv"]) == ("cpu_prefill", True)

    run(scenario())


def test_what_others_would_be_late_with_is_computed_without_a_gpu_and_counted() -> None:
    """Somebody waits, the prefill engine is busy for 100 s, and the promise is 2 s."""

    async def scenario() -> None:
        cpu = FakeEngine("c0", engine_id="engine-c0")
        await cpu.start()
        promised = (msgspec.structs.replace(CLASSES[0], slo=Slo(ttft_ms=2000)), CLASSES[1])
        classed = {"classes": promised, "routes": ROUTES}
        async with World(policy="length", cpu_prefill=(cpu.url,), **classed) as world:
            shared = world.app[SHARED]
            for engine in world.engines:
                engine.costs, engine.costs_reported = CostModel(a=1e-6), True
            loop = asyncio.get_running_loop()
            assert await computed_by(world, cpu, SHORT) == "p0"
            world.known(world.p[0]).load.prefill_sent("other", 10**8, 100.0, loop.time())
            for _ in range(30):
                assert await computed_by(world, cpu, SHORT) == "c0"
            assert await world.metric("cpu_prefills_total", cause="late") == 30
            (told,) = state(shared, loop.time() + BEAT_S)["troubles"]
            assert told["alert"] == "PDGPUsMissing"
            assert told["what"].startswith("97% of the prompts")
        await cpu.end()

    run(scenario())


def test_only_the_policy_length_uses_such_an_engine() -> None:
    async def scenario() -> None:
        async with world_with_cpu("round_robin") as (world, cpu):
            for _ in range(3):
                assert await computed_by(world, cpu, LONG, **NIGHTLY) == "p0"

    run(scenario())


@pytest.mark.parametrize("fault", ["refuses", "is dead"])
def test_a_prefill_engine_takes_over_what_a_cpu_engine_cannot(fault: str) -> None:
    async def scenario() -> None:
        async with world_with_cpu() as (world, cpu):
            if fault == "refuses":
                cpu.behave, world.d[0].behave = status(429, Retry_After="1"), waits_for_the_cpu
            else:
                await cpu.die()
                await world.down(cpu)
            await ask(world, LONG, **NIGHTLY)
            assert len(world.p[0].bodies) == 1
            assert world.d[0].params[-1]["remote_engine_id"] == "engine-p0"
            if fault == "is dead":
                await cpu.start()  # all that was open is open again, or closed

    run(scenario())


def test_such_engines_come_by_file_and_by_the_admin_api() -> None:
    text = yaml.safe_dump(
        {
            "engines": [
                {"url": "p:1", "role": "prefill"},
                {"url": "d:1", "role": "decode"},
                {"url": "c:1", "role": "cpu_prefill", "events": "tcp://c:2"},
            ],
            "policy": "length",
            "classes": [{"name": "nightly", "reserved_fraction": 1.0, "interactive": False}],
        }
    )
    config = parse(text.encode(), {}, "router.yaml")
    assert config.cpu_prefill == ("http://c:1",)
    assert config.kv_events == {"http://c:1": ("tcp://c:2", None)}
    with pytest.raises(ValueError, match="cpu_prefill http://p:1: is named on another side, too"):
        RouterConfig(prefill=("p:1",), decode=("d:1",), cpu_prefill=("p:1",))


def test_an_engine_becomes_one_by_the_admin_api() -> None:
    async def scenario() -> None:
        async with World(prefill=2, policy="length:round_robin", **CLASSED) as world:
            operator = AdminAuth("")
            app = create_admin(world.app[SHARED].pool, world.app[MOVER], operator, "127.0.0.1")
            token = {"Authorization": f"Bearer {operator.token}"}
            async with TestClient(TestServer(app), headers=token) as admin:
                asked = {"url": world.p[1].url, "role": "cpu_prefill"}
                answer = await admin.post("/engines/role", json=asked)
                assert answer.status == 200, await answer.text()
            known = world.known(world.p[1])
            assert known.role is Role.CPU_PREFILL
            await until(lambda: known.address is not None, "it was probed again")
            for _ in range(3):
                await ask(world, LONG)
            assert (len(world.p[0].bodies), len(world.p[1].bodies)) == (3, 0)
            await ask(world, LONG, **NIGHTLY)
            assert len(world.p[1].bodies) == 1

    run(scenario())
