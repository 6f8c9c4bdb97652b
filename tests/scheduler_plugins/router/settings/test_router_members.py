# SPDX-License-Identifier: Apache-2.0
"""Engines join, leave, drain and change sides while requests are served."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from router_fakes import FAST, FakeEngine, World, answer, run, slow, until

from scheduler_plugins.router import reload
from scheduler_plugins.router.endpoints.app_keys import ADMIN_AUTH, SHARED
from scheduler_plugins.router.engines import named as named_module
from scheduler_plugins.router.engines.engine import Role
from scheduler_plugins.router.engines.pool import EnginePool
from scheduler_plugins.router.server import RouterServer
from scheduler_plugins.router.settings.config import RouterConfig
from scheduler_plugins.router.settings.settings_file import SettingsError, SettingsFile, parse

ENGINES = [{"url": "a:1", "role": "prefill"}, {"url": "b:2", "role": "decode"}]


def test_the_file_names_engines_policies_and_limits() -> None:
    text = yaml.safe_dump(
        {
            "engines": [
                {"url": "a:1", "role": "prefill", "events": "tcp://a:5", "replay": "tcp://a:6"},
                {"url": "b:2", "role": "decode"},
                {"url": "c:3"},
            ],
            "policy": "conductor",
            "limits": {"attempts": 5, "idle_timeout_s": 7},
        }
    )
    config = parse(text.encode(), {"port": 9, "attempts": 1}, "file")
    assert (config.prefill, config.decode) == (("http://a:1",), ("http://b:2",))
    assert config.engine == ("http://c:3",)
    assert config.kv_events == {"http://a:1": ("tcp://a:5", "tcp://a:6")}
    assert (config.policy, config.attempts, config.idle_timeout_s, config.port) == (
        "conductor",
        5,
        7.0,
        9,
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"engines": ENGINES, "polcy": "x"}, "polcy"),
        ({"engines": ENGINES, "policy": "no_such"}, "no_such"),
        ({"engines": ENGINES, "limits": {"port": 1}}, "is not a limit"),
        ({"engines": ENGINES, "limits": {"attempts": 1.5}}, "whole number"),
        ({"engines": ENGINES[:1]}, "decode"),
        ({"engines": [*ENGINES, {"url": "ftp://x"}]}, "must look like"),
        ({"engines": ENGINES, "limits": {"attempts": float("inf")}}, "infinity"),
        ({"engines": [*ENGINES, {"url": "c:1", "role": "gpu"}]}, "gpu"),
        ("nonsense", "file"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(content: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        parse(yaml.safe_dump(content).encode(), {}, "file")


FILE = """\
engines:
  - {url: "a:1", role: prefill}
  - url: "b:2"
    role: decode
policy: least_delay
groups:
  default: {min_prefill: 1}
limits:
  attempts: 3
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("policy:", "polcy:", "f.yaml:5: key 'polcy' is not known; did you mean 'policy'?"),
        (
            "role: decode",
            "rolle: decode",
            "f.yaml:4: key 'rolle' is not known; did you mean 'role'?",
        ),
        (
            "min_prefill",
            "min_prefil",
            "f.yaml:7: key 'min_prefil' is not known; did you mean 'min_prefill'?",
        ),
        (
            "attempts",
            "attemps",
            "f.yaml:9: limits: 'attemps' is not a limit; did you mean 'attempts'?",
        ),
        (
            "role: decode",
            "role: decoder",
            "f.yaml:4: role 'decoder': must be one of ask, both, cpu_prefill, decode, prefill; did you mean 'decode'?",
        ),
        ("attempts: 3", "attempts: many", "f.yaml:8: limits: Expected `float`, got `str`"),
        ("attempts: 3", "attempts: 0", "f.yaml:9: attempts 0: must be 1 or more"),
        ("least_delay", "leest", "f.yaml:5: policy 'leest' is not known"),
        ('"b:2"', '"ftp://b"', "f.yaml:3: decode 'ftp://b': must look like"),
        ('"b:2"', "[1]", "f.yaml:3: url: Expected `str`, got `array`"),
        ("min_prefill: 1", "min_prefill: 0", "f.yaml:6: min_prefill 0: must be 1 or more"),
        ("policy:", "  policy:", "f.yaml:5: "),
        ("engines:", "engine:", "f.yaml:1: key 'engine' is not known; did you mean 'engines'?"),
    ],
)
def test_an_error_names_the_line_and_the_key_that_was_meant(old: str, new: str, said: str) -> None:
    assert old in FILE
    with pytest.raises(SettingsError) as refused:
        parse(FILE.replace(old, new, 1).encode(), {}, "f.yaml")
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)


