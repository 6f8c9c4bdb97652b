# SPDX-License-Identifier: Apache-2.0
"""Fake engines that inject faults and count, and a router in front of them.

Real engines are tested under tests/engines; these only do what a real one cannot be made to do.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDictProxy
from prometheus_client.parser import text_string_to_metric_families

from pd_connector.tools.launch.ports import Port
from scheduler_plugins.admission.endpoints import GENERATE
from scheduler_plugins.router.endpoints.app_keys import SHARED
from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.pool import EnginePool
from scheduler_plugins.router.loop import AsyncioLoop
from scheduler_plugins.router.server import RouterServer
from scheduler_plugins.router.settings.config import RouterConfig

Behaviour = Callable[["FakeEngine", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]

DEADLINE_S = 100.0
"""Ends a test that hangs; far more than the slowest one takes on a busy machine."""
CONTEXT_TOKENS = 4096
PATIENT = {
    "engines.sessions.CONNECT_S": DEADLINE_S,
    "engines.inquiry.PROBE_S": DEADLINE_S,
    "engines.watch.PROBE_RETRY_S": 0.2,
    "handoff.prefill.REFUSAL_GRACE_S": 0.3,
}
"""Constants of the router as its tests have them (`conftest.py`): no wait ends by the machine's load, and none is long."""
FAST = {
    "health_interval_s": 0.05,
    # Everything runs on one event loop: on a busy machine short limits would take all engines for dead at once.
    "health_timeout_s": DEADLINE_S,
    "port": 0,
    "policy": "round_robin",  # who is asked next can be told beforehand
    "shutdown_timeout_s": 0.2,
}


def choices(text: str) -> dict[str, Any]:
    """What one event says."""
    return {"choices": [{"index": 0, "text": text}]}


def event(text: str) -> bytes:
    return f"data: {json.dumps(choices(text))}\n\n".encode()


DONE = b"data: [DONE]\n\n"


