# SPDX-License-Identifier: Apache-2.0
"""The task that watches one engine: its health, its kind and side, its address, its load."""

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

import aiohttp

from pd_connector.protocol.params import ProducerAddress
from pd_connector.remedies import outage_in
from scheduler_plugins.admission import report
from scheduler_plugins.router.engines.addresses import addresses_of, decoded
from scheduler_plugins.router.engines.caches import EngineCaches
from scheduler_plugins.router.engines.engine import BackendEngine, Role
from scheduler_plugins.router.engines.engine_reports import apply, from_metrics, from_report
from scheduler_plugins.router.engines.exchange import (
    EXCERPT_BYTES,
    EngineCall,
    EngineFailedError,
    UnreachableError,
    failure_of,
)
from scheduler_plugins.router.engines.kinds import SERVER_INFO, Kind, SglangFacts, sglang_facts
from scheduler_plugins.router.prompt.describe import BLOCK_TOKENS
from scheduler_plugins.router.settings.config import RouterConfig

logger = logging.getLogger(__name__)

LOAD_LIMIT_S = 1.0
"""Longest wait for an engine to tell its load: its health is not asked meanwhile."""
MODELS_LOOK_S = 10.0
"""Pause between two looks at which models and adapters an engine serves."""
OUTAGE_LOOK_S = 15.0
"""Pause between two looks at a decode engine's metrics, in seconds."""


