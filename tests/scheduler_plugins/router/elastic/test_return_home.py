# SPDX-License-Identifier: Apache-2.0
"""The file's `role` holds for SGLang engines, too: the router has them switched, or says what is in the way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from router_fakes import World, once, run, until
from sglang_fakes import Switching

from scheduler_plugins.router.elastic import return_home as return_home
from scheduler_plugins.router.elastic import task
from scheduler_plugins.router.endpoints.app_keys import MOVER, SHARED
from scheduler_plugins.router.engines import moving
from scheduler_plugins.router.engines.engine import BackendEngine, Role
from scheduler_plugins.router.engines.pool import EnginePool, described
from scheduler_plugins.router.settings.elastic import Place

P, D = Role.PREFILL, Role.DECODE
ANY = frozenset((P, D))
BUSY = {"message": "instance is not idle", "safe_to_restore": True}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "REFUSED_S", 0.05)
    monkeypatch.setattr(task, "EVERY_S", 0.05)
    monkeypatch.setattr(return_home, "DWELL_S", 0.1)


class Sglang(World):
    """SGLang engines, each started on the side that the settings name."""

    def __init__(self, prefill: int = 1, decode: int = 2, **settings: Any) -> None:
        super().__init__(prefill, decode, **settings)
        self.p = [Switching(f"p{n}", "prefill") for n in range(prefill)]
        self.d = [Switching(f"d{n}", "decode") for n in range(decode)]

    @property
    def fakes(self) -> list[Switching]:
        return [one for one in (*self.p, *self.d) if isinstance(one, Switching)]

    @property
    def pool(self) -> EnginePool:
        pool = self.app[SHARED].pool
        assert isinstance(pool, EnginePool)
        return pool

    def edit(self, *prefill: Switching, may: frozenset[Role] = frozenset()) -> None:
        """Edit the settings file: these engines prefill, and the others decode."""
        decode = tuple(one.url for one in self.fakes if one not in prefill)
        sides = {"prefill": tuple(one.url for one in prefill), "decode": decode}
        places = {one.url: Place(may=may) for one in self.fakes}
        self.pool.use(replace(self.pool.config, **sides, places=places))

    async def restart(self, fake: Switching) -> None:
        """As after a crash: it is on the side of its command line."""
        await fake.die()
        await self.down(fake)
        fake.mode = fake.started
        await fake.start()
        await self.up(fake)

    def sides(self) -> dict[str, tuple[str, str]]:
        """What the router takes each engine for, and what it is."""
        return {one.name: (str(self.known(one).role), one.mode) for one in self.fakes}


async def settled(world: Sglang, **wanted: str) -> None:
    both = {name: (side, side) for name, side in wanted.items()}
    await until(lambda: both.items() <= world.sides().items(), f"{wanted}, not {world.sides()}")


def test_an_edit_of_an_engines_role_drains_and_switches_it() -> None:
    """Only the router's table changed, and jumped back: requests went on to the old side."""

    async def scenario() -> None:
        async with Sglang() as world:
            moved, engine = world.d[0], world.known(world.d[0])
            go_on = asyncio.Event()
            for one in world.d:
                one.behave = once(go_on)
            asked = [asyncio.create_task(world.complete()) for _ in range(4)]
            await until(lambda: all(one.running for one in world.d), "both decode")
            world.edit(world.fakes[0], moved)
            await until(lambda: engine.role_state.moving is P, "it drains")
            assert engine.role is D, "until it is idle it is what it was"
            go_on.set()
            await settled(world, d0="prefill", d1="decode", p0="prefill")
            assert [(await one).status for one in asked] == [200] * 4
            assert (moved.asked, engine.role_state.switch_to) == (["prefill"], None)
            assert await world.metric("role_moves_total", cause="settings") == 1
            await until(lambda: world.pool.decisions[-1].outcome == "done", "the page shows it")
            (decision,) = world.pool.decisions
            assert (decision.before, decision.after) == (D, P)
            assert (await world.complete()).json["served_by"] == "d1"

    run(scenario())


def test_a_switch_that_fails_is_undone_told_and_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        async with Sglang() as world:
            fake, engine = world.fakes[1], world.known(world.d[0])
            fake.then = "other"  # it says yes, and stays
            world.edit(world.fakes[0], fake)
            await until(lambda: len(fake.asked) > 1, "it is tried again")
            await until(lambda: engine.role_state.moving is None, "undone")
            assert (engine.role, engine.role_state.switch_to) == (D, P)
            assert engine in world.pool.up(D), "it goes on serving"
            assert described(engine)["wanted"] == "prefill"
            assert "stays decode: confirm: it says that it is on the side decode" in caplog.text
            assert "the switch to prefill is tried again after 0.1 s" in caplog.text
            await until(lambda: "is tried again" in engine.role_state.problem, "the page says it")
            fake.then = ""
            await settled(world, d0="prefill")

    run(scenario())


