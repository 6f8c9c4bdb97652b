# SPDX-License-Identifier: Apache-2.0
"""The engines behind the router, and the tasks that watch their health."""

import asyncio
import json
import logging
import math
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from pd_connector.protocol.params import ProducerAddress
from pd_connector.remedies import outage_in
from scheduler_plugins.admission import report
from scheduler_plugins.cost.profile import load
from scheduler_plugins.router import body
from scheduler_plugins.router.caches import EngineCaches
from scheduler_plugins.router.config import RouterConfig
from scheduler_plugins.router.engines import BackendEngine, Role
from scheduler_plugins.router.exchange import (
    EXCERPT_BYTES,
    EngineCall,
    EngineFailedError,
    UnreachableError,
    failure_of,
)
from scheduler_plugins.router.loads import apply, from_metrics, from_report
from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.policies.base import BlockHash

logger = logging.getLogger(__name__)

LOAD_LIMIT_S = 1.0
"""Longest wait for an engine to tell its load: its health is not asked meanwhile."""
OUTAGE_LOOK_S = 15.0
"""Pause between two looks at a decode engine's metrics, in seconds."""


@dataclass(eq=False)
class _Watch:
    """What the watching task of one engine remembers."""

    engine: BackendEngine
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    checked: asyncio.Event = field(default_factory=asyncio.Event)
    misses: int = 0
    probe_at: float = 0.0
    look_at: float = 0.0
    reports: bool = True
    """Whether the engine may answer `GET /pd/load`."""


