# SPDX-License-Identifier: Apache-2.0
"""What becomes of engines that a command starts or stops, and of requests meanwhile. Engines are fakes, commands are not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from router_fakes import FakeEngine, World, run, stream, until
from sglang_fakes import Switching

from scheduler_plugins.router.elastic import command, scaling, task
from scheduler_plugins.router.elastic.task import Elastic
from scheduler_plugins.router.endpoints.app_keys import MOVER, SHARED
from scheduler_plugins.router.endpoints.page import state
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.roles.base import Fleet, Move, RolePolicy, Scale
from scheduler_plugins.router.roles.registry import ROLES
from scheduler_plugins.router.roles.scaling import Limits
from scheduler_plugins.router.settings import elastic


class Wants(RolePolicy):
    """Proposes what a test wants."""

    scales = True
    decode: ClassVar[int] = 1

    def decide(self, fleet: Fleet, now_s: float) -> Sequence[Move | Scale]:
        return [Scale("default", Role.DECODE, Wants.decode, "the test wants it")]


@pytest.fixture(autouse=True)
def wants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROLES, "wants", Wants)
    monkeypatch.setattr(task, "EVERY_S", 1e6)  # each test ticks itself
    monkeypatch.setattr(elastic, "Limits", partial(Limits, settle_s=0.0))
    Wants.decode = 1


@pytest.fixture
def commands_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """`start_timeout_s` is short for engines only: a command has time to end on a busy machine."""

    async def output_of(setting: str, arguments: Any, variables: Any, timeout_s: float) -> str:
        return await command.output_of(setting, arguments, variables, 60.0)

    monkeypatch.setattr(scaling, "output_of", output_of)


class Scaled:
    """A router whose commands are scripts of a test."""

    def __init__(self, folder: Path, start: str, decode: int = 1, **settings: Any) -> None:
        self.stopped, names = folder / "stopped", ("start", "stop")
        for name, body in zip(names, (start, f'echo "$1" >> {self.stopped}'), strict=True):
            (folder / name).write_text(f"#!/bin/sh\n{body}\n")
            (folder / name).chmod(0o700)
        commands = {
            "start_command": f"{folder}/start {{group}} {{role}}",
            "stop_command": f"{folder}/stop {{url}}",
        }
        most = {"max_prefill": 4, "max_decode": 4, "engine_start_s": 0.1}
        self.world = World(1, decode, **{"roles": "wants", **commands, **most, **settings})

    async def __aenter__(self) -> Scaled:
        await self.world.__aenter__()
        await until(lambda: all(one.up for one in self.world.engines), "all are up")
        self.pool = self.world.app[SHARED].pool
        self.elastic = Elastic(self.pool, self.world.app[MOVER], dict)
        self.elastic.tick(self.now_s)
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.elastic._scaling.close()
        await self.world.__aexit__(*error)

    @property
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def counted(self, outcome: str) -> None:
        """Wait until a start or a stop has ended so."""

        def count() -> float | None:
            labels = {"group": "default", "role": "decode", "outcome": outcome}
            registry = self.pool.metrics.registry
            return registry.get_sample_value("pd_router:engine_starts_total", labels)

        await until(lambda: count() == 1, outcome)

    def want(self, engines: int) -> None:
        Wants.decode = engines
        self.elastic.tick(self.now_s)


async def another(world: World) -> FakeEngine:
    fake = FakeEngine("x")
    await fake.start()
    world.d.append(fake)
    return fake


def test_an_engine_that_was_started_serves_and_is_stopped_when_its_stream_has_ended(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with Scaled(tmp_path, f'cat "{tmp_path}/url"') as scaled:
            world, fake = scaled.world, await another(scaled.world)
            (tmp_path / "url").write_text(f"starting\n\n{fake.url}\n")
            scaled.want(2)
            await scaled.counted("started")
            assert await world.metric("engines_wanted", group="default", role="decode") == 2
            world.known(world.d[0]).role_state.pinned = True
            fake.behave = stream(20, gap_s=0.05)
            asked = [
                asyncio.create_task(world.complete(prompt=f"{n}", stream=True)) for n in range(2)
            ]
            await until(lambda: fake.running == 1, "it answers")
            scaled.want(1)
            await until(lambda: world.known(fake).draining, "it drains")
            assert not scaled.stopped.exists()
            for answer in await asyncio.gather(*asked):
                assert answer.status == 200
                assert b"[DONE]" in answer.content
            await scaled.counted("stopped")
            assert scaled.stopped.read_text() == f"{fake.url}\n"
            assert [one.url for one in world.engines if one.role is Role.DECODE] == [
                world.d[0].url
            ], "the pinned one stays"
            shown = [each["why"] for each in state(world.app[SHARED], 0.0)["decisions"]]
            assert "wants: the test wants it" in shown

    run(scenario())


@pytest.mark.parametrize(
    ("start", "outcome", "message"),
    [
        ("echo no GPU is free >&2; exit 3", "failed_command", "status 3 (no GPU is free)"),
        ("true", "failed_address", "must print the engine's URL as its last line"),
        ("echo 'it'\\''s $(ready)'", "failed_address", "must print the engine's URL"),
        ("echo http://127.0.0.1:1", "failed_serving", "does not serve 0.5 s after start_command"),
    ],
)
def test_a_start_that_fails_is_named_counted_and_not_waited_for(
    commands_end: None,
    tmp_path: Path,
    start: str,
    outcome: str,
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        async with Scaled(tmp_path, start, start_timeout_s=0.5) as scaled:
            scaled.want(2)
            await scaled.counted(outcome)
            (said,) = [text for text in caplog.messages if "no decode engine of group" in text]
            assert message in said
            scaled.want(2)
            wanted = await scaled.world.metric("engines_wanted", group="default", role="decode")
            assert wanted == 1, "not asked for again before a pause"
            assert (await scaled.world.complete(prompt="x")).status == 200
            if outcome == "failed_serving":
                await scaled.counted("stopped")
                assert scaled.stopped.read_text() == "http://127.0.0.1:1\n"
                assert len(scaled.world.engines) == 2

    run(scenario())


def test_a_command_that_does_not_end_is_killed_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with Scaled(tmp_path, "exec sleep 60", start_timeout_s=0.5) as scaled:
            scaled.want(2)
            await scaled.counted("failed_command")
            assert "had not ended after 0.5 s, and was killed" in caplog.text

    run(scenario())


def test_a_new_router_decides_while_an_engine_that_it_has_started_does_not_serve_yet(
    tmp_path: Path,
) -> None:
    """Only engines that were listed before are waited for."""

    async def scenario() -> None:
        async with Scaled(tmp_path, "echo http://127.0.0.1:1") as scaled:
            scaled.want(2)
            await until(lambda: len(scaled.world.engines) == 3, "it is in the list")
            scaled.want(3)
            wanted = await scaled.world.metric("engines_wanted", group="default", role="decode")
            assert wanted == 3

    run(scenario())


def test_an_engine_that_is_no_longer_needed_is_not_waited_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Scaled(tmp_path, "echo $$ > pid; exec sleep 60") as scaled:
            scaled.want(2)
            await until(lambda: bool(scaled.elastic._scaling._starts), "it is being started")
            scaled.want(1)
            await until(lambda: not scaled.elastic._scaling._starts, "it is given up")

    run(scenario())


def test_a_dry_run_says_a_number_and_starts_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    async def scenario() -> None:
        async with Scaled(
            tmp_path, f"touch {tmp_path}/begun", roles="dry-run:wants", start_timeout_s=0.1
        ) as scaled:
            scaled.want(3)
            await asyncio.sleep(0.3)
            scaled.want(3)
            assert scaled.elastic._scaling._shown["default", Role.DECODE] == 3, "nothing is late"
            assert "group default would have 3 decode engines after 1: wants: " in caplog.text
            assert await scaled.world.metric("engines_wanted", role="decode") == 0
            assert not (tmp_path / "begun").exists()

    run(scenario())


def test_an_engine_that_was_started_stays_when_the_file_is_read_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Scaled(tmp_path, f'cat "{tmp_path}/url"') as scaled:
            before, fake = scaled.pool.config, await another(scaled.world)
            (tmp_path / "url").write_text(fake.url)
            scaled.want(2)
            await scaled.counted("started")
            scaled.pool.edit(replace(before, attempts=2))
            scaled.elastic.tick(scaled.now_s)
            known = scaled.world.known(fake)
            assert fake.url in scaled.pool.config.decode
            assert not scaled.pool.leaves(known)
            assert not known.draining

    run(scenario())


def test_an_engine_that_drains_is_taken_back_when_it_is_needed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Scaled(tmp_path, "exit 1", decode=2) as scaled:
            world = scaled.world
            for fake in world.d:
                fake.behave = stream(30, gap_s=0.05)
            asked = asyncio.create_task(world.complete(prompt="a", stream=True))
            await until(lambda: any(fake.running for fake in world.d), "an engine answers")
            for fake in world.d:
                world.known(fake).role_state.pinned = not fake.running
            scaled.want(1)
            await until(lambda: any(each.draining for each in world.engines), "it drains")
            scaled.want(2)
            await until(lambda: not any(each.draining for each in world.engines), "it is back")
            assert (await asked).content.endswith(b"[DONE]\n\n")
            assert not scaled.stopped.exists()

    run(scenario())


def test_an_engine_of_both_sides_counts_on_both(tmp_path: Path) -> None:
    """Otherwise an engine would be started every second, whatever `max_decode` says."""

    async def scenario() -> None:
        async with Scaled(tmp_path, "sleep 60", both=True) as scaled:
            scaled.want(2)
            assert not scaled.elastic._scaling._starts

    run(scenario())


def test_an_engine_that_works_alone_does_not_count(tmp_path: Path) -> None:
    """The policy does not see it. Otherwise the first tick would stop an engine of the user's."""
    Wants.decode = 2

    async def scenario() -> None:
        async with Scaled(tmp_path, "sleep 60", decode=2) as scaled:
            scaled.world.known(scaled.world.d[0]).whole = True
            scaled.elastic._controllers.clear()  # as at the router's start
            scaled.want(1)
            assert not scaled.elastic._scaling._stops

    run(scenario())