async def answer(
    engine: "FakeEngine", request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    """What a healthy engine does: four events, or one object; who answered is in it."""
    if body.get("stream"):
        return await stream(4)(engine, request, body)
    content = {"id": "cmpl-1", **choices("said"), "served_by": engine.name}
    return web.json_response(content, headers={"X-Engine": engine.name})


def stream(events: int, then: str = "end", gap_s: float = 0.0) -> Behaviour:
    """This many events, and then `end`, `die`, `hang`, `stop` (no end mark), `half` (an event)."""

    async def behave(
        engine: "FakeEngine", request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(events):
            await response.write(event(f"{engine.name}{number}"))
            await asyncio.sleep(gap_s)
        if then == "half":
            await response.write(b'data: {"choices": [{"text": "hal')
            await asyncio.sleep(0.02)
        if then in ("die", "half"):
            drop(request)
        elif then == "hang":
            await forever()
        elif then == "end":
            await response.write(DONE)
        return response

    return behave


def says(*events: bytes, then: str = "end") -> Behaviour:
    """A stream of these bytes, and then its end, nothing any more (`hang`), or the connection's end (`die`)."""

    async def behave(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for one in events:
            await response.write(one)
            await asyncio.sleep(0.01)
        if then == "die":
            drop(request)
        if then != "end":
            await forever()
        return response

    return behave


async def hang(
    engine: "FakeEngine", request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    await forever()
    raise AssertionError


async def drop_at_once(
    engine: "FakeEngine", request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    drop(request)
    return web.Response()


async def die_inside_json(
    engine: "FakeEngine", request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    response.content_length = 1000
    await response.prepare(request)
    await response.write(b'{"id": ')
    await asyncio.sleep(0.02)
    drop(request)
    return response


def status(code: int, **headers: str) -> Behaviour:
    async def behave(
        engine: "FakeEngine", request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        error = {"error": {"message": f"{engine.name} says {code}", "code": code}}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.json_response(error, status=code, headers=named)

    return behave


async def waits_for_kv(
    engine: "FakeEngine", request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    """A decode engine whose KV never comes."""
    behave = hang if "kv_transfer_params" in body else answer
    return await behave(engine, request, body)


def slow(delay_s: float) -> Behaviour:
    async def behave(
        engine: "FakeEngine", request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        await asyncio.sleep(delay_s)
        return await answer(engine, request, body)

    return behave


def once(told: asyncio.Event) -> Behaviour:
    """Answers once a test says so."""

    async def behave(
        engine: "FakeEngine", request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        await told.wait()
        return await answer(engine, request, body)

    return behave


def drop(request: web.Request) -> None:
    """Break the connection as a killed process does."""
    assert request.transport is not None
    request.transport.abort()


async def forever() -> None:
    await asyncio.Event().wait()


class FakeEngine:
    """An engine's HTTP side. `behave` answers completions; everything it got is kept."""

    def __init__(self, name: str, engine_id: str | None = None) -> None:
        self.name = name
        self.engine_id = engine_id
        self.consumes = True
        self.about: dict[str, Any] = {}
        self.behave: Behaviour = answer
        self.api_key = ""
        self.healthy = True
        self.hung = False
        self._unhung = asyncio.Event()
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[CIMultiDictProxy[str]] = []
        self.pool_asked: list[str | None] = []
        self.probes = 0
        self.health_checks = 0
        self.metrics = ""
        self.report: bytes | None = None
        """What it answers to `GET /pd/load`; None: it has no such endpoint."""
        self.pool: Callable[[str | None], web.Response] | None = None
        """What it answers to `GET /pd/pool`, by the value of `after`; None: it has no such endpoint."""
        self.far_pool: Callable[[str], web.Response] | None = None
        """What it answers to `GET /pd/pool?after=N&of=far`."""
        self.model_root = ""
        self.model = "m"
        """The name of its model; it serves an adapter, too."""
        self.has_adapter = True
        self.context_tokens: Any = CONTEXT_TOKENS
        """What it tells of its context's length; None: nothing."""
        self.version = ""
        """What it answers to `GET /version`; empty: it has no such endpoint."""
        self.tokenize: Callable[[dict[str, Any]], list[int]] | None = None
        """Its tokenizer; None: it has no `/tokenize`."""
        self.detokenize: Callable[[list[int]], str] | None = None
        """The way back; None: it has no `/detokenize`."""
        self.is_paused: int | None = 404
        """Status of its answer to `GET /is_paused`; None: it never answers."""
        self.cancelled = 0
        self.running = 0
        self.port = 0
        self.place: Port | None = (
            None  # kept while it is dead, or a client's socket could have its port
        )
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def params(self) -> list[dict[str, Any] | None]:
        return [body.get("kv_transfer_params") for body in self.bodies]

    async def start(self) -> None:
        app = web.Application()
        self.routes(app)
        # access_log off: it formats a date for every request
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        await self._runner.setup()
        self.place = self.place or Port()
        self.port = self.place.number
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    def routes(self, app: web.Application) -> None:
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/version", self._version)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post(GENERATE, self._complete)
        app.router.add_get("/pd/load", self._load)
        app.router.add_get("/pd/pool", self._pool)
        app.router.add_get("/is_paused", self._is_paused)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)

    def unhang(self) -> None:
        """Answer the health checks that wait, and later ones."""
        self.hung = False
        self._unhung.set()
        self._unhung = asyncio.Event()

    async def refuse(self) -> None:
        """Stop listening and keep the open connections, as a draining engine does."""
        assert self._runner is not None
        for site in list(self._runner.sites):
            await site.stop()

    async def die(self) -> None:
        """Stop listening and break every connection, as a killed engine does."""
        if self._runner is None:
            return
        await self.refuse()
        assert self._runner.server is not None
        for protocol in list(self._runner.server.connections):
            if protocol.transport is not None:
                protocol.transport.abort()
        await self._runner.cleanup()
        self._runner = None

    async def end(self) -> None:
        """Die for good."""
        await self.die()
        if self.place is not None:
            self.place.release()

    async def _health(self, request: web.Request) -> web.StreamResponse:
        self.health_checks += 1
        if self.hung:
            await self._unhung.wait()
        return web.Response(status=200 if self.healthy else 503)

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text=self.metrics)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        base: dict[str, Any] = {"id": self.model, "root": self.model_root}
        if self.context_tokens is not None:
            base["max_model_len"] = self.context_tokens
        adapter = {"id": "adapter" if self.model == "m" else f"{self.model}-adapter"}
        return web.json_response(
            {
                "object": "list",
                "data": [base, *[{**adapter, "parent": self.model}] * self.has_adapter],
            }
        )

    async def _version(self, request: web.Request) -> web.StreamResponse:
        if not self.version:
            return web.Response(status=404)
        return web.json_response({"version": self.version})

    async def _load(self, request: web.Request) -> web.StreamResponse:
        if self.report is None:
            return web.Response(status=404)
        return web.Response(body=self.report, content_type="application/json")

    async def _pool(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("of") == "far":
            assert self.far_pool is not None
            return self.far_pool(request.query["after"])
        self.pool_asked.append(request.query.get("after"))
        return web.Response(status=404) if self.pool is None else self.pool(self.pool_asked[-1])

    async def _is_paused(self, request: web.Request) -> web.StreamResponse:
        if self.is_paused is None:
            await forever()
        return web.json_response({"is_paused": False}, status=self.is_paused or 200)

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        if self.tokenize is None:
            return web.Response(status=404)
        return web.json_response({"tokens": self.tokenize(await request.json())})

    async def _detokenize(self, request: web.Request) -> web.StreamResponse:
        if self.detokenize is None:
            return web.Response(status=404)
        return web.json_response({"prompt": self.detokenize((await request.json())["tokens"])})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
        except RecursionError:  # what FastAPI makes of it, which engines are built on
            return web.json_response({"error": {"message": "parsing the body"}}, status=400)
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": {"message": "no key", "code": 401}}, status=401)
        if (body.get("kv_transfer_params") or {}).get("describe"):
            self.probes += 1
            return self.describe(body)
        self.bodies.append(body)
        self.headers.append(request.headers)
        self.running += 1
        try:
            return await self.behave(self, request, body)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    def describe(self, body: dict[str, Any]) -> web.Response:
        """The answer to the router's probe."""
        assert body["model"] == self.model
        params = None
        if self.engine_id is not None:
            params = {
                "remote_engine_id": self.engine_id,
                "consumes": self.consumes,
                "remote_host": "127.0.0.1",
                "remote_port": 7000,
                "describe": True,
            }
        if self.about:
            params = {**(params or {}), **self.about}
        return web.json_response({"id": "cmpl-0", **choices("a"), "kv_transfer_params": params})


class World:
    """Fake engines, a router on a real socket, a client. Leaving checks that nothing is left."""

    def __init__(
        self,
        prefill: int = 1,
        decode: int = 1,
        *,
        unnamed: bool = False,
        both: bool = False,
        **settings: Any,
    ) -> None:
        """`unnamed`: the router is not told which engine is on which side. `both`: prefill engines are on
        the other side as well."""
        self._unnamed, self._both = unnamed, both
        self.p = [FakeEngine(f"p{n}", engine_id=f"engine-p{n}") for n in range(prefill)]
        self.d = [FakeEngine(f"d{n}") for n in range(decode)]
        self._settings = {**FAST, **settings}

    async def __aenter__(self) -> "World":
        self._sockets_before = sockets()
        for engine in self.p + self.d:
            await engine.start()
        prefill, decode = tuple(e.url for e in self.p), tuple(e.url for e in self.d)
        engines = {"prefill": prefill, "decode": decode + (prefill if self._both else ())}
        if self._unnamed:
            engines = {"engine": prefill + decode}
        config = RouterConfig(**engines, **self._settings)
        self.server = RouterServer(config)
        self.app = self.server.app
        await self.server.__aenter__()
        self.port = self.server.port
        self.client = aiohttp.ClientSession(
            f"http://127.0.0.1:{self.port}", timeout=aiohttp.ClientTimeout(total=DEADLINE_S)
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            await self.idle()
        await self.client.close()
        await self.server.close()
        for engine in self.p + self.d:
            await engine.end()
        if error is None:
            await until(lambda: len(asyncio.all_tasks()) == 1, "only the test's own task is left")
            # Fewer, where ZeroMQ still closed those of an earlier test when this one began.
            await until(lambda: sockets() <= self._sockets_before, "all sockets are closed")

    @property
    def engines(self) -> list[BackendEngine]:
        return self.app[SHARED].pool.engines

    def known(self, fake: FakeEngine) -> BackendEngine:
        """What the router knows of a fake engine."""
        return next(engine for engine in self.engines if engine.url == fake.url)

    async def idle(self) -> None:
        """Wait until no request is open anywhere, on either side of the router."""
        await until(lambda: all(e.in_flight == 0 for e in self.engines), "the router is idle")
        await until(lambda: all(e.running == 0 for e in self.p + self.d), "the engines are idle")
        await until(lambda: self._requests_in_flight() == 0, "no client request is open")

    def _requests_in_flight(self) -> float | None:
        registry = self.app[SHARED].metrics.registry
        return registry.get_sample_value("pd_router:requests_in_flight")

    async def down(self, fake: FakeEngine) -> None:
        await until(lambda: not self.known(fake).up, f"{fake.name} is down")

    async def up(self, fake: FakeEngine) -> None:
        await until(lambda: self.known(fake).up, f"{fake.name} is up")

    async def complete(self, **body: Any) -> "Reply":
        """A completion, read to its end."""
        return await self.post("/v1/completions", {"model": "m", "prompt": "hello", **body})

    async def post(self, path: str, body: Any, **headers: str) -> "Reply":
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.client.post(path, data=content, headers=headers) as response:
            return Reply(response.status, response.headers, await response.read())

    async def get(self, path: str) -> "Reply":
        async with self.client.get(path) as response:
            return Reply(response.status, response.headers, await response.read())

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of all samples of that name with these labels."""
        families = text_string_to_metric_families((await self.get("/metrics")).text)
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == f"pd_router:{name}" and labels.items() <= sample.labels.items()
        )


class Reply:
    """What the client got."""

    def __init__(self, status: int, headers: CIMultiDictProxy[str], content: bytes) -> None:
        self.status = status
        self.headers = headers
        self.content = content

    @property
    def text(self) -> str:
        return self.content.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def events(self) -> list[Any]:
        """The stream's events, all of which must be whole."""
        assert self.content.endswith(b"\n\n"), self.content
        lines = self.text.strip().split("\n\n")
        assert all(line.startswith("data: ") for line in lines), lines
        data = [line.removeprefix("data: ") for line in lines]
        return [text if text == "[DONE]" else json.loads(text) for text in data]


@asynccontextmanager
async def engines(count: int = 3) -> AsyncIterator[list[FakeEngine]]:
    """Engines that have started, for routers of the test's own; at the end they die."""
    fakes = [FakeEngine(f"e{n}", engine_id=f"engine-{n}") for n in range(count)]
    for fake in fakes:
        await fake.start()
    yield fakes
    for fake in fakes:
        await fake.die()


def pool_of(router: RouterServer) -> EnginePool:
    pool = router.app[SHARED].pool
    assert isinstance(pool, EnginePool)
    return pool


def engine_of(router: RouterServer, fake: FakeEngine) -> BackendEngine:
    return next(engine for engine in pool_of(router).engines if engine.url == fake.url)


def run(
    scenario: Coroutine[Any, Any, None],
    loop: Callable[[], asyncio.AbstractEventLoop] = AsyncioLoop,
) -> None:
    """Run one scenario under a deadline."""

    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scenario

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(bounded())


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition; fails after the deadline, saying which."""
    loop = asyncio.get_running_loop()
    end = loop.time() + DEADLINE_S / 2
    while not condition():
        assert loop.time() < end, f"never came true: {what}; tasks: {asyncio.all_tasks()}"
        await asyncio.sleep(0.005)


def sockets() -> int:
    """Open sockets of this process."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
        except FileNotFoundError:
            continue
    return count
