# SPDX-License-Identifier: Apache-2.0
"""The thread of an SGLang rank that copies chunks out of its pages into the pool, and compares pages with chunks.

It runs the agent's part for the pool (`agent/pool_side.py`) without an agent: an SGLang engine that works alone has none.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from pd_connector.agent.commands import ChangeModel, Command, KnowWeights
from pd_connector.agent.page_gate import PageGate
from pd_connector.agent.pending_outcomes import Outcome
from pd_connector.agent.pool_side import PoolSide
from pd_connector.kv.model import ModelFacts, knowing
from pd_connector.pages.paged_cache import PagedCache
from pd_connector.pool.codecs import PoolCodecs
from pd_connector.pool.jobs import Fill, Save
from pd_connector.pool.record import Writer
from pd_connector.pool.store.base import Store
from pd_connector.pool.trust import WriterTrust
from pd_connector.telemetry import Telemetry

logger = logging.getLogger("pd_connector.sglang")

_TURN_S = 0.05
"""Longest time between two turns while saves wait for the engine's device, in seconds."""
_CLOSE_S = 5.0
"""Longest wait for the thread's end, in seconds."""


class PoolThread:
    """Starts its thread when made. All methods may be called from any thread; `report` is called from this thread.

    Args:
        cache: the rank's pages. Only this thread uses this object.
        facts: the model that the engine serves.
        parts: number of the engine's ranks.
        report: takes the end of each save and comparison.
    """

    def __init__(
        self,
        cache: PagedCache,
        telemetry: Telemetry,
        facts: ModelFacts,
        store: Store,
        trust: WriterTrust,
        writer: Writer,
        codecs: PoolCodecs,
        parts: int,
        report: Callable[[Outcome], None],
        *,
        experts: bool = False,
    ) -> None:
        self._cache = cache
        self._facts = facts
        self._gate = PageGate()
        self._report = report
        self._taken_back: set[str] = set()  # jobs that have yet to end
        self._given: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._woken = threading.Event()
        self._stopping = False
        self._side = PoolSide(
            cache,
            telemetry,
            self._woken.set,
            facts,
            store,
            trust,
            writer,
            codecs,
            parts,
            self._gate,
            self._ended,
            experts=experts,
        )
        self._thread = threading.Thread(target=self._run, name="pd-pool", daemon=True)
        self._thread.start()

    def execute(self, job: Save | Fill, fence: Any) -> None:
        """Begin a save, or a comparison. Its pages are read once the device's work before `fence` is done."""
        self._give(partial(self._side.execute, job, fence))

    def take_back(self, names: list[str]) -> None:
        """After the return no page of these jobs is read."""
        for name in names:
            self._taken_back.add(name)
            self._gate.shut(name)

    def submit(self, command: Command) -> None:
        """The weights have changed, or are known now (`WeightsWatch`)."""
        self._give(partial(self._know, command))

    def close(self) -> None:
        """End the thread. Copied chunks are written if the store takes them in time."""
        self._stopping = True
        self._woken.set()
        self._thread.join(_CLOSE_S)

    def _ended(self, outcome: Outcome) -> None:
        if outcome.request in self._taken_back:
            self._taken_back.discard(outcome.request)
            self._gate.open(outcome.request)
        self._report(outcome)

    def _give(self, work: Callable[[], object]) -> None:
        self._given.put(work)
        self._woken.set()

    def _know(self, command: Command) -> None:
        if isinstance(command, ChangeModel):
            self._facts = command.facts
            self._side.change_model(command.facts)
        elif isinstance(command, KnowWeights):
            self._facts = knowing(self._facts, command.weights, command.draft)
            self._side.know_weights(self._facts)

    def _run(self) -> None:
        self._cache.enter_thread()
        while not self._stopping:
            wait_s = max(0.0, self._side.due_s - time.monotonic())
            if self._side.waits_for_device:
                wait_s = min(wait_s, _TURN_S)
            self._woken.wait(min(wait_s, threading.TIMEOUT_MAX))
            self._woken.clear()
            try:
                while not self._given.empty():
                    self._given.get()()
                self._side.tick()
            except Exception:  # a save or comparison may be lost; the engine goes on
                logger.exception("pool: this turn of the thread that saves has failed")
        self._side.close()
