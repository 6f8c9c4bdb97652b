# SPDX-License-Identifier: Apache-2.0
"""The task that watches one engine: it asks for health, kind, side, address and load, and notes the answers."""

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import suppress

import aiohttp

from scheduler_plugins.router.engines.caches import EngineCaches
from scheduler_plugins.router.engines.engine import BackendEngine, Role
from scheduler_plugins.router.engines.engine_reports import apply
from scheduler_plugins.router.engines.failures import (
    EngineFailedError,
    UnreachableError,
    first_look,
)
from scheduler_plugins.router.engines.inquiry import Handover, Inquiry
from scheduler_plugins.router.engines.kinds import Kind, SglangFacts
from scheduler_plugins.router.engines.sides import settle
from scheduler_plugins.router.engines.slow_probes import SlowProbes
from scheduler_plugins.router.prompt.describe import BLOCK_TOKENS
from scheduler_plugins.router.settings.config import RouterConfig

logger = logging.getLogger(__name__)

HUNG_AFTER = 2
"""Health checks in a row without an answer after which an engine counts as hung. One can be lost to a long step."""
PROBE_RETRY_S = 30.0
"""Pause before a prefill engine without an address is asked again. It will have none until it is restarted, and each
probe costs it a prefill."""


class EngineWatch:
    """Polls the health of one engine, and keeps its `BackendEngine` up to date."""

    def __init__(
        self,
        engine: BackendEngine,
        config: Callable[[], RouterConfig],
        session: aiohttp.ClientSession,
        caches: EngineCaches,
        on_change: Callable[[], None],
        prefills: Callable[[], bool],
    ) -> None:
        """Start nothing yet.

        Args:
            config: returns the current settings, which may change.
            on_change: called when the engine's state may have changed.
            prefills: whether an engine computes prompts for others.
        """
        self.engine = engine
        self.wake = asyncio.Event()
        """Set to have the engine checked at once."""
        self.checked = asyncio.Event()
        """Set once the engine has been checked."""
        self.probe_at = 0.0
        """When to ask a prefill engine for its address, on the event loop's clock."""
        self.misses = 0
        self.reports = True  # whether the engine may answer `GET /pd/load`
        self._unsure = False  # whether the engine may be on another side than is known
        self._logged = set[str]()  # causes for which the log has said that the engine is not up
        self._probed_start = (
            0  # the start of the engine for which it was asked for its address beside
        )
        self._asking: asyncio.Task[None] | None = None
        self._config = config
        self.ask = self._ask = Inquiry(engine.url, config, session)
        self._looks = SlowProbes(engine, self._ask, prefills)
        self._caches = caches
        self._on_change = on_change

    async def run(self) -> None:
        """Watch until cancelled."""
        try:
            await self._watch()
        finally:
            if self._asking is not None:
                self._asking.cancel()

    async def _watch(self) -> None:
        while True:
            try:
                await self._check()
            except Exception:
                # The watch must survive any error; otherwise the engine's state would never change again.
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
            await self._ask.health()
        except EngineFailedError as failure:
            # A busy engine may be late. An engine that refuses, resets or answers 503 is not busy.
            late = failure.cause == "timeout"
            self.misses += late
            if not late or self.misses >= HUNG_AFTER:
                refusing = isinstance(failure, UnreachableError) and failure.refused
                look = "" if engine.starts else first_look(engine.url, failure)
                self.set_down(
                    f"/health: {failure}{look}",
                    refusing=refusing,
                    answers=failure.cause == "status",
                    cause=failure.cause,
                )
            elif not engine.up:
                engine.reason = f"/health: {failure}"
            return
        self.misses = 0
        if not engine.up:
            self.probe_at, self.reports = 0.0, True
            self._looks.begin_anew()
        if (engine.kind is None or self._unsure) and not await self._identify():
            return
        self._unsure = False
        await self._looks.list_models()
        await self._looks.learn_version()
        if not engine.up and engine.refusing:
            self._caches.lost(engine)
        await self._hear()
        await self._looks.look_for_store()
        if moved := self._have_ranks_changed():
            self.probe_at = 0.0
        if engine.hands_over and (moved or engine.address is None):
            await self._probe()
        if not engine.up:
            engine.set_up()
            logger.info("%s (%s) is up", engine.url, engine.role)
        self._probe_beside()
        await self._looks.look_at_metrics()

    async def _hear(self) -> None:
        """Ask the engine for its load: by its scheduler's report, else by its metrics."""
        engine, load = self.engine, None
        try:
            if self.reports:
                load = await self._ask.report()
        except EngineFailedError as failure:
            self.reports = failure.cause != "status"
        try:
            if load is None:
                load = await self._ask.load_by_metrics()
        except EngineFailedError as failure:
            logger.debug("%s does not report its load: %s", engine.url, failure)
        if load is None:
            return
        if (lag_s := self._caches.lag_s(engine)) is not None:
            engine.metrics.event_lag_s.labels(engine.url).set(lag_s)
        if (reached := self._caches.reached(engine)) is not None:
            engine.metrics.events_connected.labels(engine.url).set(reached)
        apply(engine, load, asyncio.get_running_loop().time())
        if load.blocks and self._caches.prefixes.state(engine.name).source == "recent":
            # Without events, a block is a piece of text of about `BLOCK_TOKENS` tokens.
            room = load.blocks * (load.block_tokens or BLOCK_TOKENS) // BLOCK_TOKENS
            self._caches.prefixes.has_room(engine.name, room)
        given = self._config().kv_events.get(engine.url)
        if given is not None:
            self._caches.follow(engine, *given, ranks=engine.ranks, first=engine.ranks[0])
        elif load.kv_events is not None:
            self._caches.follow(engine, *load.kv_events, ranks=engine.ranks)

    async def _identify(self) -> bool:
        """Find out the kind of engine. Returns False if the engine does not answer."""
        engine = self.engine
        try:
            facts = await self._ask.sglang_facts()
        except EngineFailedError as failure:
            engine.reason = str(failure)
            return False
        if not engine.role_given:
            try:
                engine.role = engine.role_state.reported_home = await self._side(facts)
            except EngineFailedError as failure:
                engine.reason = f"it does not report its side: {failure}"
                return False
        engine.kind = Kind.VLLM if facts is None else Kind.SGLANG
        engine.about = engine.about._replace(version="" if facts is None else facts.version)
        engine.was_vllm = facts is None
        engine.whole = facts is not None and facts.whole
        engine.switches = facts is not None and facts.switches and not facts.whole
        settle(engine, facts, self._config().moving, asyncio.get_running_loop().time())
        if engine.whole:
            logger.info(
                "%s has no --disaggregation-mode: it gets no KV, and answers requests that pairs cannot",
                engine.url,
            )
        return True

    async def _side(self, facts: SglangFacts | None) -> Role:
        """The side that an engine reports. A vLLM engine of role `both` reports a handover address, so it prefills.
        Raises EngineFailedError."""
        if facts is not None:
            return Role.PREFILL if facts.mode == Role.PREFILL else Role.DECODE
        handover = await self._ask.vllm_handover(len(self.engine.ranks))
        return Role.PREFILL if handover.addresses else Role.DECODE

    def _have_ranks_changed(self) -> bool:
        """Whether a vLLM engine has more or fewer data-parallel ranks than known addresses."""
        engine = self.engine
        if not engine.addresses or engine.kind is Kind.SGLANG:
            return False
        return len(engine.addresses) != len(engine.ranks)

    async def _probe(self) -> None:
        """Ask a prefill engine for its address. Without an address it hands no KV over."""
        now = asyncio.get_running_loop().time()
        if now < self.probe_at:
            return
        self.probe_at = now + PROBE_RETRY_S
        engine = self.engine
        try:
            handover = await self._handover()
            addresses = handover.addresses
            engine.model, engine.bootstrap_port = handover.model, handover.bootstrap_port
            reason = (
                ""
                if addresses
                else "its answer to the probe has no address; start it with PDConnector and kv_role kv_producer or "
                "kv_both, or name it with --decode if it is a decode engine"
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

    def _probe_beside(self) -> None:
        """Ask a vLLM engine on the decode side for its address, once per start, so that a change of its side need not
        ask behind its queue. Its health is checked meanwhile."""
        engine = self.engine
        if self._probed_start == engine.starts or engine.hands_over or engine.kind is not Kind.VLLM:
            return
        self._probed_start = engine.starts

        async def ask() -> None:
            starts = engine.starts
            try:
                handover = await self._handover()
            except EngineFailedError as failure:
                logger.debug("%s does not report whether it hands KV over: %s", engine.url, failure)
                return
            if engine.up and engine.starts == starts and not engine.hands_over:
                engine.model, engine.addresses = handover.model, handover.addresses
                engine.handover_known = True
                self.probe_at = math.inf if handover.addresses else self.probe_at
                self._on_change()

        self._asking = asyncio.create_task(ask(), name=f"address of {engine.url}")

    def identify_again(self) -> None:
        """Ask the engine for its side once more, because a change of its side may have been interrupted."""
        self._unsure = True
        self.wake.set()

    def side_changed(self) -> None:
        """The engine has another role. If it hands KV over and its address is not known, ask for it now."""
        if self.engine.address is None:
            self.probe_at = 0.0
        self.wake.set()

    async def _handover(self) -> Handover:
        if self.engine.kind is Kind.SGLANG:
            return await self._ask.sglang_handover()
        return await self._ask.vllm_handover(len(self.engine.ranks))

    def set_down(
        self, reason: str, *, refusing: bool, answers: bool = False, cause: str = ""
    ) -> None:
        """Send the engine nothing until it answers again.

        Args:
            refusing: the engine takes no new connections, and may still finish its requests.
            answers: the engine answers that it takes no requests, and may still finish its open requests.
            cause: cause of the failure of an engine that has not been up: each is logged once.
        """
        engine = self.engine
        now = asyncio.get_running_loop().time()
        if engine.set_down(now, reason, refusing=refusing, answers=answers):
            self._on_change()
            logger.warning("%s (%s) is down: %s", engine.url, engine.role, reason)
            if not refusing:
                self._caches.lost(engine)
        elif cause not in self._logged and not engine.starts:
            logger.warning("%s (%s) is not up yet: %s", engine.url, engine.role, reason)
        self._logged.add(cause)
