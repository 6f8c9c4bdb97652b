# SPDX-License-Identifier: Apache-2.0
"""SGLang engines change their sides in steps: idle, switched, asked. A step that fails leaves the old role."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from router_fakes import World, once, run, until
from sglang_fakes import Switching

from scheduler_plugins.router.endpoints.app_keys import MOVER, SHARED
from scheduler_plugins.router.engines import moving
from scheduler_plugins.router.engines.engine import BackendEngine, Role
from scheduler_plugins.router.engines.moving import MoveFailedError, Mover
from scheduler_plugins.router.engines.pool import described
from scheduler_plugins.router.settings.elastic import Place


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "REFUSED_S", 0.05)


def world(**settings: Any) -> World:
    """One engine of each side, and a second one of the decode side, all SGLang's."""
    made = World(1, 2, **settings)
    made.p = [Switching("p0", "prefill")]
    made.d = [Switching(f"d{n}", "decode") for n in range(2)]
    return made


async def ready(made: World) -> tuple[Mover, BackendEngine, Switching]:
    fake = made.d[0]
    assert isinstance(fake, Switching)
    return made.app[MOVER], made.known(fake), fake


async def to_prefill(mover: Mover, engine: BackendEngine) -> None:
    await mover.move(engine, Role.PREFILL, pinned=False, cause="wanted", why="a test wants it")


def test_an_engine_is_drained_switched_and_used_on_its_new_side() -> None:
    async def scenario() -> None:
        async with world() as made:
            mover, engine, fake = await ready(made)
            go_on = asyncio.Event()
            for one in made.d:
                one.behave = once(go_on)
            asked = [asyncio.create_task(made.complete()) for _ in range(4)]
            await until(lambda: all(one.running for one in made.d), "both decode")
            moving = asyncio.create_task(to_prefill(mover, engine))
            await until(lambda: engine.role_state.moving is Role.PREFILL, "it drains")
            await asyncio.sleep(0.05)
            assert fake.asked == []
            assert described(engine)["moving"] == "prefill"
            more = [asyncio.create_task(made.complete()) for _ in range(2)]
            await until(lambda: sum(one.running for one in made.d) == 6, "all are decoded")
            assert fake.running == 2, "it gets no more"
            go_on.set()
            await moving
            assert fake.asked == ["prefill"]
            assert (engine.role, engine.role_state.moving) == (Role.PREFILL, None)
            assert all([(await one).status == 200 for one in (*asked, *more)])
            assert sum(len(one.bodies) for one in made.d) == 6
            assert engine.address is not None, "the move ends when it can be used"
            assert await made.metric("role_moves_total", cause="wanted") == 1

    run(scenario())


BUSY = {"message": "instance is not idle; drain all requests", "safe_to_restore": True}
NEVER = {"message": "--enable-pd-role-switch is not set", "safe_to_restore": True}


@pytest.mark.parametrize(
    ("refusals", "then", "step"),
    [
        ([NEVER], "", "switch"),
        ([BUSY] * 100, "", "drain"),
        ([], "die", "switch"),
        ([], "other", "confirm"),
    ],
)
def test_a_step_that_fails_leaves_the_old_role_and_the_engine_serves_on(
    refusals: list[dict[str, Any]], then: str, step: str
) -> None:
    async def scenario() -> None:
        limit_s = 0.5 if step == "drain" else 60.0
        async with world(drain_timeout_s=limit_s) as made:
            mover, engine, fake = await ready(made)
            fake.refusals, fake.then = list(refusals), then
            with pytest.raises(MoveFailedError) as failed:
                await to_prefill(mover, engine)
            assert failed.value.step == step
            assert (engine.role, engine.role_state.moving) == (Role.DECODE, None)
            assert engine in made.app[SHARED].pool.up(Role.DECODE)
            assert await made.metric("role_moves_total", cause=f"failed_{step}") == 1
            assert await made.metric("role_moves_total") == 1

    run(scenario())


def test_an_engine_that_was_not_idle_yet_is_asked_again() -> None:
    async def scenario() -> None:
        async with world() as made:
            mover, engine, fake = await ready(made)
            fake.refusals = [BUSY, BUSY]
            await to_prefill(mover, engine)
            assert (fake.asked, engine.role) == (["prefill"] * 3, Role.PREFILL)

    run(scenario())