def test_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    path.write_text(yaml.safe_dump({"engines": ENGINES}))
    file = SettingsFile(path, {})
    assert file.changed() is None
    path.write_text("engines: [")
    with pytest.raises(SettingsError):
        file.changed()
    assert file.changed() is None, "it is said once"
    path.write_text(yaml.safe_dump({"engines": ENGINES, "policy": "jsq"}))
    changed = file.changed()
    assert changed is not None
    assert changed.policy == "jsq"


def test_the_file_is_still_followed_after_settings_that_nobody_could_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reload, "EVERY_S", 0.01)
    path, used = tmp_path / "router.yaml", list[str]()

    def write(policy: str) -> None:
        path.write_text(yaml.safe_dump({"engines": ENGINES, "policy": policy}))

    def use(config: RouterConfig) -> None:
        used.append(config.policy)
        if config.policy == "random":
            raise RuntimeError("its engines cannot be watched")

    async def scenario() -> None:
        write("jsq")
        async with reload.reloading(SettingsFile(path, {}), use):
            for policy in ("random", "least_work"):
                write(policy)
                await until(lambda policy=policy: policy in used, "it was read")

    run(scenario())
    assert used == ["random", "least_work"]
    assert "the changed settings cannot be used" in caplog.text


def test_a_live_router_follows_its_file(tmp_path: Path) -> None:
    async def scenario() -> None:
        fakes = [FakeEngine("p", "engine-p"), FakeEngine("d0"), FakeEngine("d1")]
        for fake in fakes:
            await fake.start()
        first, later = (
            {"url": fakes[n].url, "role": "prefill" if n == 0 else "decode"} for n in (1, 2)
        )
        base = [{"url": fakes[0].url, "role": "prefill"}]
        path = tmp_path / "router.yaml"
        path.write_text(yaml.safe_dump({"engines": [*base, first]}))
        settings = SettingsFile(path, {**FAST})
        async with RouterServer(settings.current, settings) as server:
            shared = server.app[SHARED]

            def urls() -> set[str]:
                return {engine.url for engine in shared.pool.engines}

            assert urls() == {fakes[0].url, fakes[1].url}
            changed = {"engines": [*base, later], "policy": "jsq", "limits": {"attempts": 7}}
            path.write_text(yaml.safe_dump(changed))
            await until(lambda: urls() == {fakes[0].url, fakes[2].url}, "the file is followed")
            assert shared.config.attempts == 7
            await until(lambda: len(shared.pool.up(Role.DECODE)) == 1, "the new engine is up")
        for fake in fakes:
            await fake.die()

    run(scenario())


class Admin:
    """The admin API of a world."""

    def __init__(self, world: World) -> None:
        self._base = f"http://127.0.0.1:{world.server.admin_port}/engines"
        self._headers = {"Authorization": f"Bearer {world.app[ADMIN_AUTH].token}"}

    async def __call__(self, method: str, path: str = "", **body: Any) -> tuple[int, Any]:
        async with (
            aiohttp.ClientSession() as session,
            session.request(
                method, self._base + path, json=body, headers=self._headers
            ) as response,
        ):
            return response.status, await response.json()


def test_an_engine_joins_serves_and_leaves() -> None:
    async def scenario() -> None:
        joining = FakeEngine("new")
        await joining.start()
        async with World(admin_port=0) as world:
            admin = Admin(world)
            status, told = await admin("POST", url=joining.url, role="decode")
            assert (status, len(told["engines"])) == (200, 3)
            await until(lambda: len(world.app[SHARED].pool.up(Role.DECODE)) == 2, "it is up")
            answered = {(await world.complete()).json["served_by"] for _ in range(6)}
            assert answered == {"d0", "new"}
            assert (await admin("POST", url=joining.url))[0] == 400, "it is there already"
            assert (await admin("DELETE", url=joining.url))[0] == 200
            await until(lambda: len(world.engines) == 2, "it has left")
            assert await world.metric("engine_up", engine=joining.url) == 0
            assert (await admin("DELETE", url=joining.url))[0] == 404
            status, told = await admin("DELETE", url=world.d[0].url)
            assert status == 400
            said = f"url {world.d[0].url}: is the last engine with the home decode"
            assert told["error"]["message"].startswith(said)
        await joining.end()

    run(scenario())


