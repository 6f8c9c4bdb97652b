# SPDX-License-Identifier: Apache-2.0
"""The ranks of a producer and a consumer engine over one transport, as their launcher sees them."""

import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Self

import zmq

from chaos.faults import SETTINGS
from chaos.nursery import START_S, Nursery
from pd_bench.netns import Namespace
from pd_bench.wire.pair import PartyProcess


class Setup(NamedTuple):
    """The ranks of a transfer, and their settings.

    Attributes:
        config: additions to `settings`.
        tp: ranks of the producer.
        consumers: ranks of the consumer; 0: the same number.
        keyed: whether they share a key.
        states: whether the model has layers of states as well.
    """

    name: str
    config: Mapping[str, Any]
    tp: int = 1
    consumers: int = 0
    keyed: bool = False
    settings: Mapping[str, Any] = SETTINGS
    states: bool = False

    @property
    def has_records(self) -> bool:
        """Whether chunks travel as records of `tcp`."""
        return "tcp" in self.config.get("transports", ())


_TCP: dict[str, Any] = {"transports": ["tcp"]}
_INT8 = {"codec": "int8"}

SETUPS = {
    setup.name: setup
    for setup in (
        Setup("tcp", _TCP),
        Setup("tcp key", _TCP, keyed=True),
        Setup("tcp int8", _TCP | _INT8),
        Setup("tcp int8 key", _TCP | _INT8, keyed=True),
        Setup("tcp TP 2", _TCP, tp=2),
        Setup("tcp TP 2 key", _TCP, tp=2, keyed=True),
        Setup("tcp TP 2 int8", _TCP | _INT8, tp=2),
        Setup("tcp TP 2 int8 key", _TCP | _INT8, tp=2, keyed=True),
        Setup("tcp TP 1 to 2 key", _TCP, consumers=2, keyed=True),
        Setup("shm", {"transports": ["shm"]}),
        Setup("shm slots", {"transports": ["shm"], "direction": "read"}),
        Setup("shm writes", {"transports": ["shm"], "direction": "write"}),
        Setup("shm int8", {"transports": ["shm"]} | _INT8),
        Setup("nixl", {"transports": ["nixl"]}),
        Setup("ucx", {"transports": ["ucx"]}),
        Setup("shm TP 2", {"transports": ["shm"]}, tp=2),
        Setup("shm slots TP 2", {"transports": ["shm"], "direction": "read"}, tp=2),
        Setup("shm states", {"transports": ["shm"]}, states=True),
        Setup("tcp states", _TCP, states=True),
        Setup("tcp states TP 2 to 1 key", _TCP, tp=2, consumers=1, keyed=True, states=True),
    )
}


class Ranks:
    """All processes, while inside the `with` block.

    Args:
        setup: the ranks and their settings.
        seed: seed of the ranks' random choices.
        nursery: starts them.
        wired: whether a network that damages records lies between them.
        blind_to: the guard that is taken off (`blind`).
        namespaces: network namespaces of producers and consumers; empty: this process's. With namespaces, they share a
            key.

    Raises:
        BenchError: on entry and later, if a process ends unexpectedly or does not answer.
    """

    def __init__(
        self,
        setup: Setup,
        seed: int,
        nursery: Nursery,
        *,
        wired: bool = False,
        blind_to: str = "",
        namespaces: Sequence[Namespace] = (),
    ) -> None:
        self.setup = setup
        self._seed = seed
        self._nursery = nursery
        self._wired = wired
        self._blind_to = blind_to
        self._namespaces = namespaces
        self._key = secrets.token_hex(32) if setup.keyed or namespaces else ""
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
            self.consumers = [self._start(False, rank) for rank in range(self._count(False))]
            self.ports = [one.call("ready", START_S) for one in self.producers]
            for one in self.consumers:
                one.call("ready", START_S)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
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
        config = {
            **self.setup.settings,
            **self.setup.config,
            "host": self.hosts[0 if produces else 1],
        }
        settings = {
            "produces": produces,
            "tp_rank": rank,
            "tp_size": self._count(produces),
            "config": config | ({"key": self._key} if self._key else {}),
            "seed": self._seed + self._started,
            "wired": self._wired and not produces,
            "blind_to": self._blind_to,
            "states": self.setup.states,
        }
        return self._nursery.start(self._context, settings, namespace)

    def _count(self, produces: bool) -> int:
        return self.setup.tp if produces else self.setup.consumers or self.setup.tp

    def _kill(self) -> None:
        for process in self.all:
            process.family.kill()
