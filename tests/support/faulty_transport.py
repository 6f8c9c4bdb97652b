# SPDX-License-Identifier: Apache-2.0
"""A transport that fails on schedule, for tests of everything above the seam.

It wraps a real transport. What is not in the plan happens as the real one does it, so that no
byte moves wrongly by chance, and the same plan gives the same run.
"""

import ctypes
import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from chaos.wrapping import WrappingTransport
from pd_connector.errors import TransportError
from pd_connector.memory.destination import Destination
from pd_connector.memory.pieces import Pieces
from pd_connector.transport.base import Destinations, Landed, Link, Transport, Written

T = TypeVar("T")


@dataclass(frozen=True)
class Fail:
    """`connect`, `write` or `read` raises, and nothing is sent; a completion reports a failure; a
    read ends without its bytes."""


@dataclass(frozen=True)
class Lose:
    """It never arrives."""


@dataclass(frozen=True)
class Repeat:
    """It arrives twice."""


@dataclass(frozen=True)
class Delay:
    """It arrives `polls` polls later, and so perhaps behind its successors."""

    polls: int


@dataclass(frozen=True)
class Corrupt:
    """All bits of the payload's byte at `offset` are inverted, in a copy."""

    offset: int


@dataclass(frozen=True)
class Truncate:
    """Only the first `nbytes` bytes of the payload arrive."""

    nbytes: int


Delivery = Lose | Repeat | Delay


@dataclass(frozen=True)
class FaultPlan:
    """Which event fails, and how: by its number, from 0.

    Attributes:
        connects: calls of `connect`.
        writes: calls of `write`, and prepared writes when they are started. Those that fail count, too.
        completions: the completion of the n-th write.
        reads: calls of `read`. Those that fail count, too.
        pulls: calls of `pull`. Those that fail count, too.
        landings: chunks that landed, written or read, in the order in which the wrapped transport
            delivers them. Where bytes are to be changed, all of them land in slots.
    """

    connects: Mapping[int, Fail] = field(default_factory=dict)
    writes: Mapping[int, Fail] = field(default_factory=dict)
    completions: Mapping[int, Delivery | Fail] = field(default_factory=dict)
    reads: Mapping[int, Fail] = field(default_factory=dict)
    pulls: Mapping[int, Fail | Corrupt] = field(default_factory=dict)
    landings: Mapping[int, Delivery | Corrupt | Truncate | Fail] = field(default_factory=dict)


class FaultTransport(WrappingTransport):
    """Wraps `inner` and fails as `plan` says. Has the name and the manners of `inner`."""

    def __init__(self, inner: Transport, plan: FaultPlan) -> None:
        super().__init__(inner)
        self._plan = plan
        self._connects = 0
        self._writes = 0
        self._reads = 0
        self._pulls = 0
        self._landings = 0
        self._started: dict[int, int] = {}  # token: number of the write
        self._written: _Later[Written] = _Later()
        self._landed: _Later[Landed] = _Later()

    def connect(self, consumer: bytes) -> Link:
        number, self._connects = self._connects, self._connects + 1
        if number in self._plan.connects:
            raise TransportError(f"injected: connect {number} fails")
        return self.inner.connect(consumer)

    def write(self, link: Link, header: bytes, payload: memoryview, slot: int) -> int:
        return self._start(functools.partial(self.inner.write, link, header, payload, slot))

    def prepare(
        self, link: Link, header: bytes, pieces: Pieces, slot: int, into: memoryview
    ) -> Callable[[], int] | None:
        begin = self.inner.prepare(link, header, pieces, slot, into)
        return None if begin is None else functools.partial(self._start, begin)

    def _start(self, begin: Callable[[], int]) -> int:
        number, self._writes = self._writes, self._writes + 1
        if number in self._plan.writes:
            raise TransportError(f"injected: write {number} fails")
        token = begin()
        self._started[token] = number
        return token

    @property
    def destinations(self) -> Destinations | None:
        return self.inner.destinations

    @destinations.setter
    def destinations(self, asked: Destinations | None) -> None:
        changed = any(isinstance(one, Corrupt | Truncate) for one in self._plan.landings.values())
        self.inner.destinations = None if changed else asked

    def read(self, source: Hashable, send_slot: int, nbytes: int, slot: int, header: bytes) -> None:
        number, self._reads = self._reads, self._reads + 1
        if number in self._plan.reads:
            raise TransportError(f"injected: read {number} fails")
        self.inner.read(source, send_slot, nbytes, slot, header)

    def pull(self, source: Hashable, theirs: Pieces, ours: Pieces) -> bytes:
        number, self._pulls = self._pulls, self._pulls + 1
        fault = self._plan.pulls.get(number)
        if isinstance(fault, Fail):
            raise TransportError(f"injected: pull {number} fails")
        found = self.inner.pull(source, theirs, ours)
        if fault is None:
            return found
        piece, offset = divmod(fault.offset, ours.piece_bytes)
        ctypes.c_uint8.from_address(int(ours.addresses[piece]) + offset).value ^= 0xFF
        return ours.checksum()

    def poll(self) -> tuple[list[Written], list[Landed]]:
        written, landed = self.inner.poll()
        for completion in written:
            self._complete(completion)
        for arrival in landed:
            self._arrive(arrival)
        return self._written.take(), self._landed.take()

    @property
    def restless(self) -> bool:
        return self.inner.restless or self._written.waits or self._landed.waits

    def _complete(self, written: Written) -> None:
        number = self._started.pop(written.token)
        match self._plan.completions.get(number):
            case Fail():
                self._written.add(Written(written.token, False, f"injected: write {number} fails"))
            case fault:
                self._written.deliver(written, fault)

    def _arrive(self, landed: Landed) -> None:
        number, self._landings = self._landings, self._landings + 1
        match self._plan.landings.get(number):
            case Corrupt(offset):
                copy = bytearray(landed.payload)
                if not landed.problem:
                    copy[offset] ^= 0xFF
                self._landed.add(landed._replace(payload=memoryview(copy), verified=False))
            case Truncate(nbytes):
                part = landed.payload[:nbytes]
                self._landed.add(landed._replace(payload=part, verified=False))
            case Fail():
                problem = f"injected: landing {number} fails"
                self._landed.add(landed._replace(payload=memoryview(b""), problem=problem))
            case Delay() as delay:  # what lies in the transport's memory does not stay there
                if not isinstance(landed.payload, Destination):
                    landed = landed._replace(payload=memoryview(bytes(landed.payload)))
                self._landed.deliver(landed, delay)
            case fault:
                self._landed.deliver(landed, fault)


class _Later(Generic[T]):
    """A queue whose entries become due after a number of takes."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, T]] = []
        self._takes = 0

    @property
    def waits(self) -> bool:
        return bool(self._entries)

    def add(self, entry: T, takes: int = 0) -> None:
        self._entries.append((self._takes + takes, entry))

    def deliver(self, entry: T, fault: Delivery | None) -> None:
        match fault:
            case Lose():
                pass
            case Repeat():
                self.add(entry)
                self.add(entry)
            case Delay(polls):
                self.add(entry, polls)
            case None:
                self.add(entry)

    def take(self) -> list[T]:
        due = [entry for when, entry in self._entries if when <= self._takes]
        self._entries = [(when, entry) for when, entry in self._entries if when > self._takes]
        self._takes += 1
        return due