class EnginePool:
    """All engines. One task per engine polls its health and probes prefill engines."""

    def __init__(
        self, config: RouterConfig, session: aiohttp.ClientSession, metrics: Metrics
    ) -> None:
        self._config = config
        self._session = session
        self._metrics = metrics
        self._watches = [
            _Watch(BackendEngine(url, role, metrics))
            for role, urls in ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode))
            for url in urls
        ]
        self._tasks: list[asyncio.Task[None]] = []
        self.caches = EngineCaches()
        """What engines have cached."""

    @property
    def engines(self) -> list[BackendEngine]:
        return [watch.engine for watch in self._watches]

    async def start(self) -> None:
        """Begin watching; returns once every engine has been checked, and probed if it is up."""
        if self._config.profile:
            for engine in self.engines:
                engine.costs, engine.told_costs = load(Path(self._config.profile)), True
        for watch in self._watches:
            if found := self._config.kv_events.get(watch.engine.url):
                self.caches.follow(watch.engine, *found)
        self._tasks = [
            asyncio.create_task(self._run(watch), name=f"watch {watch.engine.url}")
            for watch in self._watches
        ]
        for watch in self._watches:
            await watch.checked.wait()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.caches.close()

    def prefilled(self, engine: BackendEngine, prompt: Sequence[BlockHash]) -> None:
        """The engine has the KV of this prompt."""
        self.caches.prefilled(engine, prompt, asyncio.get_running_loop().time())

    def describe(self) -> list[dict[str, Any]]:
        """The state of every engine, for `/health`."""
        return [
            {**engine.describe(), "cache": self.caches.describe(engine)} for engine in self.engines
        ]

    def up(self, role: Role, besides: Collection[BackendEngine] = ()) -> list[BackendEngine]:
        """Engines of one side that may get a request, without those in `besides`.

        Those that failed several requests in a row are left out for a while, unless there are no others.
        """
        able = [
            e
            for e in self.engines
            if e.role is role and e.up and not e.draining and e not in besides
        ]
        now = asyncio.get_running_loop().time()
        return [e for e in able if e.circuit.lets_pass(now)] or able

    def all_up(self) -> list[BackendEngine]:
        """Engines of both sides that may get a request."""
        return [engine for engine in self.engines if engine.up]

    def report_failure(self, engine: BackendEngine, failure: EngineFailedError) -> None:
        """A request to the engine failed. An unreachable engine is down at once; another is checked now."""
        if isinstance(failure, UnreachableError):
            self._set_down(engine, str(failure), refusing=failure.refused)
        elif engine.circuit.failed(failure.cause, asyncio.get_running_loop().time()):
            self._metrics.circuit_opened.labels(engine.url, failure.cause).inc()
            logger.warning("%s gets a pause: it failed again and again: %s", engine.url, failure)
        self._watch_of(engine).wake.set()

    def confirm(self, engine: BackendEngine, seen: ProducerAddress | None) -> None:
        """Compare the address in a prefill engine's answer with the known one; probe if it moved."""
        if seen is not None and engine.address is not None and seen != engine.address:
            logger.warning("%s changed its address: probing it again", engine.url)
            engine.set_address(None, "its address changed")
            watch = self._watch_of(engine)
            watch.probe_at = 0.0
            watch.wake.set()

    def _watch_of(self, engine: BackendEngine) -> _Watch:
        return next(watch for watch in self._watches if watch.engine is engine)

    async def _run(self, watch: _Watch) -> None:
        while True:
            try:
                await self._check(watch)
            except Exception:
                # The watch must outlive any surprise, or its engine stays as it is for ever.
                logger.exception("checking %s failed", watch.engine.url)
            watch.checked.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.health_interval_s):
                    await watch.wake.wait()
            watch.wake.clear()

    async def _check(self, watch: _Watch) -> None:
        engine = watch.engine
        try:
            await self._ask(engine, EngineCall("GET", "/health", {}), self._config.health_timeout_s)
        except EngineFailedError as failure:
            # A busy engine may be late once; one that refuses, resets or says 503 is not busy.
            late = failure.cause == "timeout"
            watch.misses += late
            if not late or watch.misses >= self._config.health_misses:
                refusing = isinstance(failure, UnreachableError) and failure.refused
                self._set_down(engine, f"/health: {failure}", refusing=refusing)
            elif not engine.up:
                engine.reason = f"/health: {failure}"
            return
        watch.misses = 0
        if not engine.up:
            watch.probe_at, watch.reports = 0.0, True
        if engine.role is Role.PREFILL and engine.address is None:
            await self._probe(watch)
        if not engine.up:
            if engine.refusing:
                self.caches.lost(engine)
            engine.set_up()
            logger.info("%s (%s) is up", engine.url, engine.role)
        await self._hear(watch)
        if engine.role is Role.DECODE:
            await self._look_for_outage(watch)

    async def _hear(self, watch: _Watch) -> None:
        """Let the engine tell its load: by its scheduler's report, else by its metrics."""
        engine, told, headers = watch.engine, None, dict[str, str]()
        if self._config.api_key:
            headers["Authorization"] = f"Bearer {self._config.api_key}"
        try:
            if watch.reports:
                raw = await self._ask(engine, EngineCall("GET", report.PATH, headers), LOAD_LIMIT_S)
                told = from_report(raw, urlsplit(engine.url).hostname or "")
        except EngineFailedError as failure:
            watch.reports = failure.cause != "status"
        try:
            if told is None:
                raw = await self._ask(engine, EngineCall("GET", "/metrics", {}), LOAD_LIMIT_S)
                told = from_metrics(raw)
        except EngineFailedError as failure:
            logger.debug("%s: no load: %s", engine.url, failure)
        if told is None:
            return
        apply(engine, told, asyncio.get_running_loop().time())
        if told.blocks and self.caches.prefixes.state(engine.name).source == "recent":
            self.caches.prefixes.has_room(engine.name, told.blocks)
        if told.kv_events is not None and engine.url not in self._config.kv_events:
            self.caches.follow(engine, *told.kv_events)

    async def _look_for_outage(self, watch: _Watch) -> None:
        """Learn from a decode engine's metrics whether KV arrives there."""
        now = asyncio.get_running_loop().time()
        if now < watch.look_at:
            return
        watch.look_at = now + OUTAGE_LOOK_S
        engine, call = watch.engine, EngineCall("GET", "/metrics", {})
        try:
            text = await self._ask(engine, call, self._config.health_timeout_s)
        except EngineFailedError as failure:
            logger.debug("%s: no metrics: %s", engine.url, failure)
            return
        outage = outage_in(text.decode("utf-8", "replace"))
        warning = f"{outage.found}. What to do: {outage.advice}" if outage else ""
        if warning and not engine.warning:
            logger.warning("%s (decode): %s", engine.url, warning)
        engine.warning = warning

    async def _probe(self, watch: _Watch) -> None:
        """Ask a prefill engine for its address; without one it hands over no KV."""
        now = asyncio.get_running_loop().time()
        if now < watch.probe_at:
            return
        watch.probe_at = now + self._config.probe_retry_s
        engine = watch.engine
        headers = {"Content-Type": "application/json"}
        if self._config.api_key:
            headers["Authorization"] = f"Bearer {self._config.api_key}"
        limit_s = self._config.probe_timeout_s
        try:
            model = _first_model(
                await self._ask(engine, EngineCall("GET", "/v1/models", headers), limit_s)
            )
            question = EngineCall("POST", body.COMPLETIONS, headers, body.encode(body.probe(model)))
            address = body.address_in(_decoded(await self._ask(engine, question, limit_s)))
            reason = "" if address else "its answer to the probe has no address: not our connector"
        except EngineFailedError as failure:
            address, reason = None, f"the probe failed: {failure}"
        said_before = reason == engine.reason
        engine.set_address(address, reason)
        if address is None:
            level = logging.DEBUG if said_before else logging.WARNING
            logger.log(level, "%s (prefill) hands over no KV: %s", engine.url, reason)
        else:
            watch.probe_at = math.inf
            logger.info(
                "%s (prefill) hands over KV at %s:%d", engine.url, address.host, address.port
            )

    async def _ask(self, engine: BackendEngine, call: EngineCall, limit_s: float) -> bytes:
        """The body of an engine's answer 200. Raises EngineFailedError for anything else."""
        try:
            async with (
                asyncio.timeout(limit_s),
                self._session.request(
                    call.method, engine.url + call.path, headers=call.headers, data=call.body
                ) as response,
            ):
                raw = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
                raise EngineFailedError("timeout", f"no answer within {limit_s:g} s") from None
            raise failure_of(error) from None
        if response.status != 200:
            said = " ".join(raw[:EXCERPT_BYTES].decode("utf-8", "replace").split())
            raise EngineFailedError(
                "status", f"{call.path} answered {response.status}: {said or '-'}"
            )
        return raw

    def _set_down(self, engine: BackendEngine, reason: str, *, refusing: bool) -> None:
        now = asyncio.get_running_loop().time()
        if engine.set_down(now, reason, refusing=refusing):
            logger.warning("%s (%s) is down: %s", engine.url, engine.role, reason)
            if not refusing:
                self.caches.lost(engine)


def _first_model(raw: bytes) -> str:
    """The name of the model an engine serves; adapters follow it in the list."""
    listed = _decoded(raw)
    data = listed.get("data") if isinstance(listed, dict) else None
    first = data[0] if isinstance(data, list) and data else None
    name = first.get("id") if isinstance(first, dict) else None
    if not isinstance(name, str):
        raise EngineFailedError("status", "/v1/models names no model")
    return name


def _decoded(raw: bytes) -> object:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise EngineFailedError("status", "its answer is not JSON") from None
