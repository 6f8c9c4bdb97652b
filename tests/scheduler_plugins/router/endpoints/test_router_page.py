# SPDX-License-Identifier: Apache-2.0
"""The live page, as the router serves it."""

from __future__ import annotations

import asyncio
import json
import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

import pytest
from router_fakes import World, run, until

from scheduler_plugins.router.endpoints import page
from scheduler_plugins.router.endpoints.app_keys import ADMIN_AUTH, SHARED
from scheduler_plugins.router.endpoints.diagnostics import Diagnostic
from scheduler_plugins.router.endpoints.page import row_of, state
from scheduler_plugins.router.engines import slow_probes as looks
from scheduler_plugins.router.engines.role_state import Decision
from scheduler_plugins.router.engines.traffic import FromProducer

SESSIONS = """
pd_connector:sessions_total{engine="0",transport="shm"} 1
pd_connector:sessions_total{engine="0",transport="tcp"} 3
pd_connector:sessions_total{engine="0",transport="nixl"} 0
"""
MOVE = {**Decision(0.0, "", "", "", "", "")._asdict(), "key": ""}


def test_the_page_needs_nothing_else_and_is_kept_up_to_date() -> None:
    async def scenario() -> None:
        async with World() as world:
            shown = await world.get("/")
            assert shown.status == 200
            assert "http://" not in shown.text
            assert "https://" not in shown.text, "no other host is asked for anything"
            assert 'fetch("live"' in shown.text
            async with world.client.get("/live") as response:
                told = []
                while len(told) < 2:
                    line = await response.content.readline()
                    if line.startswith(b"data: "):
                        told.append(json.loads(line.removeprefix(b"data: ")))
                        world.known(world.d[0]).load.decode_sent("a", 77, 5)
            assert "trends" in told[0]
            assert "trends" not in told[1], "they change every ten seconds only"
            first, second = (
                next(one for one in state["engines"] if one["url"] == world.d[0].url)
                for state in told
            )
            assert (first["state"], first["context"], second["context"]) == ("up", 0, 77)
            script = re.search(r"<script>(.*)</script>", shown.text, re.DOTALL)
            assert script
            for name in re.findall(r"\b(?:engine|one)\.([a-z]\w+)", script[1]):
                known = {**first, **Diagnostic("", "warning", "", (), "")._asdict(), **MOVE}
                assert name in known, f"the page shows {name}"
            row = row_of("p", "d", [FromProducer()])
            assert set(re.findall(r"\bpair\.([a-z]\w+)", script[1])) == set(row)
            for _ in range(2):
                world.known(world.d[0]).load.decode_ended("a")

    run(scenario())


def test_an_engine_is_shown_with_its_model_version_and_transports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(looks, "METRICS_LOOK_S", 0.05)

    async def scenario() -> None:
        world = World()
        for fake in world.p + world.d:
            fake.version = "0.32.0"
        async with world:
            producer = world.known(world.p[0])
            world.p[0].metrics = SESSIONS
            await until(lambda: producer.traffic.transports, "its metrics were read")
            shown = {one["url"]: one for one in state(world.app[SHARED], 0.0)["engines"]}
            assert shown[world.p[0].url]["about"] == "m, vLLM 0.32.0"
            assert shown[world.p[0].url]["transports"] == ("tcp", "shm")
            assert shown[world.d[0].url]["about"] == "m, vLLM 0.32.0"
            assert shown[world.d[0].url]["transports"] == ()
            health = (await world.get("/health")).json["engines"]
            assert {(one["model"], one["version"]) for one in health} == {("m", "0.32.0")}

    run(scenario())


def test_the_page_runs_its_own_script_only() -> None:
    """A script that an engine's answer brings into the page has another hash than the policy names."""

    async def scenario() -> None:
        async with World() as world:
            async with world.client.get("/") as answer:
                text, policy = await answer.text(), answer.headers["Content-Security-Policy"]
            rules = dict(one.split(" ", 1) for one in policy.split("; "))
            for tag, rule in (("script", "script-src"), ("style", "style-src")):
                (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
                digest = b64encode(sha256(content.encode()).digest()).decode()
                assert rules[rule] == f"'sha256-{digest}'"
            assert rules["default-src"] == rules["frame-ancestors"] == "'none'"
            assert rules["connect-src"] == "'self'"
            assert "unsafe" not in policy
            assert "innerHTML" not in text

    run(scenario())


def test_the_page_says_first_what_is_wrong_and_what_to_do() -> None:
    async def scenario() -> None:
        async with World(prefill=2, decode=2) as world:
            assert state(world.app[SHARED], 0.0)["troubles"] == []
            await world.d[0].die()
            await world.d[1].die()
            gone = [world.known(engine) for engine in world.d]
            await until(lambda: not any(one.up for one in gone), "they are down")
            first, second = state(world.app[SHARED], 0.0)["troubles"]
            assert (first["alert"], first["level"]) == ("PDNoDecodeEngine", "critical")
            assert (second["alert"], second["level"]) == ("PDEngineAway", "warning")
            assert [line.partition(": ")[0] for line in second["where"]] == [e.url for e in gone]
            assert second["do"]

    run(scenario())


def test_only_so_many_pages_are_served() -> None:
    async def scenario() -> None:
        async with World() as world:
            opened = [await world.client.get("/live") for _ in range(page.MOST_WATCHERS)]
            assert {one.status for one in opened} == {200}
            assert (await world.get("/live")).status == 503
            for one in opened:
                one.close()

            async def again() -> int:
                async with world.client.get("/live") as response:
                    return response.status

            statuses = [503]

            async def asking() -> None:
                while statuses[-1] != 200:
                    statuses.append(await again())

            task = asyncio.create_task(asking())
            await until(task.done, "pages that were closed make room")

    run(scenario())


def test_strangers_take_no_seat_of_the_operators() -> None:
    async def scenario() -> None:
        async with World() as world:
            opened = [await world.client.get("/live") for _ in range(page.MOST_WATCHERS)]
            wrong = {"Authorization": "Bearer guessed"}
            async with world.client.get("/live", headers=wrong) as response:
                assert response.status == 503, "a wrong token is a stranger's"
            right = {"Authorization": f"Bearer {world.app[ADMIN_AUTH].token}"}
            for _ in range(page.MOST_WATCHERS):
                opened.append(await world.client.get("/live", headers=right))
                assert opened[-1].status == 200
            for one in opened:
                one.close()

    run(scenario())


def test_an_open_page_does_not_hold_up_the_end_of_the_router() -> None:
    async def scenario() -> None:
        async with (
            World(shutdown_timeout_s=1e6) as world,
            world.client.get("/live") as response,
        ):
            await response.content.readline()
            await world.server.close()
            assert (await response.read()).endswith(b"\n"), "the last event is whole"

    run(scenario())


def brightness(colour: str) -> float:
    """Relative luminance by WCAG 2."""
    digits = colour if len(colour) == 6 else "".join(2 * digit for digit in colour)
    parts = [int(digits[n : n + 2], 16) / 255 for n in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_can_be_read_in_both_themes(theme: int) -> None:
    style = (Path(page.__file__).parent / "page.css").read_text()
    colours = [
        dict(re.findall(r"--([\w-]+): #([0-9a-f]+)", block))
        for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    ][theme]
    on = {"warn-back": ("text", "quiet", "warn"), "bad-back": ("text", "quiet", "bad")}
    on |= dict.fromkeys(("page", "card"), ("text", "quiet", "good", "warn", "bad"))
    for back, texts in on.items():
        for text in texts:
            light, dark = sorted((brightness(colours[one]) for one in (back, text)), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, f"{text} on {back}"