class EngineWatch:
    """Polls the health of one engine, and asks it for all that the router wants to know."""

    def __init__(
        self,
        engine: BackendEngine,
        config: Callable[[], RouterConfig],
        session: aiohttp.ClientSession,
        caches: EngineCaches,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin nothing yet.

        Args:
            config: the settings now; they may be read again.
            on_change: called when something may have been learnt of the engine.
        """
        self.engine = engine
        self.wake = asyncio.Event()
        """Set to have the engine checked at once."""
        self.checked = asyncio.Event()
        """Set once the engine has been checked."""
        self.probe_at = 0.0
        """When to ask a prefill engine for its address, on the event loop's clock."""
        self.misses = 0
        self.look_at = 0.0
        self.models_at = 0.0
        self.reports = True  # whether the engine may answer `GET /pd/load`
        self._config = config
        self._session = session
        self._caches = caches
        self._on_change = on_change

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            try:
                await self._check()
            except Exception:
                # The watch must outlive any surprise, or its engine stays as it is for ever.
                logger.exception("checking %s failed", self.engine.url)
            self._on_change()
            self.checked.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config().health_interval_s):
                    await self.wake.wait()
            self.wake.clear()

    async def _check(self) -> None:
        engine = self.engine
        try:
            await self._ask(
                engine, EngineCall("GET", "/health", {}), self._config().health_timeout_s
            )
        except EngineFailedError as failure:
            # A busy engine may be late once; one that refuses, resets or says 503 is not busy.
            late = failure.cause == "timeout"
            self.misses += late
            if not late or self.misses >= self._config().health_misses:
                refusing = isinstance(failure, UnreachableError) and failure.refused
                self.set_down(f"/health: {failure}", refusing=refusing)
            elif not engine.up:
                engine.reason = f"/health: {failure}"
            return
        self.misses = 0
        if not engine.up:
            self.probe_at, self.models_at, self.reports = 0.0, 0.0, True
        if engine.kind is None and not await self._identify(engine):
            return
        await self._list_models()
        if not engine.up and engine.refusing:
            self._caches.lost(engine)
        await self._hear()
        if moved := self._have_ranks_changed():
            self.probe_at = 0.0
        if engine.hands_over and (moved or engine.address is None):
            await self._probe()
        if not engine.up:
            engine.set_up()
            logger.info("%s (%s) is up", engine.url, engine.role)
        if engine.role is Role.DECODE:
            await self._look_for_outage()

    async def _hear(self) -> None:
        """Let the engine tell its load: by its scheduler's report, else by its metrics."""
        engine, told, headers = self.engine, None, self._headers()
        try:
            if self.reports:
                raw = await self._ask(engine, EngineCall("GET", report.PATH, headers), LOAD_LIMIT_S)
                told = from_report(raw, urlsplit(engine.url).hostname or "")
        except EngineFailedError as failure:
            self.reports = failure.cause != "status"
        try:
            if told is None:
                raw = await self._ask(engine, EngineCall("GET", "/metrics", {}), LOAD_LIMIT_S)
                told = from_metrics(raw)
        except EngineFailedError as failure:
            logger.debug("%s: no load: %s", engine.url, failure)
        if told is None:
            return
        if (lag_s := self._caches.lag_s(engine)) is not None:
            engine.metrics.event_lag_s.labels(engine.url).set(lag_s)
        apply(engine, told, asyncio.get_running_loop().time())
        if told.blocks and self._caches.prefixes.state(engine.name).source == "recent":
            # Without events blocks are of text, as long as `BLOCK_TOKENS` tokens.
            room = told.blocks * (told.block_tokens or BLOCK_TOKENS) // BLOCK_TOKENS
            self._caches.prefixes.has_room(engine.name, room)
        given = self._config().kv_events.get(engine.url)
        if given is not None:
            self._caches.follow(engine, *given, ranks=engine.ranks, first=engine.ranks[0])
        elif told.kv_events is not None:
            self._caches.follow(engine, *told.kv_events, ranks=engine.ranks)

    async def _identify(self, engine: BackendEngine) -> bool:
        """Find out which kind of engine it is; False if it does not answer."""
        try:
            raw = await self._ask(engine, EngineCall("GET", SERVER_INFO, self._headers()), None)
        except EngineFailedError as failure:
            if failure.cause != "status":
                engine.reason = f"{SERVER_INFO}: {failure}"
                return False
            raw = b""  # vLLM has no such page
        facts = sglang_facts(raw)
        if not engine.role_given:
            try:
                engine.role = await self._side(engine, facts)
            except EngineFailedError as failure:
                engine.reason = f"it does not tell its side: {failure}"
                return False
        engine.kind = Kind.VLLM if facts is None else Kind.SGLANG
        side = Role.PREFILL if engine.hands_over else engine.role
        if facts is not None and facts.mode != side:
            logger.warning(
                "%s is given as a %s engine, and is started with --disaggregation-mode %s",
                *(engine.url, engine.role, facts.mode),
            )
        return True

    async def _list_models(self) -> None:
        """Learn which models and adapters the engine serves. Who does not tell is asked for anything."""
        now = asyncio.get_running_loop().time()
        if now < self.models_at:
            return
        self.models_at = now + MODELS_LOOK_S
        call = EngineCall("GET", "/v1/models", self._headers())
        try:
            listed = decoded(await self._ask(self.engine, call, LOAD_LIMIT_S))
        except EngineFailedError as failure:
            logger.debug("%s: no list of models: %s", self.engine.url, failure)
            return
        data = listed.get("data") if isinstance(listed, dict) else None
        names = [
            one.get("id")
            for one in (data if isinstance(data, list) else ())
            if isinstance(one, dict)
        ]
        self.engine.models = frozenset(name for name in names if isinstance(name, str))

    async def _side(self, engine: BackendEngine, facts: SglangFacts | None) -> Role:
        """The side that an engine says it is on. A vLLM engine of both tells where it hands KV over, and
        so prefills. Raises EngineFailedError."""
        if facts is not None:
            return Role.PREFILL if facts.mode == Role.PREFILL else Role.DECODE
        return Role.PREFILL if await self._ask_vllm(engine) else Role.DECODE

    async def _look_for_outage(self) -> None:
        """Learn from a decode engine's metrics whether KV arrives there."""
        now = asyncio.get_running_loop().time()
        if now < self.look_at:
            return
        self.look_at = now + OUTAGE_LOOK_S
        engine, call = self.engine, EngineCall("GET", "/metrics", {})
        try:
            text = await self._ask(engine, call, self._config().health_timeout_s)
        except EngineFailedError as failure:
            logger.debug("%s: no metrics: %s", engine.url, failure)
            return
        outage = outage_in(text.decode("utf-8", "replace"))
        warning = f"{outage.found}. What to do: {outage.advice}" if outage else ""
        if warning and not engine.warning:
            logger.warning("%s (decode): %s", engine.url, warning)
        engine.warning = warning

    def _have_ranks_changed(self) -> bool:
        """Whether a vLLM engine has more or fewer data-parallel ranks than it told addresses of."""
        engine = self.engine
        if not engine.addresses or engine.kind is Kind.SGLANG:
            return False
        return len(engine.addresses) != len(engine.ranks)

    async def _probe(self) -> None:
        """Ask a prefill engine for its address; without one it hands over no KV."""
        now = asyncio.get_running_loop().time()
        if now < self.probe_at:
            return
        self.probe_at = now + self._config().probe_retry_s
        engine = self.engine
        try:
            sglang = engine.kind is Kind.SGLANG
            addresses = await (self._ask_sglang(engine) if sglang else self._ask_vllm(engine))
            reason = (
                "" if addresses else "its answer to the probe has no address: not our connector"
            )
        except EngineFailedError as failure:
            addresses, reason = (), f"the probe failed: {failure}"
        said_before = reason == engine.reason
        engine.set_addresses(addresses, reason)
        if engine.address is None:
            level = logging.DEBUG if said_before else logging.WARNING
            logger.log(level, "%s (prefill) hands over no KV: %s", engine.url, reason)
        else:
            self.probe_at = math.inf
            places = ", ".join(f"{address.host}:{address.port}" for address in addresses)
            logger.info("%s (prefill) hands over KV at %s", engine.url, places)

    async def _ask_vllm(self, engine: BackendEngine) -> tuple[ProducerAddress, ...]:
        """The addresses that a vLLM engine answers with, one for each of its ranks. Raises EngineFailedError."""
        headers = self._headers()
        listed = await self._ask(engine, EngineCall("GET", "/v1/models", headers), None)
        engine.model = _first_model(listed)
        return await addresses_of(
            lambda call: self._ask(engine, call, None), headers, engine.model, len(engine.ranks)
        )

    async def _ask_sglang(self, engine: BackendEngine) -> tuple[ProducerAddress, ...]:
        """The addresses that an SGLang engine tells. Raises EngineFailedError."""
        raw = await self._ask(engine, EngineCall("GET", SERVER_INFO, self._headers()), None)
        facts = sglang_facts(raw)
        if facts is None:
            raise EngineFailedError("status", f"{SERVER_INFO} is no longer SGLang's")
        engine.model, engine.bootstrap_port = facts.model, facts.bootstrap_port
        return facts.replicas

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self._config().api_key:
            headers["Authorization"] = f"Bearer {self._config().api_key}"
        return headers

    async def _ask(self, engine: BackendEngine, call: EngineCall, limit_s: float | None) -> bytes:
        """The body of an engine's answer 200, within `probe_timeout_s` if no limit is given. Raises
        EngineFailedError for anything else."""
        limit_s = self._config().probe_timeout_s if limit_s is None else limit_s
        try:
            async with (
                asyncio.timeout(limit_s),
                self._session.request(
                    call.method,
                    engine.url + call.path,
                    headers=call.headers,
                    data=call.body,
                    timeout=aiohttp.ClientTimeout(connect=self._config().connect_timeout_s),
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

    def set_down(self, reason: str, *, refusing: bool) -> None:
        """The engine gets nothing until it answers again.

        Args:
            refusing: it takes no new connections, and may go on with what it has.
        """
        engine = self.engine
        now = asyncio.get_running_loop().time()
        if engine.set_down(now, reason, refusing=refusing):
            self._on_change()
            logger.warning("%s (%s) is down: %s", engine.url, engine.role, reason)
            if not refusing:
                self._caches.lost(engine)


def _first_model(raw: bytes) -> str:
    """The name of the model an engine serves; adapters follow it in the list."""
    listed = decoded(raw)
    data = listed.get("data") if isinstance(listed, dict) else None
    first = data[0] if isinstance(data, list) and data else None
    name = first.get("id") if isinstance(first, dict) else None
    if not isinstance(name, str):
        raise EngineFailedError("status", "/v1/models names no model")
    return name
