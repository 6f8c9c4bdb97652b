# SPDX-License-Identifier: Apache-2.0
"""One end of a transport with its slabs, as an agent would hold it, and a loop that drives ends."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from pd_connector.control.keys import CurveKeys
from pd_connector.hosts import is_loopback
from pd_connector.memory.device_slab import DeviceSlab
from pd_connector.memory.slab import Slab
from pd_connector.memory.slot_memory import NO_DEVICE_SLOTS, DeviceSlots
from pd_connector.transport.base import Transport, Written
from pd_connector.transport.shm.transport import ShmTransport
from pd_connector.transport.tcp import TcpTransport
from pd_connector.transport.tcp.connection import Pace

KEY = "a shared secret of some length"
SLOTS = 8
SLOT_BYTES = 256 * 1024
DEADLINE_S = 120.0
PACE = Pace(0.2, 60.0)
"""Nothing is silent for that long, however slow the machine."""


class Arrival(NamedTuple):
    """What landed, copied at once: the slot may be written again."""

    header: bytes
    slot: int
    payload: bytes
    problem: str = ""


class End:
    """A transport of one `kind`: shm, tcp, tcp+key, nixl or ucx.

    Args:
        key: for those with a key, the shared secret; empty for an end that has none.
        pace: heartbeats of tcp.
        on_device: for nixl, slots of the same numbers and sizes on a device; host memory stands for it.
    """

    def __init__(
        self,
        kind: str,
        *,
        key: str = KEY,
        slots: int = SLOTS,
        slot_bytes: int = SLOT_BYTES,
        pace: Pace = PACE,
        on_device: bool = False,
    ) -> None:
        made = [DeviceSlab(slots, slot_bytes, torch.device("cpu")) for _ in range(2 * on_device)]
        self.on_device = DeviceSlots(*made) if on_device else NO_DEVICE_SLOTS
        self._pace = pace
        self.kind = kind
        self.landing = Slab(slots, slot_bytes, shared=kind == "shm")
        self.sending = Slab(slots, slot_bytes, shared=kind == "shm")
        self.keys = CurveKeys.derive(key) if kind.endswith("+key") and key else None
        self.transport = self._make()
        self.written: list[Written] = []
        self.landed: list[Arrival] = []

    def send(self, route: Any, header: bytes, payload: bytes, slot: int, source: int = 0) -> int:
        """Write `payload` from the send slot `source`."""
        memory = self.sending.slot(source, len(payload))
        memory[:] = payload
        return self.transport.write(route, header, memory, slot)

    def offer(self, source: int, payload: bytes) -> int:
        """Lay `payload` into a send slot, for a consumer to read; returns its length."""
        self.sending.slot(source, len(payload))[:] = payload
        return len(payload)

    def poll(self) -> None:
        written, landed = self.transport.poll()
        self.written += written
        self.landed += [Arrival(a.header, a.slot, bytes(a.payload), a.problem) for a in landed]

    def close(self) -> None:
        self.transport.close()
        self.landing.close()
        self.sending.close()

    def _make(self) -> Transport:
        if self.kind == "shm":
            return ShmTransport(self.landing, self.sending)
        if self.kind == "nixl":
            from pd_connector.transport.nixl.transport import NixlTransport

            return NixlTransport(self.landing, self.sending, on_device=self.on_device)
        if self.kind == "ucx":
            from pd_connector.transport.ucx import UcxTransport

            return UcxTransport(self.landing.slot_bytes)
        shared = self.keys.server_secret + self.keys.client_secret if self.keys else b""
        memory = self.landing, self.sending
        return TcpTransport(*memory, "127.0.0.1", is_loopback, shared, self._pace)


def drive(*ends: End, until: Callable[[], bool]) -> None:
    """Poll the ends in turn until the condition holds; fails after DEADLINE_S."""
    deadline = time.monotonic() + DEADLINE_S
    while not until():
        assert time.monotonic() < deadline, [(e.written, len(e.landed)) for e in ends]
        for end in ends:
            end.poll()
        time.sleep(0.0005)


def meet(producer: End, consumer: End) -> tuple[Any, Any]:
    """Connect both ways; returns the producer's route and the consumer's source."""
    route = producer.transport.connect(consumer.transport.address())
    return route, consumer.transport.expect(producer.transport.address())