def test_an_engine_that_switched_and_whose_answer_was_lost_is_on_its_new_side() -> None:
    async def scenario() -> None:
        async with world() as made:
            mover, engine, fake = await ready(made)
            fake.then = "die switched"
            await to_prefill(mover, engine)
            assert engine.role is Role.PREFILL

    run(scenario())


def places(made: World, **may: frozenset[Role]) -> None:
    """Edit the settings file: these engines may have these roles, all others none."""
    pool = made.app[SHARED].pool
    found = {one.url: Place(may=may[one.name]) for one in (*made.p, *made.d) if one.name in may}
    pool.use(replace(pool.config, places=found))


ANY = frozenset((Role.PREFILL, Role.DECODE))


def test_the_settings_end_a_move_that_they_no_longer_allow() -> None:
    """An operator takes `may` away while the engine drains. Without it nobody would bring the engine home again."""

    async def scenario() -> None:
        async with world() as made:
            places(made, d0=ANY, d1=ANY)
            mover, engine, fake = await ready(made)
            fake.refusals = [BUSY] * 100
            moving = asyncio.create_task(to_prefill(mover, engine))
            await until(lambda: bool(fake.asked), "it is under way")
            places(made, d1=ANY)
            with pytest.raises(MoveFailedError, match="its entry in the settings has changed"):
                await moving
            assert (engine.role, engine.role_state.moving, fake.mode) == (
                Role.DECODE,
                None,
                "decode",
            )
            assert await made.metric("role_moves_total") == 0, "no alert: nothing has failed"

    run(scenario())


def test_an_engine_that_switched_while_the_settings_changed_goes_home() -> None:
    async def scenario() -> None:
        async with world() as made:
            places(made, d0=ANY, d1=ANY)
            mover, engine, fake = await ready(made)

            def edit() -> None:
                fake.meanwhile = lambda: None
                places(made, d1=ANY)

            fake.meanwhile = edit
            await to_prefill(mover, engine)
            await until(lambda: engine.role is Role.DECODE, "the edit holds")
            assert (fake.asked, fake.mode) == (["prefill", "decode"], "decode")
            await until(lambda: engine.role_state.switch_to is None, "it is where it should be")
            assert await made.metric("role_moves_total", cause="settings") == 1

    run(scenario())


def test_a_move_goes_on_if_the_settings_of_others_change() -> None:
    async def scenario() -> None:
        async with world() as made:
            places(made, d0=ANY)
            mover, engine, fake = await ready(made)
            fake.refusals = [BUSY]
            fake.meanwhile = lambda: places(made, d0=ANY, d1=ANY)
            await to_prefill(mover, engine)
            assert (engine.role, fake.mode) == (Role.PREFILL, "prefill")

    run(scenario())


def test_a_router_that_ends_in_mid_move_leaves_the_engine_to_the_next_one() -> None:
    """The move is cancelled while the engine switches. The next router asks the engine for its side."""

    async def scenario() -> None:
        async with world() as made:
            mover, engine, fake = await ready(made)
            fake.refusals = [BUSY] * 100
            moving = asyncio.create_task(to_prefill(mover, engine))
            await until(lambda: bool(fake.asked), "it is under way")
            moving.cancel()
            await asyncio.gather(moving, return_exceptions=True)
            assert (engine.role, engine.role_state.moving) == (Role.DECODE, None)
            fake.mode = "prefill"  # what the lost move had done
            made.app[SHARED].pool.look_again(engine)
            await until(lambda: engine.role is Role.PREFILL, "its own word counts")

    run(scenario())


def test_an_engine_without_the_flag_is_refused_by_name() -> None:
    async def scenario() -> None:
        made = world()
        made.d[0].switches = False  # type: ignore[attr-defined]
        async with made:
            mover, engine, _ = await ready(made)
            with pytest.raises(ValueError, match="--enable-pd-role-switch"):
                mover.check(engine, Role.PREFILL)
            assert engine.able == frozenset()
            with pytest.raises(ValueError, match="has one side"):
                mover.check(made.known(made.d[1]), Role.BOTH)

    run(scenario())
