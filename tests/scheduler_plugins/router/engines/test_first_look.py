# SPDX-License-Identifier: Apache-2.0
"""URLs that are not an engine's: the log says what answers there, and what to do."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from router_fakes import FAST, FakeEngine, World, run, until

from pd_connector.tools.launch.ports import Port
from scheduler_plugins.router.endpoints.app_keys import SHARED
from scheduler_plugins.router.server import RouterServer
from scheduler_plugins.router.settings.config import RouterConfig

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def saying(data: bytes, *, closes: bool = True) -> Handler:
    """A server that answers whatever it is told with this."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(data)
        if closes:
            writer.close()
        else:
            await asyncio.sleep(60)

    return serve


def http(status: int) -> bytes:
    return b"HTTP/1.1 %d No\r\nContent-Length: 2\r\n\r\n{}" % status


@asynccontextmanager
async def listening(handler: Handler) -> AsyncIterator[str]:
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def reason(url: str, **settings: Any) -> str:
    """What a router finds wrong with a prefill engine of this URL."""
    fake = FakeEngine("d")
    await fake.start()
    try:
        config = RouterConfig(prefill=(url,), decode=(fake.url,), **{**FAST, **settings})
        async with RouterServer(config) as server:
            (engine,) = (e for e in server.app[SHARED].pool.engines if e.url == config.prefill[0])
            await until(lambda: bool(engine.reason), "it is asked")
            assert engine.address is None
            return engine.reason
    finally:
        await fake.end()


@pytest.mark.parametrize(
    ("handler", "path", "said"),
    [
        (saying(b"\xff\0\0\0\0\0\0\0\1\x7f"), "", "not of its control port"),
        (saying(b""), "", "not of its control port"),
        (saying(http(404)), "/v1/completions", "without the path of an endpoint"),
    ],
    ids=["control port", "closed", "endpoint"],
)
def test_a_url_that_is_not_an_engines_is_told_with_what_it_should_be(
    handler: Handler, path: str, said: str
) -> None:
    async def scenario() -> None:
        async with listening(handler) as url:
            assert said in await reason(url + path)

    run(scenario())


def test_an_engine_that_says_nothing_may_be_behind_a_firewall() -> None:
    async def scenario() -> None:
        async with listening(saying(b"", closes=False)) as url:
            found = ""
            fake = FakeEngine("d")
            await fake.start()
            settings = {**FAST, "health_timeout_s": 0.2}
            config = RouterConfig(prefill=(url,), decode=(fake.url,), **settings)
            async with RouterServer(config) as server:
                engine = next(e for e in server.app[SHARED].pool.engines if e.url == url)
                await until(lambda: "firewall" in engine.reason, "two checks had no answer")
                found = engine.reason
            await fake.die()
            assert "no answer within 0.2 s" in found

    run(scenario())


def test_an_engine_with_a_key_is_told_with_the_option(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        world = World()
        world.p[0].api_key = "secret"
        async with world:
            assert "give the engines' key with --api-key" in world.known(world.p[0]).reason

    run(scenario())
    assert "give the engines' key with --api-key" in caplog.text


def test_a_router_is_not_taken_for_an_engine(caplog: pytest.LogCaptureFixture) -> None:
    """It may be this router itself, under a name that only the network knows: requests would go round."""

    async def scenario() -> None:
        async with World() as world:
            found = await reason(f"http://127.0.0.1:{world.port}")
            assert "a pd-router answers there, not an engine" in found

    run(scenario())
    assert "name the URLs of its engines" in caplog.text


def test_what_is_found_after_the_first_words_is_logged_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An address that refuses at first, and is then another program's."""

    async def scenario(port: int) -> None:
        url = f"http://127.0.0.1:{port}"
        fake = FakeEngine("d")
        await fake.start()
        config = RouterConfig(prefill=(url,), decode=(fake.url,), **FAST)
        async with RouterServer(config):
            await until(lambda: "refused" in caplog.text, "nobody is there")
            server = await asyncio.start_server(saying(http(500)), "127.0.0.1", port)
            await until(lambda: "answered 500" in caplog.text, "another program is there")
            server.close()
        await fake.die()

    with Port() as reserved:
        run(scenario(reserved.number))
    assert sum("is not up yet" in line for line in caplog.messages) == 2
