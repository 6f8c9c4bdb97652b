# SPDX-License-Identifier: Apache-2.0
"""One rank: an agent with a small cache, of which both sides know every byte, and the faults of its own process. It
obeys calls (`bench/party.py`)."""

import contextlib
import os
import random
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from chaos.blind import blind
from chaos.connections import reset_connections, silence_connections
from chaos.engine import Engine
from chaos.faults import Fault
from chaos.known import LAYERS, STATE_LAYERS, KnownPages
from chaos.liar import Liar
from chaos.seam import TamperingTransport
from chaos.tampering import Tampering
from pd_connector.agent import agent_thread
from pd_connector.agent.agent import Agent
from pd_connector.config import Config
from pd_connector.kv.geometry import Shard
from pd_connector.kv.model import ModelFacts
from pd_connector.protocol.wire.peers import Peer, Source
from pd_connector.transport.base import Transport

ENGINE, MODEL = "chaos", ModelFacts(b"config", b"weights")
_SPARE_DESCRIPTORS = 2


class ChaosAgent:
    """Its public methods are the calls.

    Args:
        produces: whether it is a producer; otherwise it is a consumer.
        tp_rank: number of its part of the heads.
        tp_size: number of parts of the heads.
        config: the agent's config.
        seed: seed of its random choices.
        wired: whether a faulty network lies between it and its producers.
        blind_to: the guard that is taken off (`blind`). The bench must notice that.
        states: whether its model has layers of states as well.
    """

    def __init__(
        self,
        *,
        produces: bool,
        tp_rank: int,
        tp_size: int,
        config: dict[str, Any],
        seed: int,
        wired: bool = False,
        blind_to: str = "",
        states: bool = False,
    ) -> None:
        torch.set_num_threads(1)
        blind(blind_to)
        self._layers = STATE_LAYERS.stop if states else LAYERS
        shard = Shard(0, self._layers, tp_rank, tp_size)
        pages = KnownPages(shard, filled=produces, states=states)
        self._geometry = pages.geometry
        self._wired = wired
        self._key = config.get("key", "")
        self._tampering = Tampering(seed)
        self._clock = _Clock()
        agent_thread.time = self._clock  # type: ignore[attr-defined,assignment]
        self._agent = Agent(
            Config.load(config),
            ENGINE,
            MODEL,
            pages.cache,
            produces=produces,
            consumes=not produces,
            shards=tuple(Shard(0, self._layers, rank, tp_size) for rank in range(tp_size)),
            wrap=self._wrap,
        )
        self._engine = Engine(self._agent, pages, self._tampering)
        self._hoard: list[int] = []
        self._random = random.Random(seed)

    def ready(self) -> int:
        """The agent's control port."""
        return self._agent.port

    def offer(self, transfers: Sequence[tuple[str, list[int]]], final: bool = True) -> None:
        """Offer pages, by transfer. If the prefill has not ended, offer half of them."""
        for name, pages in transfers:
            self._engine.offer(name, pages, final=final)

    def load(
        self,
        transfers: Sequence[tuple[str, list[int], list[int]]],
        host: str,
        ports: Sequence[int],
        wait: bool,
    ) -> None:
        """Fetch transfers.

        Args:
            transfers: name, the producer's pages, the pages to fill.
            host: host of all ranks of the producer.
            ports: their ports, by rank.
            wait: whether the prefill may still have to begin.
        """
        peers = tuple(
            Peer(Source(host, port, ENGINE), Shard(0, self._layers, rank, len(ports)))
            for rank, port in enumerate(ports)
        )
        for name, theirs, ours in transfers:
            self._engine.load(name, peers, theirs, ours, wait=wait)

    def outcomes(self, within_s: float) -> list[tuple[str, str, bool]]:
        """Ends since the last call: name, cause, and whether all pages are right (always true for a producer). Waits
        for the first one."""
        deadline = time.monotonic() + within_s
        while not (found := self._engine.outcomes()) and time.monotonic() <= deadline:
            time.sleep(0.0005)
        return found

    def take_back(self, names: Sequence[str]) -> int:
        """The engine takes back the pages of these transfers if it still has them. Returns the number of transfers."""
        return sum(self._engine.take_back(name) for name in names)

    def spoilt(self) -> int:
        """The number of taken-back transfers whose pages the agent has written since. They are then forgotten."""
        return self._engine.restore()

    def arm(self, fault: str, count: int, share: float) -> None:
        self._tampering.arm(Fault(fault), count, share)

    def disarm(self) -> int:
        return self._tampering.disarm()

    def paths(self) -> dict[str, int]:
        """Chunks by their way, since the start (`TamperingTransport`)."""
        return dict(self._tampering.paths)

    def reset(self) -> int:
        return reset_connections()

    def silence(self) -> int:
        return silence_connections()

    def lie(self, host: str, port: int, names: Sequence[str], count: int) -> int:
        """Send a producer messages that fit the schema and are false. Returns the number received."""
        with Liar(host, port, self._geometry, self._random, self._key) as liar:
            return liar.tell(names, count)

    def exhaust(self) -> int:
        """Use up all descriptors except a few. Returns the number taken."""
        limit = len(os.listdir("/proc/self/fd")) + 256
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )
        with contextlib.suppress(OSError):
            while True:
                self._hoard.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(_SPARE_DESCRIPTORS):
            os.close(self._hoard.pop())
        return len(self._hoard)

    def relieve(self) -> None:
        """Undo `exhaust`."""
        for descriptor in self._hoard:
            os.close(descriptor)
        self._hoard.clear()
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    def jump(self, seconds: float) -> None:
        """The agent's clock goes forward, as on a machine that was suspended."""
        self._clock.offset_s += seconds

    def held(self) -> dict[str, float]:
        """Numbers of slots, pages and transfers that are not free, by name."""
        names = (
            "leased_pages",
            "outgoing_transfers",
            "incoming_transfers",
            "landing_slots",
            "send_slots",
        )
        gauges = self._agent.telemetry.gauges()
        return {name: gauges[name] for name in names if gauges.get(name)}

    def census(self) -> tuple[int, int, int]:
        """Open descriptors, threads, and memory in KiB."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return (
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
            pages * resource.getpagesize() >> 10,
        )

    def _wrap(self, transport: Transport) -> Transport:
        return TamperingTransport(transport, self._tampering, wired=self._wired)


class _Clock:
    """Replaces the module `time` in the agent's thread."""

    def __init__(self) -> None:
        self.offset_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.offset_s

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)
