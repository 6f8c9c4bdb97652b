# SPDX-License-Identifier: Apache-2.0
"""The live page in a browser. Skipped where no Chromium is installed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from router_fakes import World, run, until
from support.chromium import Browser, chromium

from scheduler_plugins.router.endpoints.app_keys import ADMIN_AUTH, SHARED
from scheduler_plugins.router.engines import slow_probes as looks
from scheduler_plugins.router.engines.failures import EngineFailedError
from scheduler_plugins.router.engines.inquiry import Inquiry
from scheduler_plugins.router.engines.role_state import Decision
from scheduler_plugins.router.index.stored import StorePlace

HOSTILE = "<img src=x onerror='document.title=\"taken\"'><script>document.title='taken'</script>"
METRICS = """
pd_connector:received_bytes_total{{engine="0"}} {bytes}
pd_connector:handoffs_total{{cause="handed_over",engine="0"}} {bytes}
pd_connector:asked_transfers_total{{codec="int8",engine="0"}} {bytes}
pd_connector:pair_bytes_total{{codec="int8",engine="0",producer="10.9.8.7:7100"}} {bytes}
pd_connector:pair_chunks_total{{engine="0",producer="10.9.8.7:7100",prompt="computing"}} 9
pd_connector:pair_chunks_total{{engine="0",producer="10.9.8.7:7100",prompt="computed"}} 1
pd_connector:pair_transfers_total{{engine="0",producer="10.9.8.7:7100",result="received"}} 99
pd_connector:pair_transfers_total{{engine="0",producer="10.9.8.7:7100",result="stalled"}} 1
vllm:kv_cache_usage_perc{{engine="0"}} 0.97
"""
SESSIONS = 'pd_connector:sessions_total{engine="0",transport="tcp"} 1\n'
FITS = "document.documentElement.scrollWidth <= innerWidth"
READY = "document.querySelectorAll('.engine').length > 0"


def text_of(selector: str) -> str:
    return f"[...document.querySelectorAll('{selector}')].map(e => e.textContent).join(' | ')"


def test_the_page_in_a_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "METRICS_LOOK_S", 0.2)
    program = chromium()

    async def metrics_that_grow(world: World) -> None:
        count = 0
        while True:
            count += 1_000_000
            world.d[0].metrics = METRICS.format(bytes=count)
            await asyncio.sleep(0.1)

    async def scenario() -> None:
        fleet = World(prefill=2, decode=2)
        fleet.p[0].version = "0.32.0"
        async with fleet as world, Browser(program) as browser:
            world.p[0].metrics = SESSIONS
            known = world.known(world.d[1])
            world.d[0].metrics = METRICS.format(bytes=0)
            growing = asyncio.create_task(metrics_that_grow(world))
            await browser.look(width=1280)
            await browser.open(
                f"http://127.0.0.1:{world.port}/#token={world.app[ADMIN_AUTH].token}"
            )
            await browser.until(READY)
            assert await browser.value("location.hash") == "", "the token is in no copied link"
            await browser.until("document.querySelector('#kv-arrow.moving') !== null")
            assert "MB/s" in await browser.value(text_of("#kv-rate"))
            await browser.until(f"({text_of('.about')}).includes('vLLM 0.32.0')")
            await browser.until(f"({text_of('.facts')}).includes('KV over tcp')")
            await browser.until("document.getElementById('wrong').children.length === 1")
            assert "KV caches are full" in await browser.value(text_of("#wrong .what"))
            pool = world.app[SHARED].pool
            pool.decisions.append(Decision(0.0, known.url, "decode", "prefill", "why not", "done"))
            known.store = StorePlace("a" * 32, "6d", 128)
            await browser.until("document.querySelectorAll('td').length === 16")
            pair = await browser.value(text_of("#pair-rows td"))
            assert pair.startswith("10.9.8.7:7100 | "), pair
            assert "MB/s | int8 | 90 % | 1.0 % | 100" in pair
            assert "why not" in await browser.value(text_of("#decisions td"))
            assert known.store.name in await browser.value(text_of("#pool-rows td"))
            await _an_engine_dies(world, browser, monkeypatch)
            for width in (1280, 400):
                for dark in (False, True):
                    await browser.look(width=width, dark=dark)
                    assert await browser.value(FITS), f"the page is wider than {width} pixels"
                    back = await browser.value("getComputedStyle(document.body).backgroundColor")
                    light = sum(map(int, back.strip("rgb()").split(", "))) > 3 * 128
                    assert light is not dark
            meters = await browser.value(
                "[...document.querySelectorAll('[role=meter]')].every(m => m.ariaLabel && m.ariaValueText)"
            )
            assert meters, "a screen reader can read the bars"
            growing.cancel()
            assert browser.complaints == []
            await browser.open("about:blank")

    run(scenario())


async def _an_engine_dies(world: World, browser: Browser, patch: pytest.MonkeyPatch) -> None:
    """What an engine says is shown as text."""
    known, asked = world.known(world.p[1]), Inquiry.health

    async def health(self: Inquiry) -> None:
        if self._url == known.url:
            raise EngineFailedError("status", HOSTILE)
        await asked(self)

    patch.setattr(Inquiry, "health", health)
    await until(lambda: not known.up, "it is down")
    await browser.until("document.querySelector('.engine.down') !== null")
    await browser.until(f"({text_of('.engine.down .why')}).includes('onerror')")
    assert await browser.value("document.querySelectorAll('main img, main script').length") == 0
    shown = await browser.value("document.title")
    assert shown == "(2) pd-router"


@pytest.mark.parametrize("count", [0, 16])
def test_an_empty_side_and_a_large_fleet_fit(count: int) -> None:
    program = chromium()
    sizes: dict[str, Any] = {"prefill": count // 2, "decode": count - count // 2}
    if not count:  # of one side: a router without any engine does not start
        sizes |= {"decode": 1, "unnamed": True}

    async def scenario() -> None:
        async with World(**sizes) as world, Browser(program) as browser:
            await browser.look(width=400)
            await browser.open(f"http://127.0.0.1:{world.port}/")
            await browser.until(READY)
            shown = "getComputedStyle(document.querySelector('#prefill-title + .none')).display"
            assert (await browser.value(shown) == "none") is bool(count)
            assert await browser.value("document.querySelectorAll('.engine').length") == max(
                1, count
            )
            assert await browser.value(FITS)
            assert browser.complaints == []
            await browser.open("about:blank")

    run(scenario())


def test_a_router_that_is_gone_is_said() -> None:
    program = chromium()

    async def scenario() -> None:
        async with World() as world, Browser(program) as browser:
            await browser.look(width=1280)
            await browser.open(f"http://127.0.0.1:{world.port}/")
            await browser.until(READY)
            await world.server.close()
            await browser.until("document.body.className === 'stale'")
            assert "the router" in await browser.value(text_of("#summary"))

    run(scenario())
