# SPDX-License-Identifier: Apache-2.0
"""The router carries out what a role policy decides, and says so; it never moves an engine that cannot do the work."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest
from router_fakes import FakeEngine, World, choices, run, until

from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.router.elastic import task as task_module
from scheduler_plugins.router.elastic.task import Elastic
from scheduler_plugins.router.endpoints.app_keys import MOVER, SHARED
from scheduler_plugins.router.endpoints.page import state
from scheduler_plugins.router.engines.engine import Role
from scheduler_plugins.router.engines.pool import described
from scheduler_plugins.router.policies.base import Role as PolicyRole
from scheduler_plugins.router.roles.base import Fleet, Front, Move, RolePolicy
from scheduler_plugins.router.roles.registry import ROLES
from scheduler_plugins.router.settings.elastic import Place

LATER_S = 1e4
"""All engines have had their roles for longer than any guard asks for."""


class Wanted(RolePolicy):
    """Proposes what a test wants, and keeps what it was shown."""

    moves: list[Move] = []  # noqa: RUF012 - set by each test
    shown: list[Fleet] = []  # noqa: RUF012

    def decide(self, fleet: Fleet, now_s: float) -> list[Move]:
        Wanted.shown.append(fleet)
        return list(Wanted.moves)


@pytest.fixture(autouse=True)
def wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROLES, "wanted", Wanted)
    monkeypatch.setattr(task_module, "EVERY_S", 1e6)  # each test ticks itself
    Wanted.moves, Wanted.shown = [], []


def both_kinds(world: World) -> World:
    for fake in world.d:
        fake.engine_id = f"engine-{fake.name}"
    return world


async def ready(world: World) -> Elastic:
    await until(lambda: all(one.handover_known for one in world.engines), "all were asked")
    return Elastic(world.app[SHARED].pool, world.app[MOVER], dict)


def later() -> float:
    return asyncio.get_running_loop().time() + LATER_S


def test_a_decision_is_carried_out_counted_logged_and_shown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        async with both_kinds(World(1, 2, roles="wanted")) as world:
            elastic, engine = await ready(world), world.known(world.d[0])
            Wanted.moves = [Move(engine.name, PolicyRole.PREFILL, "prefill waits 3.1 s of 2.0 s")]
            elastic.tick(later())
            await until(lambda: engine.role is Role.PREFILL, "it has moved")
            moves = {"from": "decode", "to": "prefill", "cause": "wanted"}
            await until(lambda: bool(world.app[SHARED].pool.decisions), "it is shown")
            assert await world.metric("role_moves_total", **moves) == 1
            assert "prefill waits 3.1 s of 2.0 s" in caplog.text
            assert "no class has a promise (slo), so 2 s to the first token" in caplog.text
            await until(
                lambda: state(world.app[SHARED], 0.0)["decisions"][0]["outcome"] == "done", "done"
            )
            assert not engine.role_state.pinned
            assert described(engine)["home"] == "decode"
            told = state(world.app[SHARED], 0.0)["engines"]
            (shown,) = [one for one in told if one["url"] == engine.url]
            assert shown["away"]
            assert shown["role_why"] == "home: decode, may: decode or prefill"

    run(scenario())


def test_a_policy_that_fails_or_is_slow_is_named_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_module, "SLOW_S", 0.0)

    async def scenario() -> None:
        async with both_kinds(World(1, 2, roles="wanted")) as world:
            elastic, now_s = await ready(world), later()
            for second in range(100):
                Wanted.moves = [Move("ghost", PolicyRole.PREFILL, f"{second} s passed")]
                elastic.tick(now_s + second)
            (first, second) = [text for text in caplog.messages if "wanted failed" in text]
            assert "0 s passed" in first
            assert "60 s passed" in second
            assert "engine must be one of http" in first
            assert sum("role policy wanted took " in text for text in caplog.messages) == 2

    run(scenario())


def test_the_home_of_an_engine_that_was_asked_is_what_it_said() -> None:
    """The settings give it no role. After a move it must still be known where it belongs."""

    async def scenario() -> None:
        async with World(2, 1, unnamed=True, roles="wanted") as world:
            elastic, engine = await ready(world), world.known(world.p[0])
            Wanted.moves = [Move(engine.name, PolicyRole.DECODE, "because")]
            elastic.tick(later())
            await until(lambda: engine.role is Role.DECODE, "it has moved")
            elastic.tick(later())
            homes = {one.name: (one.role, one.home) for one in Wanted.shown[-1].members}
            assert homes[engine.name] == (Role.DECODE, Role.PREFILL)
            assert described(engine)["home"] == "prefill"

    run(scenario())


def test_an_engine_that_may_no_longer_have_its_role_goes_home() -> None:
    """Without `may` an engine stays at home, and no policy could bring it there."""

    async def scenario() -> None:
        async with both_kinds(World(1, 3)) as world:
            pool, engine = world.app[SHARED].pool, world.known(world.d[0])
            able = Place(may=frozenset((Role.PREFILL, Role.DECODE)))

            def edit(*urls: str, **settings: Any) -> None:
                pool.use(replace(pool.config, places=dict.fromkeys(urls, able), **settings))

            mine, other = engine.url, world.d[1].url
            edit(mine, other)
            pool.set_role(engine, Role.PREFILL, pinned=False)
            edit(mine)
            assert engine.role is Role.PREFILL, "its own entry has not changed"
            edit(mine, other, roles="off")
            assert engine.role is Role.PREFILL, "`off` moves nothing"
            edit(mine, other, roles="")
            edit(other)
            assert engine.role is Role.DECODE
            assert await world.metric("role_moves_total", cause="settings") == 1

    run(scenario())


def test_a_group_of_engines_on_both_sides_is_told_that_none_moves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With plain settings the log said that the policy moves its engines, and none ever moved."""

    async def scenario() -> None:
        async with both_kinds(World(1, 2, roles="pressure")) as world:
            elastic = await ready(world)
            elastic.tick(later())
            assert "serves both sides already" not in caplog.text
        async with World(3, 0, both=True, roles="pressure") as world:
            elastic = await ready(world)
            for _ in range(3):
                elastic.tick(later())
            assert caplog.text.count("serves both sides already") == 1

    run(scenario())