def test_requests_of_an_engine_that_leaves_end_first() -> None:
    async def scenario() -> None:
        async with World(decode=2, admin_port=0) as world:
            for fake in world.d:
                fake.behave = slow(0.5)
            tasks = [asyncio.create_task(world.complete()) for _ in range(4)]
            await until(lambda: all(fake.running == 2 for fake in world.d), "both are busy")
            assert (await Admin(world)("DELETE", url=world.d[0].url))[0] == 200
            replies = await asyncio.gather(*tasks)
            assert [reply.status for reply in replies] == [200] * 4
            assert world.d[0].cancelled == 0
            await until(lambda: len(world.engines) == 2, "it has left")

    run(scenario())


def test_a_drained_engine_gets_nothing_until_it_is_wanted_again() -> None:
    async def scenario() -> None:
        async with World(decode=2, admin_port=0) as world:
            admin = Admin(world)
            status, told = await admin("POST", "/drain", url=world.d[0].url)
            assert status == 200
            assert [one.get("draining", False) for one in told["engines"]] == [False, True, False]
            assert {(await world.complete()).json["served_by"] for _ in range(4)} == {"d1"}
            await admin("POST", "/drain", url=world.d[0].url, drain=False)
            assert {(await world.complete()).json["served_by"] for _ in range(4)} == {"d0", "d1"}

    run(scenario())


def test_an_engine_changes_sides() -> None:
    async def scenario() -> None:
        async with World(prefill=2, decode=1, admin_port=0) as world:
            admin = Admin(world)
            moved = world.p[1]
            assert (await admin("POST", "/role", url=moved.url, role="decode"))[0] == 200
            answered = {(await world.complete()).json["served_by"] for _ in range(6)}
            assert answered == {"d0", "p1"}
            assert await world.metric("engine_up", engine=moved.url, role="prefill") == 0
            assert (await admin("POST", "/role", url=moved.url, role="prefill"))[0] == 200
            await until(lambda: world.known(moved).address is not None, "it hands over again")
            assert (await admin("POST", "/role", url=world.d[0].url, role="prefill"))[0] == 400
            assert (await admin("POST", "/role", url=moved.url, role="both"))[0] == 200
            assert world.known(moved).address is not None, "it goes on handing over"
            answered = {(await world.complete()).json["served_by"] for _ in range(6)}
            assert answered == {"d0", "p1"}
            await world.d[0].die()
            await world.down(world.d[0])
            assert (await world.complete()).json["served_by"] == "p1", "with p0's KV"
            assert world.p[1].params[-1] is not None

    run(scenario())


def test_an_engine_of_both_sides_in_the_file_is_on_both() -> None:
    text = yaml.safe_dump({"engines": [*ENGINES, {"url": "c:3", "role": "both"}]}).encode()
    config = parse(text, {}, "router.yaml")
    assert config.prefill == ("http://a:1", "http://c:3")
    assert config.decode == ("http://b:2", "http://c:3")
    assert config.placed(lambda url: (url,))["http://c:3"].home is Role.BOTH


def test_the_events_of_an_engine_that_comes_back_on_the_other_side_are_followed_once() -> None:
    async def scenario() -> None:
        async with World(prefill=2, decode=1, admin_port=0) as world:
            admin, moved, ends = Admin(world), world.p[1], asyncio.Event()

            async def held(
                engine: FakeEngine, request: web.Request, body: dict[str, Any]
            ) -> web.StreamResponse:
                await ends.wait()
                return await answer(engine, request, body)

            moved.behave = world.d[0].behave = held
            where = {"url": moved.url, "events": "ipc:///nowhere/at/all"}

            def followers() -> list[str]:
                names = [task.get_name() for task in asyncio.all_tasks()]
                return [name for name in names if name.startswith("events of")]

            assert (await admin("DELETE", url=moved.url))[0] == 200
            assert (await admin("POST", **where, role="prefill"))[0] == 200
            await until(lambda: world.known(moved).up, "it is there")
            tasks = [asyncio.create_task(world.complete()) for _ in range(2)]
            await until(lambda: moved.running == 1, "it is busy")
            assert (await admin("DELETE", url=moved.url))[0] == 200
            assert (await admin("POST", **where, role="decode"))[0] == 200
            ends.set()
            await asyncio.gather(*tasks)
            await until(lambda: len(world.engines) == 3, "it has left its old side")
            assert len(followers()) == 1
            assert (await admin("DELETE", url=moved.url))[0] == 200
            await until(lambda: not followers(), "nobody follows it any more")

    run(scenario())


