# SPDX-License-Identifier: Apache-2.0
"""One rank: an agent with a small cache whose every byte is known to both sides, and the faults that a process does
to itself. It obeys calls (`bench/party.py`)."""

import contextlib
import os
import random
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pd_connector.agent import turn_watch
from pd_connector.agent.agent import Agent
from pd_connector.agent.inbox import Inbox
from pd_connector.config import Config
from pd_connector.errors import Cause
from pd_connector.kv.geometry import Geometry, Group, Shard
from pd_connector.pages.layer import LayerPages
from pd_connector.pages.paged_cache import PagedCache
from pd_connector.protocol.incoming import Finished, Load, PlaceChunk
from pd_connector.protocol.outgoing import Free, Offer
from pd_connector.protocol.peers import Peer, Source
from pd_connector.tools.bench.chaos.connections import reset_connections, silence_connections
from pd_connector.tools.bench.chaos.faults import PAGES, Fault
from pd_connector.tools.bench.chaos.liar import Liar
from pd_connector.tools.bench.chaos.tampering import Tampering, TamperingTransport
from pd_connector.transport.base import Transport

LAYERS, HEADS, DIM, PAGE_SIZE = 4, 4, 32, 16
ENGINE, MODEL = "chaos", b"model"
_SPARE_DESCRIPTORS = 2


class ChaosAgent:
    """Its public methods are the calls.

    Args:
        produces: whether it is a producer; otherwise it is a consumer.
        tp_rank: which part of the heads it holds.
        tp_size: into how many parts they are cut.
        config: of the agent.
        seed: of what it draws.
        credulous: whether chunks with a wrong checksum are taken: the bench must notice that.
    """

    def __init__(
        self,
        *,
        produces: bool,
        tp_rank: int,
        tp_size: int,
        config: dict[str, Any],
        seed: int,
        credulous: bool = False,
    ) -> None:
        torch.set_num_threads(1)
        layers = tuple(range(LAYERS))
        group = Group("attention", layers, HEADS, DIM, DIM, PAGE_SIZE, 0, "float32", "chaos", True)
        self._shard = Shard(0, LAYERS, tp_rank, tp_size)
        self._geometry = Geometry(self._shard, (group,))
        self._wanted = [_content(number, self._shard) for number in layers]
        self._layers = [w.clone() if produces else torch.zeros_like(w) for w in self._wanted]
        views = {number: _view(layer) for number, layer in enumerate(self._layers)}
        self._config = Config.load(config)
        self._tampering = Tampering(seed)
        self._clock = _Clock()
        turn_watch.time = self._clock  # type: ignore[attr-defined,assignment]
        self._agent = Agent(
            self._config,
            ENGINE,
            MODEL,
            PagedCache(views, self._geometry),
            produces=produces,
            consumes=not produces,
            shards=tuple(Shard(0, LAYERS, rank, tp_size) for rank in range(tp_size)),
            wrap=self._wrap,
        )
        if credulous:
            side = self._agent._loop.consumer_side
            assert side is not None
            side._inbox.__class__ = _CredulousInbox
        self._loading: dict[str, tuple[list[int], list[int]]] = {}
        self._hoard: list[int] = []
        self._random = random.Random(seed)

    def ready(self) -> int:
        """The agent's control port."""
        return self._agent.port

    def offer(self, transfers: Sequence[tuple[str, list[int]]]) -> None:
        """Offer pages, by transfer. The prefill has ended."""
        for name, pages in transfers:
            tokens = len(pages) * PAGE_SIZE
            offer = Offer(name, name, (pages,), name.encode(), tokens, tokens, final=True)
            self._agent.submit(offer)

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
            host: of all ranks of the producer.
            ports: of these, by rank.
            wait: whether the prefill may not have begun.
        """
        peers = tuple(
            Peer(Source(host, port, ENGINE), Shard(0, LAYERS, rank, len(ports)))
            for rank, port in enumerate(ports)
        )
        for name, theirs, ours in transfers:
            for layer in self._layers:
                layer[ours] = 0
            self._loading[name] = theirs, ours
            stop = len(ours) * PAGE_SIZE
            load = Load(name, name, peers, name.encode(), 0, stop, (ours,), wait)
            self._agent.submit(load)

    def outcomes(self, within_s: float) -> list[tuple[str, str, bool]]:
        """Ends since the last call: name, cause, and whether all pages are right (of a producer, true).
        Waits for the first one."""
        deadline = time.monotonic() + within_s
        while True:
            found = [self._judged(one) for one in self._agent.outcomes()]
            if found or time.monotonic() > deadline:
                return [one for one in found if one is not None]
            time.sleep(0.0005)

    def arm(self, fault: str, count: int, share: float) -> None:
        self._tampering.arm(Fault(fault), count, share)

    def disarm(self) -> int:
        return self._tampering.disarm()

    def reset(self) -> int:
        return reset_connections()

    def silence(self) -> int:
        return silence_connections()

    def lie(self, host: str, port: int, names: Sequence[str], count: int) -> int:
        """Send messages to a producer that fit the schema and are not true; returns how many it
        has received."""
        with Liar(host, port, self._geometry, self._random) as liar:
            return liar.tell(names, count)

    def exhaust(self) -> int:
        """Use up all descriptors but a few; returns how many were taken."""
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
        """Slots, pages and transfers that are not free, by name."""
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
        return TamperingTransport(transport, self._tampering)

    def _judged(self, outcome: object) -> tuple[str, str, bool] | None:
        match outcome:
            case Finished():
                theirs, ours = self._loading.pop(outcome.request)
                right = all(
                    torch.equal(layer[ours], wanted[theirs])
                    for layer, wanted in zip(self._layers, self._wanted, strict=True)
                )
                return outcome.request, outcome.cause or "", right
            case Free():
                return outcome.request, outcome.cause or "", True
            case _:
                return None


class _CredulousInbox(Inbox):
    """Takes what it should refuse: with it the bench has to find wrong pages."""

    def place(self, place: PlaceChunk, path: Any) -> tuple[Cause | None, str]:
        cause, detail = super().place(place, path)
        return (None, "") if cause is Cause.CHECKSUM else (cause, detail)


class _Clock:
    """Stands for the module `time` in the agent's thread."""

    def __init__(self) -> None:
        self.offset_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.offset_s

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def _content(layer: int, shard: Shard) -> torch.Tensor:
    """`[page, head, token, K and V]`: what the producer's rank with this shard holds."""
    numbers = torch.Generator().manual_seed(layer)
    whole = torch.randn((PAGES, HEADS, PAGE_SIZE, 2 * DIM), generator=numbers)
    heads = shard.heads(HEADS)
    return whole[:, heads.start : heads.stop].contiguous()


def _view(layer: torch.Tensor) -> LayerPages:
    rows = layer.view(torch.uint8).flatten(2)
    return LayerPages(layer[..., :DIM], layer[..., DIM:], (rows,))
