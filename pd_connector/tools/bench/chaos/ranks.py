# SPDX-License-Identifier: Apache-2.0
"""The ranks of a producer and a consumer engine over one transport, as their launcher sees them."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, NamedTuple, Self

import zmq

from pd_connector.tools.bench.chaos.faults import SETTINGS
from pd_connector.tools.bench.chaos.nursery import START_S, Nursery
from pd_connector.tools.bench.wire.pair import PartyProcess
from pd_connector.tools.launch.netns import Namespace


class Setup(NamedTuple):
    """What is joined, and how. `config` is added to `SETTINGS`."""

    name: str
    config: Mapping[str, Any]
    tp: int = 1


SETUPS = {
    setup.name: setup
    for setup in (
        Setup("shm", {"transports": ["shm"]}),
        Setup("shm slots", {"transports": ["shm"], "direction": "read"}),
        Setup("shm writes", {"transports": ["shm"], "direction": "write"}),
        Setup("tcp", {"transports": ["tcp"]}),
        Setup("nixl", {"transports": ["nixl"]}),
        Setup("ucx", {"transports": ["ucx"]}),
        Setup("shm TP 2", {"transports": ["shm"]}, tp=2),
        Setup("shm slots TP 2", {"transports": ["shm"], "direction": "read"}, tp=2),
        Setup("tcp TP 2", {"transports": ["tcp"]}, tp=2),
    )
}


class Ranks:
    """All processes, while inside the `with` block.

    Args:
        setup: what is joined.
        seed: of what the ranks draw.
        nursery: starts them.
        credulous: whether consumers take chunks with a wrong checksum.
        namespaces: where producers and consumers run; empty for here.
        key: shared secret, wanted with namespaces.

    Raises:
        BenchError: on entry and later, when a process ends unasked, or does not answer.
    """

    def __init__(
        self,
        setup: Setup,
        seed: int,
        nursery: Nursery,
        *,
        credulous: bool = False,
        namespaces: Sequence[Namespace] = (),
        key: str = "",
    ) -> None:
        self.setup = setup
        self._seed = seed
        self._nursery = nursery
        self._credulous = credulous
        self._namespaces = namespaces
        self._key = key
        self._started = 0
        self.hosts = [one.address for one in namespaces] or ["127.0.0.1"] * 2
        self.producers: list[PartyProcess] = []
        self.consumers: list[PartyProcess] = []
        self.ports: list[int] = []

    @property
    def all(self) -> list[PartyProcess]:
        return [*self.producers, *self.consumers]

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            stack.callback(self._context.destroy, linger=0)
            stack.callback(self._kill)
            self.producers = [self._start(True, rank) for rank in range(self.setup.tp)]
            self.consumers = [self._start(False, rank) for rank in range(self.setup.tp)]
            self.ports = [one.call("ready", START_S) for one in self.producers]
            for one in self.consumers:
                one.call("ready", START_S)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def restart(self, process: PartyProcess) -> None:
        """Kill a process, and start another in its place."""
        process.family.kill()
        for side, produces in ((self.producers, True), (self.consumers, False)):
            if process in side:
                rank = side.index(process)
                side[rank] = self._start(produces, rank)
                port = side[rank].call("ready", START_S)
                if produces:
                    self.ports[rank] = port

    def _start(self, produces: bool, rank: int) -> PartyProcess:
        self._started += 1
        namespace = self._namespaces[0 if produces else 1] if self._namespaces else None
        config = {**SETTINGS, **self.setup.config, "host": self.hosts[0 if produces else 1]}
        settings = {
            "produces": produces,
            "tp_rank": rank,
            "tp_size": self.setup.tp,
            "config": config | ({"key": self._key} if self._key else {}),
            "seed": self._seed + self._started,
            "credulous": self._credulous and not produces,
        }
        return self._nursery.start(self._context, settings, namespace)

    def _kill(self) -> None:
        for process in self.all:
            process.family.kill()
