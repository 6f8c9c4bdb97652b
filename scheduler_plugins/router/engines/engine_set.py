# SPDX-License-Identifier: Apache-2.0
"""Operations on several engines: pauses, costs of peers, sums of outcomes."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable

from scheduler_plugins.router.engines.engine import BackendEngine, Role
from scheduler_plugins.router.engines.failures import EngineFailedError
from scheduler_plugins.router.metrics import Metrics

logger = logging.getLogger(__name__)


def note_circuit(engine: BackendEngine, failure: EngineFailedError, metrics: Metrics) -> None:
    """Note that an engine which answers failed a request. After several failures in a row it gets a pause."""
    if failure.cause == "unhealthy":
        return  # it is down already, and its next process has failed nothing
    if engine.circuit.failed(failure.cause, asyncio.get_running_loop().time()):
        metrics.circuit_opened.labels(engine.url, failure.cause).inc()
        engine.paused_for.add(failure.cause)
        logger.warning("%s gets a pause: it failed again and again: %s", engine.url, failure)


def assume_costs(engine: BackendEngine, engines: Iterable[BackendEngine]) -> None:
    """If a prefill engine's costs are unknown, assume the costs of its peers among `engines`."""
    if not engine.hands_over or engine.knows_prefill:
        return
    peers = [
        peer.costs
        for peer in engines
        if peer.knows_prefill
        and peer.hands_over
        and peer.serves(Role.CPU_PREFILL) is engine.serves(Role.CPU_PREFILL)
        and peer.models == engine.models
    ]
    if peers:
        engine.assume(peers)


def handoffs_of(engines: Iterable[BackendEngine]) -> dict[str, int]:
    """Outcomes of requests to pairs, summed over the reports of all decode engines since their starts."""
    outcomes = Counter[str]()
    for engine in engines:
        outcomes.update(engine.handoffs)
    return dict(outcomes)