def test_what_nobody_knows_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        for costs, says in ((CostModel.token_count(), True), (CostModel(a=1e-4, d0=0.01), False)):
            async with both_kinds(World(1, 2, roles="pressure")) as world:
                elastic = await ready(world)
                for engine in world.engines:
                    engine.costs = costs
                caplog.clear()
                elastic.tick(later())
                assert ("costs of decode steps are known" in caplog.text) is says

    run(scenario())


def test_a_dry_run_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        async with both_kinds(World(1, 2, roles="dry-run:wanted")) as world:
            elastic, engine = await ready(world), world.known(world.d[0])
            Wanted.moves = [Move(engine.name, PolicyRole.PREFILL, "because")]
            elastic.tick(later())
            await asyncio.sleep(0.1)
            assert engine.role is Role.DECODE
            assert "dry run" in caplog.text
            assert await world.metric("role_moves_total", cause="dry_run") == 1
            assert state(world.app[SHARED], 0.0)["decisions"][0]["outcome"] == "dry run"

    run(scenario())


def test_an_engine_that_cannot_prefill_is_never_moved_there_and_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its answer to the probe has no address: it runs without the connector, or only consumes KV."""

    async def scenario() -> None:
        async with World(1, 2, roles="wanted") as world:
            elastic, engine = await ready(world), world.known(world.d[0])
            Wanted.moves = [Move(engine.name, PolicyRole.PREFILL, "because")]
            for _ in range(3):
                elastic.tick(later())
            await asyncio.sleep(0.05)
            assert engine.role is Role.DECODE
            named = [text for text in caplog.messages if "never moved to prefill" in text]
            assert sorted(text.split()[0] for text in named) == sorted(e.url for e in world.d)
            assert "kv_both" in named[0]

    run(scenario())


def test_an_engine_that_only_produces_kv_never_decodes(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        world = both_kinds(World(2, 1, roles="wanted"))
        for fake in world.p:
            fake.consumes = False
        async with world:
            elastic, engine = await ready(world), world.known(world.p[0])
            Wanted.moves = [Move(engine.name, PolicyRole.DECODE, "because")]
            elastic.tick(later())
            await asyncio.sleep(0.05)
            assert engine.role is Role.PREFILL
            assert any("never moved to decode" in text for text in caplog.messages)

    run(scenario())


def test_a_pinned_engine_stays_until_it_is_released() -> None:
    async def scenario() -> None:
        async with both_kinds(World(1, 2, roles="wanted")) as world:
            elastic, engine = await ready(world), world.known(world.d[0])
            pool = world.app[SHARED].pool
            pool.set_role(engine, Role.DECODE, pinned=True)
            Wanted.moves = [Move(engine.name, PolicyRole.PREFILL, "because")]
            elastic.tick(later())
            await asyncio.sleep(0.05)
            assert engine.role is Role.DECODE
            pool.release(engine)
            elastic.tick(later())
            await until(lambda: engine.role is Role.PREFILL, "it may move")

    run(scenario())


def test_the_last_engine_of_a_side_and_a_router_that_does_not_lead_move_nothing() -> None:
    async def scenario() -> None:
        async with both_kinds(World(1, 1, roles="wanted")) as world:
            elastic, engine = await ready(world), world.known(world.d[0])
            Wanted.moves = [Move(engine.name, PolicyRole.PREFILL, "because")]
            elastic.tick(later())
            await asyncio.sleep(0.05)
            assert engine.role is Role.DECODE, "nobody would decode"
            world.app[SHARED].pool.leads = False
            Wanted.shown.clear()
            elastic.tick(later())
            assert not Wanted.shown

    run(scenario())


def test_a_side_that_starts_more_slowly_is_waited_for_and_then_replaced() -> None:
    async def scenario() -> None:
        world = both_kinds(World(1, 2, roles="fixed"))
        world.p[0].healthy = False
        async with world:
            await until(lambda: all(world.known(d).handover_known for d in world.d), "asked")
            elastic = Elastic(world.app[SHARED].pool, world.app[MOVER], dict)
            elastic.tick(asyncio.get_running_loop().time())
            await asyncio.sleep(0.05)
            assert [world.known(d).role for d in world.d] == [Role.DECODE] * 2
            elastic.tick(later())
            await until(
                lambda: any(world.known(d).role is Role.PREFILL for d in world.d),
                "no prefill engine is alive, so one moves at once",
            )

    run(scenario())


def test_a_group_with_two_models_is_left_alone_and_named(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        world = both_kinds(World(1, 2, roles="wanted"))
        world.d[1].model = "another"
        async with world:
            elastic = await ready(world)
            for _ in range(2):
                elastic.tick(later())
            assert not Wanted.shown
            (named,) = [text for text in caplog.messages if "several models" in text]
            assert "another, m" in named

    run(scenario())


def test_the_policy_sees_what_happened_to_requests() -> None:
    async def scenario() -> None:
        async with both_kinds(World(1, 1, roles="wanted")) as world:
            elastic = await ready(world)

            async def tells(engine: FakeEngine, request: Any, body: dict[str, Any]) -> Any:
                from aiohttp import web

                return web.json_response(
                    {"id": "c", **choices("a"), "usage": {"completion_tokens": 7}}
                )

            assert (await world.complete(stream=True)).status == 200
            for fake in (*world.p, *world.d):
                fake.behave = tells
            assert (await world.complete()).status == 200
            elastic.tick(asyncio.get_running_loop().time())
            seen = Wanted.shown[0].history.over(asyncio.get_running_loop().time(), 60, "default")
            assert (seen.arrivals, seen.prefills, seen.answers) == (2, 2, 2)
            assert seen.answered == 4 + 7

    run(scenario())


def test_what_waits_at_the_front_is_shown_by_group() -> None:
    async def scenario() -> None:
        async with both_kinds(World(1, 1, roles="wanted")) as world:
            await ready(world)
            front = {"default": Front(3, 100, 0.5), "elsewhere": Front(1, 1, 0.1)}
            elastic = Elastic(world.app[SHARED].pool, world.app[MOVER], lambda: front)
            elastic.tick(later())
            assert dict(Wanted.shown[0].front) == {"default": Front(3, 100, 0.5)}

    run(scenario())


def test_an_engine_that_leaves_while_it_moves_ends_the_move_and_no_other() -> None:
    async def scenario() -> None:
        async with both_kinds(World(1, 3, roles="wanted")) as world:
            elastic, engine = await ready(world), world.known(world.d[0])
            other = world.known(world.d[1])
            Wanted.moves = [Move(engine.name, PolicyRole.PREFILL, "because")]
            await world.d[0].die()
            await world.down(world.d[0])
            elastic.tick(later())
            await asyncio.sleep(0.05)
            assert engine.role is Role.DECODE, "an engine that is down is not moved"
            Wanted.moves = [Move(other.name, PolicyRole.PREFILL, "because")]
            elastic.tick(later() + LATER_S)
            await until(lambda: other.role is Role.PREFILL, "the other one moves")

    run(scenario())


def test_pairs_that_a_move_may_make_are_audited_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from scheduler_plugins.router.engines import pair_audits

    monkeypatch.setattr(pair_audits, "VERDICT_S", 0.05)

    async def computes(engine: FakeEngine, request: Any, body: dict[str, Any]) -> Any:
        from aiohttp import web

        place = {"remote_engine_id": "e", "remote_host": "127.0.0.1", "remote_port": 7000}
        params = {**place, "do_remote_prefill": True, "remote_request_id": f"of {engine.name}"}
        return web.json_response({"id": "c", "kv_transfer_params": params, **choices("a")})

    async def scenario(roles: str, wanted: set[tuple[str, str]]) -> None:
        world = both_kinds(World(1, 2, roles=roles))
        for fake in (*world.p, *world.d):
            fake.metrics, fake.behave = "# HELP pd_connector:audits_total Prompts.\n", computes
        async with world:

            def pairs() -> set[tuple[str, str]]:
                return {
                    (params["remote_request_id"].removeprefix("of "), fake.name)
                    for fake in (*world.p, *world.d)
                    for params in fake.params
                    if params and params.get("do_remote_prefill")
                }

            await until(lambda: pairs() >= wanted, f"all pairs are audited: {pairs()}")
            await asyncio.sleep(0.3)
            assert pairs() == wanted

    run(scenario("off", {("p0", "d0"), ("p0", "d1")}))
    names = ("p0", "d0", "d1")
    run(scenario("wanted", {(p, d) for p in names for d in names if p != d}))


@pytest.mark.parametrize("policy", ROLES)
def test_every_policy_of_ours_runs_in_the_router(
    policy: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_module, "EVERY_S", 0.02)

    async def scenario() -> None:
        async with both_kinds(World(2, 2, roles=policy, max_prefill=2, max_decode=2)) as world:
            await ready(world)
            for n in range(20):
                assert (await world.complete(prompt=f"{n} " * 100, stream=n % 2 == 0)).status == 200
            await asyncio.sleep(0.2)
            pool = world.app[SHARED].pool
            now_s = asyncio.get_running_loop().time()
            assert pool.history.over(now_s, 600, "default").arrivals == 20

    run(scenario())
    assert "the role policy failed" not in caplog.text
