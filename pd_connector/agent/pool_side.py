# SPDX-License-Identifier: Apache-2.0
"""The pool's part of a rank's agent: it saves computed chunks into the pool, and loads chunks from it.

Only the agent's thread touches pages. Threads of the pool read and write files. Buffers of this rank hold the chunks in
between.
"""

import queue
import time
from collections.abc import Callable
from typing import Any

import torch

from pd_connector.agent.page_gate import PageGate
from pd_connector.agent.pending_outcomes import Outcome
from pd_connector.agent.pool_loads import ChunkLoads
from pd_connector.agent.pool_saves import ChunkSaves, writers
from pd_connector.kv.model import ModelFacts
from pd_connector.pages.paged_cache import PagedCache
from pd_connector.pool.codecs import PoolCodecs
from pd_connector.pool.jobs import Fill, Save
from pd_connector.pool.loader import Loader
from pd_connector.pool.record import Writer
from pd_connector.pool.saver import Saver
from pd_connector.pool.store.base import Store
from pd_connector.pool.trust import WriterTrust
from pd_connector.telemetry import Telemetry


def accelerator(device: torch.device) -> str:
    """The engine's processor type, for writers' names: different types compute the same KV with different last bits."""
    return str(torch.cuda.get_device_name(device) if device.type == "cuda" else device.type)


class PoolSide:
    """Used by the agent's thread only.

    Args:
        cache: the rank's pages.
        wake: makes the thread take another turn; for any thread.
        facts: the model that the engine serves.
        store: keeps the chunks.
        trust: the writers whose chunks this engine uses.
        writer: this engine's name in records of chunks.
        codecs: the codecs that this engine uses.
        parts: number of the engine's ranks.
        gate: the engine's thread shuts it for requests whose pages must not be touched.
        report: takes every outcome.
        experts: the model is a mixture of experts (`Comparison`).
    """

    def __init__(
        self,
        cache: PagedCache,
        telemetry: Telemetry,
        wake: Callable[[], None],
        facts: ModelFacts,
        store: Store,
        trust: WriterTrust,
        writer: Writer,
        codecs: PoolCodecs,
        parts: int,
        gate: PageGate,
        report: Callable[[Outcome], None],
        *,
        experts: bool = False,
    ) -> None:
        self._wake, self._store, self._telemetry = wake, store, telemetry
        self._facts = facts
        self._trust = trust
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        saver = Saver(store, cache.geometry, writer, parts)
        loader = Loader(store, cache.geometry, codecs.readable)
        self._saves = ChunkSaves(
            cache, gate, saver, codecs.at_rest, writers(parts), telemetry, report, self._then
        )
        self._loads = ChunkLoads(
            cache, gate, loader, trust, telemetry, report, self._then, experts=experts
        )

    @property
    def waits_for_device(self) -> bool:
        """Whether saves wait until the engine's device has computed their pages."""
        return self._saves.waits_for_device

    @property
    def device_done(self) -> bool:
        """Whether the first of these saves can begin."""
        return self._saves.device_done

    @property
    def due_s(self) -> float:
        """When `tick` must be called at the latest, in seconds, monotonic."""
        return min(self._loads.due_s, self._saves.due_s)

    def change_model(self, facts: ModelFacts) -> None:
        """The engine serves other weights from now on."""
        self._facts = facts
        self._trust.forget()

    def know_weights(self, facts: ModelFacts) -> None:
        """All bytes of the engine's weights have been read now."""
        self._facts = facts

    def execute(self, command: Save | Fill, fence: Any) -> None:
        """Begin a save or a load."""
        if isinstance(command, Save):
            self._saves.add(command, fence)
            self._saves.begin(self._facts)
        else:
            self._loads.begin(command, fence, self._facts)

    def tick(self) -> None:
        """Continue saves and loads for which a thread or the device has done its work."""
        while not self._done.empty():
            self._done.get()()
        for (tier, cause), number in self._store.take_failures().items():
            self._telemetry.count("pool_unwritten", number, tier=tier, cause=cause)
        self._saves.begin(self._facts)
        if time.monotonic() >= self._loads.due_s:
            self._loads.tick()

    def close(self) -> None:
        """End the threads. Reads are dropped. Writes are finished if the store is quick."""
        self._saves.close()
        self._loads.close()

    def _then(self, work: Callable[[], None]) -> None:
        """Have the agent's thread do this work. The threads call it."""
        self._done.put(work)
        self._wake()