def test_what_is_changed_of_times_holds_without_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"

    def write(**limits: float) -> None:
        path.write_text(yaml.safe_dump({"engines": ENGINES, "limits": limits}))

    async def scenario() -> None:
        write(idle_timeout_s=1)
        settings = SettingsFile(path, {**FAST})
        async with RouterServer(settings.current, settings) as server:
            shared = server.app[SHARED]
            assert shared.config.idle_timeout_s == 1
            write(idle_timeout_s=0.2)
            await until(lambda: shared.config.idle_timeout_s == 0.2, "the file is followed")
            async with aiohttp.ClientSession() as client:
                url = f"http://127.0.0.1:{server.port}/v1/completions"
                async with client.post(url, data=never()) as reply:
                    assert reply.status == 400
                    assert "0.2 s" in await reply.text()

    run(scenario())


async def never() -> AsyncIterator[bytes]:
    """A body that does not come."""
    yield b"{"
    await asyncio.Event().wait()


def test_a_limit_that_holds_from_the_start_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reload, "EVERY_S", 0.01)
    path = tmp_path / "router.yaml"
    path.write_text(yaml.safe_dump({"engines": ENGINES}))

    async def scenario() -> None:
        async with reload.reloading(SettingsFile(path, {}), lambda config: None):
            limits = {"shutdown_timeout_s": 99}
            path.write_text(yaml.safe_dump({"engines": ENGINES, "limits": limits}))
            said = "shutdown_timeout_s: the change takes effect when the router is restarted"
            await until(lambda: said in caplog.text, "it is said")

    run(scenario())


class Late(FakeEngine):
    """Says how it is once it `begins`."""

    def __init__(self, name: str, engine_id: str | None = None) -> None:
        super().__init__(name, engine_id)
        self.asked, self.begins = False, asyncio.Event()

    async def _health(self, request: web.Request) -> web.StreamResponse:
        self.asked = True
        await self.begins.wait()
        return await super()._health(request)


def test_engines_that_are_all_replaced_serve_until_the_others_do() -> None:
    async def scenario() -> None:
        others = [Late("p9", "engine-p9"), Late("d9")]
        for fake in others:
            await fake.start()
        async with World(health_timeout_s=1e6) as world:
            pool = world.app[SHARED].pool
            assert isinstance(pool, EnginePool)
            urls = {"prefill": (others[0].url,), "decode": (others[1].url,)}
            pool.use(replace(pool.config, **urls))
            await until(lambda: all(fake.asked for fake in others), "they are looked at")
            assert (await world.complete()).json["served_by"] == "d0"
            for fake in others:
                fake.begins.set()
            while len(world.engines) > 2:
                assert (await world.complete()).status == 200
            assert (await world.complete()).json["served_by"] == "d9"
        for fake in others:
            await fake.die()

    run(scenario())


def test_a_drained_engine_is_named_as_such() -> None:
    async def scenario() -> None:
        async with World(admin_port=0) as world:
            for fake in world.p + world.d:
                assert (await Admin(world)("POST", "/drain", url=fake.url))[0] == 200
            reply = await world.complete()
            assert reply.status == 503
            assert reply.json["error"]["engines"] == {
                "decode": {"draining": 1},
                "prefill": {"draining": 1},
            }

    run(scenario())


def test_a_name_joins_at_once_and_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_module, "MEMBERS_S", 1e6)

    async def scenario() -> None:
        joining = FakeEngine("new")
        await joining.start()
        async with World(admin_port=0) as world:
            admin, name = Admin(world), f"dns+http://127.0.0.1:{joining.port}"
            pool = world.app[SHARED].pool
            assert (await admin("DELETE", url=name))[0] == 404
            assert (await admin("POST", url=name, role="decode"))[0] == 200
            await until(lambda: len(pool.up(Role.DECODE)) == 2, "it is up")
            assert (await admin("DELETE", url=joining.url))[0] == 400, "it belongs to the name"
            assert (await admin("DELETE", url=name))[0] == 200
            await until(lambda: len(world.engines) == 2, "it has left")
        await joining.end()

    run(scenario())


def test_without_a_key_the_admin_api_listens_on_loopback_only() -> None:
    with pytest.raises(ValueError, match="PD_ROUTER_ADMIN_KEY"):
        RouterConfig(prefill=("a:1",), decode=("b:2",), admin_port=1, admin_host="0.0.0.0")
    RouterConfig(
        prefill=("a:1",),
        decode=("b:2",),
        admin_port=1,
        admin_key="a key of the administrator of a test",
        admin_host="::",
    )
