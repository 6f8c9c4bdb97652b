# SPDX-License-Identifier: Apache-2.0
"""Engines change their roles by the admin API, while they serve, and edits of the file leave these roles alone."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from router_fakes import DONE, FAST, FakeEngine, World, choices, event, run, until

from scheduler_plugins.router.endpoints.app_keys import ADMIN_AUTH, SHARED
from scheduler_plugins.router.engines.engine import Role
from scheduler_plugins.router.server import RouterServer
from scheduler_plugins.router.settings.settings_file import SettingsFile


async def ask(server: RouterServer, path: str, asked: Any) -> tuple[int, Any]:
    url = f"http://127.0.0.1:{server.admin_port}/engines{path}"
    token = {"Authorization": f"Bearer {server.app[ADMIN_AUTH].token}"}
    async with aiohttp.ClientSession(headers=token) as client:
        call = client.get(url) if asked is None else client.post(url, json=asked)
        async with call as answer:
            return answer.status, await answer.json()


def can_hand_over(world: World) -> None:
    """The decode engines are `kv_both`, too."""
    for fake in world.d:
        fake.engine_id = f"engine-{fake.name}"


def roles(world: World) -> dict[str, str]:
    return {fake.name: str(world.known(fake).role) for fake in (*world.p, *world.d)}


async def known_addresses(world: World) -> None:
    await until(lambda: all(one.addresses for one in world.engines), "all have told their address")


class Elastic(World):
    """One prefill and one decode engine, which can do both."""

    def __init__(self, prefill: int = 1, decode: int = 1, **settings: Any) -> None:
        super().__init__(prefill, decode, admin_port=0, **settings)
        can_hand_over(self)


def test_two_engines_swap_in_one_call_and_serve_the_other_way_at_once() -> None:
    async def scenario() -> None:
        async with Elastic() as world:
            await known_addresses(world)
            (p,), (d,) = world.p, world.d
            probes = p.probes, d.probes
            swap = [{"url": p.url, "role": "decode"}, {"url": d.url, "role": "prefill"}]
            for change in swap:
                status, told = await ask(world.server, "/role", change)
                assert status == 400, "alone, each would leave a side without an engine"
                assert "in the same call" in told["error"]["message"]
            assert (await ask(world.server, "/role", swap))[0] == 200
            assert roles(world) == {"p0": "decode", "d0": "prefill"}
            assert (await world.complete()).status == 200
            assert [x["do_remote_decode"] for x in d.params if x] == [True]
            assert [x["do_remote_prefill"] for x in p.params if x] == [True]
            assert (p.probes, d.probes) == probes, "no engine was asked where it is: it was known"
            moves = {"from": "prefill", "to": "decode", "cause": "operator"}
            assert await world.metric("role_moves_total", **moves) == 1

    run(scenario())


def test_a_list_with_one_bad_change_changes_nothing() -> None:
    async def scenario() -> None:
        async with Elastic() as world:
            changes = [
                {"url": world.d[0].url, "role": "both"},
                {"url": "http://127.0.0.1:1", "role": "decode"},
            ]
            assert (await ask(world.server, "/role", changes))[0] == 404
            assert roles(world) == {"p0": "prefill", "d0": "decode"}

    run(scenario())


def test_a_change_that_cannot_be_is_refused_with_what_to_do() -> None:
    async def scenario() -> None:
        async with Elastic(decode=2) as world:
            world.d[1].engine_id = None
            await until(lambda: all(one.handover_known for one in world.engines), "all asked")
            (able, bare), role = world.d, "/role"
            engine = world.known(bare)
            engine.set_addresses(())
            for asked, said in (
                ({"url": bare.url, "role": "prefill"}, "start it with PDConnector"),
                ({"url": able.url, "role": "prefil"}, "did you mean 'prefill'?"),
                ({"url": able.url, "rolle": "prefill"}, "did you mean 'role'?"),
                ([{"url": able.url, "role": one} for one in ("both", "decode")], "named twice"),
            ):
                status, told = await ask(world.server, role, asked)
                assert status == 400
                assert said in told["error"]["message"], told
            assert set(roles(world).values()) == {"prefill", "decode"}

    run(scenario())


def test_an_engine_of_both_sides_is_one_engine_and_not_its_own_partner() -> None:
    async def scenario() -> None:
        async with Elastic(policy="least_delay") as world:
            await known_addresses(world)
            status, told = await ask(world.server, "/role", {"url": world.d[0].url, "role": "both"})
            assert (status, len(told["engines"])) == (200, 2)
            for n in range(20):
                assert (await world.complete(prompt=f"{n} " * 50)).status == 200
            sent = [params for params in world.d[0].params if params]
            assert not any(params.get("do_remote_decode") for params in sent)

    run(scenario())


def test_what_an_engine_decodes_goes_on_when_its_side_changes() -> None:
    async def scenario() -> None:
        goes_on = asyncio.Event()

        async def slowly(engine: FakeEngine, request: Any, body: dict[str, Any]) -> Any:
            response = aiohttp.web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(event("a"))
            await goes_on.wait()
            await response.write(event("b") + DONE)
            return response

        async with Elastic(decode=2) as world:
            await known_addresses(world)
            for fake in world.d:
                fake.behave = slowly
            asked = [asyncio.create_task(world.complete(stream=True)) for _ in range(2)]
            await until(lambda: all(fake.running for fake in world.d), "both decode")
            known = world.known(world.d[0])
            assert (await ask(world.server, "/role", {"url": world.d[0].url, "role": "prefill"}))[
                0
            ] == 200
            assert await world.metric("engine_requests_in_flight", role="prefill") == 1
            assert known.batch == 1
            goes_on.set()
            for one in asked:
                assert (await one).events[:-1] == [choices("a"), choices("b")]
            assert await world.metric("engine_requests_in_flight") == 0

    run(scenario())


def test_a_role_is_pinned_until_it_is_released() -> None:
    async def scenario() -> None:
        async with Elastic(decode=2) as world:
            url = world.d[0].url
            await ask(world.server, "/role", {"url": url, "role": "prefill"})

            async def told() -> dict[str, Any]:
                listed = (await ask(world.server, "", None))[1]["engines"]
                return next(one for one in listed if one["url"] == url)

            found = await told()
            assert (found["role"], found["home"], found["pinned"]) == ("prefill", "decode", True)
            assert (await ask(world.server, "/release", {"url": url}))[0] == 200
            found = await told()
            assert (found["role"], "pinned" in found) == ("prefill", False)

    run(scenario())


@pytest.mark.parametrize("edit", ["policy", "its own role"])
def test_an_edit_of_the_file_leaves_roles_alone_but_its_own(edit: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        fakes = [FakeEngine(name, engine_id=name) for name in ("a", "b", "c")]
        for fake in fakes:
            await fake.start()
        path = tmp_path / "router.yaml"

        def write(policy: str, *sides: str) -> None:
            engines = [
                {"url": fake.url, "role": side} for fake, side in zip(fakes, sides, strict=True)
            ]
            path.write_text(json.dumps({"engines": engines, "policy": policy}))

        write("round_robin", "prefill", "decode", "decode")
        given = {name: value for name, value in FAST.items() if name != "policy"}
        settings = SettingsFile(path, {**given, "admin_port": 0})
        async with RouterServer(settings.current, settings) as server:
            shared = server.app[SHARED]
            asked = {"url": fakes[1].url, "role": "prefill"}
            assert (await ask(server, "/role", asked))[0] == 200
            engine = next(one for one in shared.pool.engines if one.url == fakes[1].url)
            if edit == "policy":
                write("jsq", "prefill", "decode", "decode")
                await until(lambda: shared.config.policy == "jsq", "the file was read")
                assert (engine.role, engine.role_state.pinned) == (Role.PREFILL, True)
            else:
                write("jsq", "prefill", "both", "decode")
                await until(lambda: engine.role is Role.BOTH, "its own entry has changed")
                assert not engine.role_state.pinned
            assert len(shared.pool.engines) == 3
        for fake in fakes:
            await fake.die()

    run(scenario())