def test_an_edit_that_is_taken_back_ends_the_switch() -> None:
    async def scenario() -> None:
        async with Sglang() as world:
            fake, engine = world.fakes[1], world.known(world.d[0])
            fake.refusals = [BUSY] * 1000
            world.edit(world.fakes[0], fake)
            await until(lambda: bool(fake.asked), "it is under way")
            world.edit(world.fakes[0])
            await until(lambda: engine.role_state.moving is None, "the move ends")
            assert (engine.role, fake.mode, engine.role_state.switch_to) == (D, "decode", None)

    run(scenario())


def test_an_edit_that_swaps_all_sides_leaves_no_side_empty() -> None:
    async def scenario() -> None:
        async with Sglang(2, 1) as world:
            least = dict.fromkeys((P, D), 9)

            async def watch() -> None:
                while True:
                    for side in least:
                        least[side] = min(least[side], len(world.pool.up(side)))
                    await asyncio.sleep(0)

            watching = asyncio.create_task(watch())
            world.edit(*world.fakes[2:])
            await settled(world, p0="decode", p1="decode", d0="prefill")
            watching.cancel()
            assert least == {P: 1, D: 1}
        async with Sglang(1, 1) as world:
            world.edit(world.fakes[1])
            await settled(world, p0="decode", d0="prefill")  # nobody else could serve meanwhile

    run(scenario())


def test_half_a_swap_waits_for_the_half_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise both engines would be on one side until the next try."""
    monkeypatch.setattr(return_home, "DWELL_S", 1e6)

    async def scenario() -> None:
        async with Sglang(1, 1) as world:
            p, d = world.fakes
            p.then = "other"
            await d.die()
            await world.down(d)
            world.edit(d)
            await until(lambda: bool(world.known(p).role_state.problem), "it has failed")
            await d.start()
            await world.up(d)
            await asyncio.sleep(0.3)
            assert world.sides() == {"p0": ("prefill", "prefill"), "d0": ("decode", "decode")}

    run(scenario())


def test_an_engine_without_the_flag_serves_its_own_side_and_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The router sent it requests for a side that it does not serve."""

    async def scenario() -> None:
        world = Sglang()
        fixed = world.fakes[2]
        fixed.switches = False
        async with world:
            engine = world.known(fixed)
            world.edit(world.fakes[0], fixed, may=ANY)
            await until(lambda: bool(engine.role_state.problem), "it is named")
            await world.restart(fixed)
            assert (engine.role, fixed.asked) == (D, [])
            named = [text for text in caplog.messages if fixed.url in text and "is a" in text]
            assert len(named) == 1
            for part in ("is a decode engine", "the settings say prefill", "used for decode"):
                assert part in named[0]
            assert "start it with --enable-pd-role-switch" in named[0]
            assert "never moved" not in caplog.text, "it is not named twice"
            fixed.switches = True
            await world.restart(fixed)
            await settled(world, d1="prefill")
            assert not engine.role_state.problem

    run(scenario())


NAMED_WRONGLY: list[tuple[dict[str, Any], Callable[[Switching], None], str]] = [
    ({}, lambda fake: None, "give it `may: [prefill, decode]`"),
    ({"roles": "dry-run"}, lambda fake: None, "set `roles` to a policy"),
    ({"both": True}, lambda fake: None, "An SGLang engine has one side"),
    (
        {"roles": "fixed"},
        lambda fake: setattr(fake, "switches", False),
        "start it with --enable-pd-role-switch",
    ),
    (
        {},
        lambda fake: setattr(fake, "switches", False),
        "start it with --enable-pd-role-switch and give it `may",
    ),
    ({}, lambda fake: setattr(fake, "started", "decode"), "was switched to prefill while it ran"),
]


