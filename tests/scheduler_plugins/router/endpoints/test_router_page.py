# SPDX-License-Identifier: Apache-2.0
"""The live page, and the dashboard that is shipped."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

from router_fakes import World, run, until

from scheduler_plugins.router.endpoints import page
from scheduler_plugins.router.endpoints.app_keys import OPERATOR
from scheduler_plugins.router.metrics import Metrics

DASHBOARD = Path(__file__).parents[4] / "docs" / "router-grafana.json"


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
            first, second = (
                next(one for one in state["engines"] if one["url"] == world.d[0].url)
                for state in told
            )
            assert (first["state"], first["context"], second["context"]) == ("up", 0, 77)
            for name in re.findall(r"engine\.(\w+)", shown.text):
                assert name in first, f"the page shows {name}"
            for _ in range(2):
                world.known(world.d[0]).load.decode_ended("a")

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
            right = {"Authorization": f"Bearer {world.app[OPERATOR].token}"}
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


def test_the_dashboard_shows_metrics_that_there_are() -> None:
    known = {one.name for one in Metrics().registry.collect()}
    text = json.dumps(json.loads(DASHBOARD.read_text()))
    shown = {
        re.sub(r"_(total|bucket|sum|count)$", "", name)
        for name in re.findall(r"pd_router:\w+", text)
    }
    assert len(shown) > 10
    assert shown <= known
