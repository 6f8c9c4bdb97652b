# SPDX-License-Identifier: Apache-2.0
"""The router has each pair of engines compare one prompt before users come, and counts it as nobody's request."""

import asyncio
from typing import Any

import pytest
from aiohttp import web
from router_fakes import FakeEngine, World, answer, choices, run, until

from pd_connector.protocol.wire import about
from scheduler_plugins.router.engines import pair_audits

OURS = "# HELP pd_connector:audits_total Prompts.\n"
PLACE = {"remote_engine_id": "e", "remote_host": "127.0.0.1", "remote_port": 7000}


@pytest.fixture(autouse=True)
def no_long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of these engines say nothing of verdicts."""
    monkeypatch.setattr(pair_audits, "VERDICT_S", 0.05)


async def computes(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.Response:
    """A prefill engine: it tells where the KV is."""
    params = {**PLACE, "do_remote_prefill": True, "remote_request_id": f"of {engine.name}"}
    return web.json_response({"id": "c", "kv_transfer_params": params, **choices("a")})


def ours(prefill: int, decode: int) -> World:
    """Engines that compare what they compute."""
    world = World(prefill, decode)
    for engine in world.d:
        engine.metrics = OURS
    for engine in world.p:
        engine.behave = computes
    return world


def test_each_pair_gets_one_prompt_first_on_the_prefill_side() -> None:
    async def scenario() -> None:
        async with ours(2, 2) as pairs:
            await until(lambda: all(len(e.bodies) == 2 for e in pairs.p + pairs.d), "four prompts")
            await asyncio.sleep(0.3)
            assert [len(engine.bodies) for engine in pairs.p + pairs.d] == [2] * 4, (
                "and no other one"
            )
            salts = {
                engine.name: [body["cache_salt"] for body in engine.bodies] for engine in pairs.p
            }
            for engine in pairs.d:
                sources = {
                    body["kv_transfer_params"]["remote_request_id"] for body in engine.bodies
                }
                assert sources == {"of p0", "of p1"}
                for body in engine.bodies:
                    source = body["kv_transfer_params"]["remote_request_id"].removeprefix("of ")
                    assert body["cache_salt"] in salts[source], "both sides compute the same prompt"
            assert len({salt for both in salts.values() for salt in both}) == 4, "nothing is cached"
            assert await pairs.metric("requests_total") == 0
            assert await pairs.metric("flows_total") == 0

    run(scenario())


def test_the_prompt_is_as_long_as_the_decode_engine_needs_it() -> None:
    async def scenario() -> None:
        pairs = ours(1, 1)
        pairs.d[0].about = about.written(None, 545)
        async with pairs:
            await until(lambda: len(pairs.d[0].bodies) == 1, "the prompt")
            for engine in pairs.p + pairs.d:
                assert engine.bodies[0]["truncate_prompt_tokens"] == 545
                assert len(engine.bodies[0]["prompt"]) >= 8 * 545

    run(scenario())


def test_an_engine_that_takes_no_kv_is_sent_no_prompt() -> None:
    async def scenario() -> None:
        world = ours(2, 2)
        world.d[0].engine_id, world.d[0].consumes = "d0", False
        async with world:
            await until(lambda: world.known(world.d[0]).handover_known, "it was asked")
            await until(lambda: len(world.d[1].bodies) == 2, "those of the other pairs")
            await asyncio.sleep(0.3)
            assert len(world.d[0].bodies) <= 1, "at most before its answer had come"

    run(scenario())


def test_engines_of_both_sides_are_audited_in_both_directions() -> None:
    async def scenario() -> None:
        world = World(2, 0, both=True)
        for engine in world.p:
            engine.metrics, engine.behave = OURS, computes
        async with world:
            await until(lambda: all(len(e.bodies) == 2 for e in world.p), "both directions")
            decoded = [
                [b["kv_transfer_params"].get("remote_request_id") for b in e.bodies]
                for e in world.p
            ]
            assert ["of p1" in decoded[0], "of p0" in decoded[1]] == [True, True]

    run(scenario())


def test_an_engine_that_comes_up_anew_is_audited_again() -> None:
    async def scenario() -> None:
        async with ours(2, 2) as pairs:
            await until(lambda: all(len(e.bodies) == 2 for e in pairs.p + pairs.d), "four prompts")
            (gone, stays), decode = pairs.p, pairs.d
            gone.healthy = False
            await pairs.down(gone)
            gone.healthy = True
            await pairs.up(gone)
            await until(lambda: len(gone.bodies) == 4, "its pairs again")
            await asyncio.sleep(0.2)
            assert len(stays.bodies) == 2, "others are not"
            assert [len(engine.bodies) for engine in decode] == [3, 3]

    run(scenario())


@pytest.mark.parametrize("side", ["p", "d"])
def test_no_pair_is_audited_before_both_engines_have_read_their_weights(side: str) -> None:
    """It would end without a verdict."""
    unread = "pd_connector:weights_bytes 16e9\npd_connector:weights_read_bytes 3e9\n"

    async def scenario() -> None:
        pairs = ours(1, 1)
        reads = getattr(pairs, side)[0]
        known = reads.metrics
        reads.metrics = f"{known or ''}{unread}"
        async with pairs:
            await asyncio.sleep(0.3)
            assert pairs.p[0].bodies == pairs.d[0].bodies == []
            reads.metrics = f"{known or ''}{unread.replace('3e9', '16e9')}"
            await until(lambda: len(pairs.d[0].bodies) == 1, "its first prompt")

    run(scenario())


def test_an_engine_that_compares_nothing_is_sent_nothing() -> None:
    async def scenario() -> None:
        world = World(1, 1)
        world.p[0].behave = computes  # the decode engine's metrics do not name our connector
        async with world:
            await asyncio.sleep(0.3)
            assert world.p[0].bodies == world.d[0].bodies == []

    run(scenario())


def test_busy_engines_are_left_to_their_users_and_audited_when_they_rest() -> None:
    async def scenario() -> None:
        world = World(1, 1)
        go_on = asyncio.Event()

        async def slowly(
            engine: FakeEngine, request: web.Request, body: dict[str, Any]
        ) -> web.StreamResponse:
            await go_on.wait()
            return await answer(engine, request, body)

        prefill, decode = world.p[0], world.d[0]
        prefill.behave, decode.metrics = computes, OURS
        async with world:
            await until(lambda: len(decode.bodies) == 1, "the audit of the start")
            prefill.behave, decode.behave = answer, slowly
            user = asyncio.create_task(world.complete())
            await until(lambda: len(decode.bodies) == 2, "the user's request")
            world.known(decode).starts += 1  # as if it came up now
            await asyncio.sleep(0.3)
            assert len(decode.bodies) == 2
            prefill.behave = computes
            go_on.set()
            await user
            await until(lambda: len(decode.bodies) == 3, "the audit")
            assert "cache_salt" in decode.bodies[2]

    run(scenario())


def test_a_failure_is_nobodys_and_is_not_repeated() -> None:
    async def scenario() -> None:
        world = World(1, 1)
        world.d[0].metrics = OURS

        async def refuses(
            engine: FakeEngine, request: web.Request, body: dict[str, Any]
        ) -> web.Response:
            return web.json_response({"error": {"message": "no"}}, status=500)

        world.p[0].behave = refuses
        async with world:
            await until(lambda: len(world.p[0].bodies) == 1, "the prompt")
            await asyncio.sleep(0.3)
            assert len(world.p[0].bodies) == 1
            assert world.known(world.p[0]).up
            assert world.d[0].bodies == []

    run(scenario())


@pytest.mark.parametrize(
    ("causes", "prompts"),
    [
        (["passed"], 2),
        (["passed", "passed"], 3),  # `codec: auto`: one is coded, the next is not
        (["prefill_ended", "stalled", "passed"], 4),  # lost audits
        (["audit", "passed"], 1),
        (["model"] * 9, 4),
    ],
)
def test_a_pair_gets_prompts_until_one_is_not_audited_any_more(
    causes: list[str], prompts: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        world = World(1, 1)
        prefill, decode = world.p[0], world.d[0]
        prefill.behave, decode.metrics = computes, OURS
        left, seen = iter(causes), dict[str, int]()

        async def audits(
            engine: FakeEngine, request: web.Request, body: dict[str, Any]
        ) -> web.StreamResponse:
            if cause := next(left, ""):
                seen[cause] = seen.get(cause, 0) + 1
            engine.metrics = OURS + "".join(
                f'pd_connector:audits_total{{engine="0",cause="{name}"}} {count:.1f}\n'
                for name, count in seen.items()
            )
            return await answer(engine, request, body)

        decode.behave = audits
        async with world:
            await until(lambda: len(decode.bodies) == prompts, "all prompts")
            await asyncio.sleep(0.4)
            assert len(prefill.bodies) == len(decode.bodies) == prompts
            assert len({body["cache_salt"] for body in decode.bodies}) == prompts

    run(scenario())
    told = [text for text in caplog.messages if "no audit has passed" in text]
    assert len(told) == ("passed" not in causes or causes[0] == "audit"), "once, with what to do"
    assert all("What to do: serve the same weights" in text for text in told if "model" in text)


def test_a_decode_engine_with_a_key_that_the_router_lacks_is_told_with_the_option(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        world = ours(1, 1)
        world.d[0].api_key = "secret"
        async with world:
            await until(lambda: "cannot run" in caplog.text, "the prompt was refused")

    run(scenario())
    (line,) = [record for record in caplog.records if "cannot run" in record.message]
    assert line.levelname == "WARNING"
    assert "answered 401; give the engines' key with --api-key" in line.message