def test_a_start_of_an_engine_that_works_alone_has_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with Scaled(tmp_path, f'cat "{tmp_path}/url"') as scaled:
            fake = Switching("x", "null")
            await fake.start()
            scaled.world.d.append(fake)
            (tmp_path / "url").write_text(fake.url)
            scaled.want(2)
            await scaled.counted("failed_serving")
            assert "start it with --disaggregation-mode" in caplog.text
            await scaled.counted("stopped")

    run(scenario())


NAME = "dns+http://nowhere.invalid:8000"


@pytest.mark.parametrize("comes", [True, False])
def test_a_start_behind_a_name_lasts_until_the_name_shows_an_engine_that_serves(
    commands_end: None, tmp_path: Path, comes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise one more would be started every second until then."""

    async def scenario() -> None:
        timeout_s = 60.0 if comes else 0.5
        async with Scaled(
            tmp_path, f"echo x >> {tmp_path}/begun", start_timeout_s=timeout_s
        ) as scaled:
            pool, fake = scaled.pool, await another(scaled.world)
            pool.edit(replace(pool.config, decode=(*pool.config.decode, NAME)))
            scaled.want(2)
            if comes:
                (start,) = scaled.elastic._scaling._starts
                await until(lambda: start.by_name, "the command has ended")
                scaled.want(2)
                assert scaled.elastic._scaling._starts == [start], "no other one is begun"
                pool._named._members[NAME] = (fake.url,)
                pool.use(pool.config)
                scaled.elastic._scaling._look_behind_names(start)
                assert scaled.elastic._scaling.has_started(fake.url), "decisions do not wait for it"
                scaled.want(2)
                await scaled.counted("started")
                assert scaled.world.known(fake).up
            else:
                await scaled.counted("failed_serving")
                assert "no engine that a name has shown since does not serve" in caplog.text
            scaled.want(2)
            assert (tmp_path / "begun").read_text() == "x\n"

    run(scenario())


def test_a_dead_engine_makes_no_live_one_stop(tmp_path: Path) -> None:
    Wants.decode = 4

    async def scenario() -> None:
        async with Scaled(tmp_path, "sleep 60", decode=4) as scaled:
            dead = scaled.world.known(scaled.world.d[0])
            dead.set_down(scaled.now_s, "dead", refusing=False)
            scaled.want(3)
            assert not any(engine.draining for engine in scaled.world.engines)

    run(scenario())


def test_an_engine_that_looks_down_for_a_while_is_not_stopped_under_its_streams(
    tmp_path: Path,
) -> None:
    Wants.decode = 2

    async def scenario() -> None:
        async with Scaled(tmp_path, "sleep 60", decode=2) as scaled:
            world = scaled.world
            for fake in world.d:
                fake.behave = stream(30, gap_s=0.05)
            asked = asyncio.create_task(world.complete(prompt="a", stream=True))
            await until(lambda: any(fake.running for fake in world.d), "an engine answers")
            for fake in world.d:
                world.known(fake).role_state.pinned = not fake.running
            scaled.want(1)
            busy = next(each for each in world.engines if each.draining)
            busy.set_down(scaled.now_s, "its health check was late", refusing=False)
            await asyncio.sleep(0.3)
            assert not scaled.stopped.exists()
            assert (await asked).content.endswith(b"[DONE]\n\n")
            await scaled.counted("stopped")

    run(scenario())


def test_an_engine_that_drains_is_stopped_even_if_the_settings_lose_the_command(
    tmp_path: Path,
) -> None:
    Wants.decode = 2

    async def scenario() -> None:
        async with Scaled(tmp_path, "sleep 60", decode=2) as scaled:
            scaled.want(1)
            none = {"start_command": "", "stop_command": ""}
            scaled.pool.edit(replace(scaled.pool.config, roles="pressure", **none))
            scaled.elastic.tick(scaled.now_s)
            wanted = await scaled.world.metric("engines_wanted", group="default", role="decode")
            assert wanted == 0, "no number is shown"
            await scaled.counted("stopped")

    run(scenario())


def test_an_engine_that_drains_goes_on_when_the_file_is_read_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Scaled(tmp_path, f'cat "{tmp_path}/url"') as scaled:
            before, world, fake = scaled.pool.config, scaled.world, await another(scaled.world)
            (tmp_path / "url").write_text(fake.url)
            scaled.want(2)
            await scaled.counted("started")
            world.known(world.d[0]).role_state.pinned = True
            fake.behave = stream(20, gap_s=0.05)
            asked = [
                asyncio.create_task(world.complete(prompt=f"{n}", stream=True)) for n in range(2)
            ]
            await until(lambda: fake.running == 1, "it answers")
            scaled.want(1)
            assert world.known(fake).draining
            scaled.pool.edit(replace(before, attempts=2))
            scaled.elastic.tick(scaled.now_s)
            assert world.known(fake).draining
            assert not scaled.pool.leaves(world.known(fake))
            await asyncio.gather(*asked)
            await scaled.counted("stopped")

    run(scenario())


def test_an_engine_whose_stop_command_runs_stays_out_when_the_file_is_read_again(
    tmp_path: Path,
) -> None:
    """It still answers health checks, so it would get requests that end with it."""
    Wants.decode = 2

    async def scenario() -> None:
        async with Scaled(tmp_path, "sleep 60", decode=2) as scaled:
            before, world = scaled.pool.config, scaled.world
            wait = f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done"
            (tmp_path / "stop").write_text(f'#!/bin/sh\necho "$1" >> {scaled.stopped}\n{wait}\n')
            scaled.want(1)
            await until(scaled.stopped.exists, "the command runs")
            assert scaled.pool.stopping == {scaled.stopped.read_text().strip()}

            def serving() -> list[str]:
                leaves = scaled.pool.leaves
                engines = [each for each in world.engines if each.role is Role.DECODE]
                return [each.url for each in engines if not leaves(each) and not each.draining]

            (left,) = serving()
            scaled.pool.edit(replace(before, attempts=2))
            assert serving() == [left], "the file lists both"
            assert scaled.pool.config.attempts == 2
            version = scaled.pool.listed
            scaled.pool.use(before)  # as of another worker that has read the file
            assert serving() == [left]
            assert scaled.pool.listed > version, "the other worker leaves it out, too"
            (tmp_path / "go").touch()
            await scaled.counted("stopped")
            await until(lambda: not scaled.pool.stopping, "its command has ended")
            scaled.pool.edit(before)
            assert sorted(serving()) == sorted(before.decode), "it may be used again"

    run(scenario())


def test_an_engine_whose_stop_command_runs_stays_out_though_the_file_lists_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The others were started by the router."""

    async def scenario() -> None:
        async with Scaled(tmp_path, f'cat "{tmp_path}/url"') as scaled:
            before, world = scaled.pool.config, scaled.world
            listed, fake = world.d[0], await another(world)
            (tmp_path / "url").write_text(fake.url)
            wait = f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done"
            (tmp_path / "stop").write_text(f'#!/bin/sh\necho "$1" >> {scaled.stopped}\n{wait}\n')
            scaled.want(2)
            await scaled.counted("started")
            world.known(fake).role_state.pinned = True
            scaled.want(1)
            await until(lambda: scaled.pool.stopping == {listed.url}, "it is being stopped")
            scaled.pool.edit(replace(before, attempts=2))
            kept = world.known(fake)
            assert not scaled.pool.leaves(kept)
            assert scaled.pool.config.decode == (fake.url,)
            for _ in range(3):
                scaled.elastic.tick(scaled.now_s)
            assert "stays in the list" not in caplog.text
            assert "cannot be used" not in caplog.text
            (tmp_path / "go").touch()
            await scaled.counted("stopped")

    run(scenario())


def test_a_start_without_room_for_its_output_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    async def scenario() -> None:
        async with Scaled(tmp_path, "true") as scaled:
            monkeypatch.setattr(command.tempfile, "TemporaryFile", full)
            scaled.want(2)
            await scaled.counted("failed_command")

    run(scenario())


def test_an_engine_that_came_though_the_command_to_stop_it_is_gone_serves(tmp_path: Path) -> None:
    """What is checked where settings are read must not refuse an engine that was started."""

    async def scenario() -> None:
        async with Scaled(tmp_path, f'cat "{tmp_path}/url"') as scaled:
            fake = await another(scaled.world)
            (tmp_path / "url").write_text(fake.url)
            (tmp_path / "stop").chmod(0o600)
            scaled.want(2)
            await scaled.counted("started")
            (tmp_path / "stop").chmod(0o700)

    run(scenario())


def test_an_engine_that_never_came_into_the_list_is_stopped(
    commands_end: None, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with Scaled(tmp_path, f'cat "{tmp_path}/url"', start_timeout_s=0.5) as scaled:
            own = f"http://127.0.0.1:{scaled.world.port}"
            (tmp_path / "url").write_text(own)
            config = scaled.pool.config
            scaled.pool.edit(replace(config, host="127.0.0.1", port=scaled.world.port))
            scaled.want(2)
            await scaled.counted("failed_serving")
            await scaled.counted("stopped")
            assert scaled.stopped.read_text() == f"{own}\n"
            assert not scaled.elastic._scaling._started

    run(scenario())


def test_a_router_that_decides_no_longer_ends_its_starts(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Scaled(tmp_path, "exec sleep 60") as scaled:
            scaled.want(2)
            await until(lambda: bool(scaled.elastic._scaling._starts), "it is being started")
            scaled.pool.leads = False
            scaled.want(2)
            await until(lambda: not scaled.elastic._scaling._starts, "it is given up")

    run(scenario())


def test_the_days_of_a_router_that_decides_no_longer_are_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "days.json"

    async def scenario() -> None:
        async with Scaled(tmp_path, "exit 1", days=str(path)) as scaled:
            async with scaled.elastic.running():
                scaled.want(1)
                scaled.pool.leads = False
                scaled.want(1)
                assert path.exists()
                path.write_text("newer")
            assert path.read_text() == "newer"

    run(scenario())
