# SPDX-License-Identifier: Apache-2.0
"""Queries to an engine every few seconds: its models, its place in a KV pool, and whether KV arrives."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

from pd_connector.remedies import unread_in
from scheduler_plugins.router.engines.engine import BackendEngine, Role
from scheduler_plugins.router.engines.failures import EngineFailedError
from scheduler_plugins.router.engines.inquiry import Inquiry
from scheduler_plugins.router.engines.kinds import Kind
from scheduler_plugins.router.engines.traffic import Reading, Traffic, between
from scheduler_plugins.router.index.stored import StorePlace
from scheduler_plugins.router.metrics import OUTCOMES

logger = logging.getLogger(__name__)

MODELS_LOOK_S = 10.0
"""Pause between two queries of an engine's models and adapters."""
STORE_LOOK_S = 10.0
"""Pause between two queries of an engine's place in the KV pool of its host."""
METRICS_LOOK_S = 5.0
"""Pause between two queries of an engine's metrics, in seconds."""

SLOW = 3
"""Factor for that pause after an engine has not answered."""


class SlowProbes:
    """The queries of one engine. Each does nothing before its time has come."""

    def __init__(self, engine: BackendEngine, ask: Inquiry, prefills: Callable[[], bool]) -> None:
        """`prefills`: whether an engine computes prompts for others. If none does, every engine answers alone."""
        self.engine = engine
        self._ask = ask
        self._prefills = prefills
        self.metrics_at = 0.0
        self.models_at = 0.0
        self.store_at = 0.0
        """When to ask the engine for its place in a KV pool; infinite: it uses none until it is restarted."""
        self._last: Reading | None = None
        self._counted = False  # whether the outcomes of its requests were counted before
        self._version_known = False
        self._store_failure = ""  # why the last query of its place in a KV pool had no result

    def begin_anew(self) -> None:
        """The engine may have restarted: ask at once."""
        self.models_at = self.store_at = 0.0
        self._version_known = False

    async def list_models(self) -> None:
        """Ask the engine for its models and adapters. An engine without a list gets requests for any model."""
        now = asyncio.get_running_loop().time()
        if now < self.models_at:
            return
        self.models_at = now + MODELS_LOOK_S
        try:
            models = await self._ask.models()
        except EngineFailedError as failure:
            logger.debug("%s does not list its models: %s", self.engine.url, failure)
            return
        self.engine.models, self.engine.context_tokens = models.names, models.context_tokens
        self.engine.about = self.engine.about._replace(model=models.base)

    async def learn_version(self) -> None:
        """Ask a vLLM engine for its version, once for each start. SGLang has told it with its side."""
        if self._version_known or self.engine.kind is not Kind.VLLM:
            return
        self._version_known = True
        try:
            version = await self._ask.vllm_version()
        except EngineFailedError as failure:
            logger.debug("%s does not tell its version: %s", self.engine.url, failure)
            version = ""
        self.engine.about = self.engine.about._replace(version=version)

    async def look_for_store(self) -> None:
        """Ask an engine for its place in the KV pool of its host."""
        now = asyncio.get_running_loop().time()
        if now < self.store_at:
            return
        self.store_at = now + STORE_LOOK_S
        engine = self.engine
        try:
            report = await self._ask.store()
        except EngineFailedError as failure:
            logger.debug("%s does not report its KV pool: %s", engine.url, failure)
            if failure.cause != "timeout":  # a busy engine may be late
                engine.store, self._store_failure = None, str(failure)
            return
        if report is None:
            self.store_at, engine.store, self._store_failure = math.inf, None, _NOT_REPORTED
            return
        self._store_failure = ""
        before, engine.store = (
            engine.store,
            StorePlace(
                report.store,
                report.model,
                report.chunk_tokens,
                report.chunk_bytes,
                report.bytes_per_s,
                report.far,
            ),
        )
        if before is None or before.store != report.store:
            logger.info("%s uses %s", engine.url, engine.store.name)

    async def look_at_metrics(self) -> None:
        """Read an engine's metrics: its KV traffic; at a decode engine whether KV arrives, and the outcomes of requests."""
        now = asyncio.get_running_loop().time()
        if now < self.metrics_at:
            return
        self.metrics_at = now + METRICS_LOOK_S
        engine = self.engine
        try:
            warning, handoffs, reading = await self._ask.arrivals()
        except EngineFailedError as failure:
            logger.debug("%s does not answer /metrics: %s", engine.url, failure)
            # Health checks wait for the answer, so a slow engine is asked less often.
            self.metrics_at = now + SLOW * METRICS_LOOK_S
            engine.traffic = Traffic()
            return
        engine.traffic, moved = between(self._last, reading)
        self._last = reading
        engine.metrics.pulse.moved(reading.at_s, moved)
        problem = self._store_failure if engine.traffic.uses_pool else ""
        unread = unread_in(reading.totals)
        engine.about = engine.about._replace(pool_problem=problem, weights=unread)
        if not engine.serves(Role.DECODE):
            engine.warning = ""
            return
        self._count(handoffs, reading.at_s)
        # vLLM without log statistics has no metrics at all, and says nothing of its connector.
        silent = engine.kind is Kind.VLLM and reading.cache_used is not None and not reading.totals
        if silent and self._prefills():
            warning = _HAS_NONE
        warning = _TAKES_NONE if engine.only_produces else warning
        if warning and not engine.warning:
            logger.warning("%s (decode): %s", engine.url, warning)
        engine.warning = warning

    def _count(self, handoffs: dict[str, int], now_s: float) -> None:
        """Take the engine's outcomes of handoffs since its start, and count the new outcomes. At the first call none
        counts as new: they may be older than the minutes that the live page shows."""
        engine = self.engine
        for outcome, count in handoffs.items():
            before = engine.handoffs.get(outcome, 0)
            new = count - before if count >= before else count  # lower: the engine has restarted
            labels = (outcome, "") if outcome in OUTCOMES else ("recomputed", outcome)
            if engine.metrics.first_worker:
                engine.metrics.handoffs.labels(*labels).inc(new)
            if new and self._counted:
                engine.metrics.pulse.ended(now_s, {labels[0]: new})
        engine.handoffs, self._counted = handoffs, True


_NOT_REPORTED = (
    "its API server does not report the KV pool that it uses. "
    "What to do: start it with --middleware scheduler_plugins.vllm.PoolMiddleware"
)

_TAKES_NONE = (
    "it is a decode engine, and its kv_role is kv_producer, so it takes no KV. "
    "What to do: start it with kv_role kv_consumer or kv_both, or name it with --prefill"
)

_HAS_NONE = (
    "it is a decode engine without PDConnector, so it computes every prompt that a prefill engine has computed for it. "
    "What to do: start it with PDConnector and kv_role kv_consumer or kv_both"
)