@pytest.mark.parametrize(("settings", "make", "said"), NAMED_WRONGLY)
def test_an_engine_that_starts_on_another_side_than_the_file_says_is_named_with_what_to_do(
    settings: dict[str, Any],
    make: Callable[[Switching], None],
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        both = settings.pop("both", False)
        world = Sglang(**settings)
        astray = world.fakes[2]
        astray.mode = astray.started = "prefill"
        make(astray)
        if both:
            world.d.remove(astray)
            world.p, world._both = [astray], True
        async with world:
            engine = world.known(astray)
            await until(lambda: astray.url in caplog.text and engine.role is P, "it is named")
            await asyncio.sleep(0.3)
            assert (engine.role, astray.asked) == (P, []), "it is used for what it is"
            (named,) = [text for text in caplog.messages if text.startswith(astray.url)]
            wanted = "both" if both else "decode"
            assert "to prefill" in named or "is a prefill engine" in named
            assert f"the settings say {wanted}" in named
            assert said in named
            assert described(engine)["problem"] == named

    run(scenario())


def test_an_engine_that_a_policy_may_move_is_switched_to_its_home_at_the_start() -> None:
    """All pods of one template start on one side, and the file says which of them decode."""

    async def scenario() -> None:
        world = Sglang(roles="fixed")
        for one in world.fakes:
            one.mode = one.started = "prefill"
        async with world:
            await settled(world, p0="prefill", d0="decode", d1="decode")
            assert world.fakes[0].asked == [], "no policy fills a side that is being filled"

    run(scenario())


def test_an_engine_that_a_policy_has_moved_stays_when_the_router_starts_anew() -> None:
    async def scenario() -> None:
        world = Sglang(roles="fixed")
        moved = world.fakes[2]
        moved.mode = "prefill"
        async with world:
            await until(lambda: world.known(moved).role is P, "its side is known")
            await asyncio.sleep(0.3)
            assert (world.known(moved).role, moved.asked) == (P, [])
            assert not world.known(moved).role_state.problem

    run(scenario())


@pytest.mark.parametrize("pinned", [True, False])
def test_an_engine_that_starts_again_is_switched_to_the_side_that_it_had(pinned: bool) -> None:
    """It starts on the side of its command line."""

    async def scenario() -> None:
        async with Sglang() as world:
            fake, engine = world.fakes[2], world.known(world.d[1])
            if pinned:
                mover = world.app[MOVER]
                await mover.move(engine, P, pinned=True, cause="operator", why="a test")
            else:
                world.edit(world.fakes[0], fake)
            await settled(world, d1="prefill")
            await world.restart(fake)
            await until(lambda: fake.asked == ["prefill", "prefill"], "it is switched again")
            await settled(world, d1="prefill")
            assert engine.role_state.pinned is pinned

    run(scenario())


def test_a_router_that_does_not_lead_switches_nothing_and_says_who_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two routers would drain and switch one engine at the same time."""
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        async with Sglang() as world:
            fake = world.fakes[2]
            world.pool.leads = False
            world.edit(world.fakes[0], fake)
            await until(lambda: "Another router decides" in caplog.text, "it says so")
            await asyncio.sleep(0.3)
            assert (world.sides()["d1"], fake.asked) == (("decode", "decode"), [])
            assert caplog.text.count("Another router decides on roles") == 1
            world.pool.leads = True
            await settled(world, d1="prefill")

    run(scenario())


def test_an_engine_that_can_never_have_a_role_that_it_may_have_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        world = Sglang(roles="fixed")
        world.fakes[1].switches = False
        world.fakes[2].mode = world.fakes[2].started = "null"
        async with world:
            await until(lambda: caplog.text.count("never moved") == 2, "both are named")
            await asyncio.sleep(0.2)
            named = dict(text.split(" ", 1) for text in caplog.messages if "never moved" in text)
            assert "start it with --enable-pd-role-switch" in named[world.d[0].url]
            assert "works alone; start it with --disaggregation-mode" in named[world.d[1].url]
            assert caplog.text.count("never moved") == 2

    run(scenario())


def test_what_an_operator_gives_later_wins_over_a_switch_that_waits() -> None:
    async def scenario() -> None:
        async with Sglang() as world:
            fake: Switching = world.fakes[2]
            engine: BackendEngine = world.known(fake)
            fake.then = "other"
            world.edit(world.fakes[0], fake)
            await until(lambda: len(fake.asked) == 1, "it has failed once")
            await until(lambda: engine.role_state.moving is None, "and waits")
            await world.app[MOVER].move(engine, D, pinned=True, cause="operator", why="a test")
            count = len(fake.asked)
            await asyncio.sleep(0.3)
            assert (engine.role, engine.role_state.pinned, len(fake.asked)) == (D, True, count)

    run(scenario())
