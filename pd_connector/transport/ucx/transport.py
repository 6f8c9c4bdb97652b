# SPDX-License-Identifier: Apache-2.0
"""The transport that moves chunks as tagged messages of UCX, through ucxx: over RDMA where there is any, else over
shared memory or TCP.

A chunk is one message under the producer's tag. The producer copies it once; it arrives in memory of its own, and the
slot that it names is only a credit. Messages are sent eagerly (UCX's term): a peer never fetches from our memory,
so that nothing reads the source of a write that was given up.

UCX neither encrypts nor authenticates, its addresses are parsed by C code, and whoever reaches its
port can do harm: outside of loopback the network between the engines must be trusted, key or no
key. ucxx keeps the worker of a transport that had to cancel a write and was then closed, until the process ends: 5 MiB and
six descriptors each (ucxx 0.52), however many writes they were. Only an agent that is started again closes one.
"""

import contextlib
import itertools
import secrets
import time
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pd_connector.errors import TransportError
from pd_connector.hosts import is_loopback
from pd_connector.transport.base import Landed, Link, Transport, Written
from pd_connector.transport.ucx.address import (
    OVERHEAD_BYTES,
    TAG_BITS,
    Buffer,
    UcxAddress,
    make_message,
    read_address,
    read_message,
)
from pd_connector.transport.ucx.library import import_ucxx
from pd_connector.transport.ucx.worker import UcxWorker
from pd_connector.transport.ucx.workers import UcxWorkers

_MAX_BATCH = 64  # messages taken from one producer at a time
_LINGER_S = 0.2
"""How long a transport that is closed waits for its writes to end."""


class _Move(NamedTuple):
    """A message under way, with the memory that UCX uses until it has ended."""

    request: Any
    buffer: Buffer
    worker: UcxWorker
    tag: int = -1

    @property
    def problem(self) -> str:
        """What went wrong with a message that has ended, empty for nothing."""
        try:
            self.request.check_error()
        except Exception as error:  # ucxx's exceptions have no common base
            return repr(error)
        return ""


@dataclass(slots=True)
class _Consumer:
    worker: UcxWorker
    endpoint: Any
    writes: dict[int, _Move] = field(default_factory=dict)  # by token


class UcxTransport(Transport):
    """See the module.

    Args:
        slot_bytes: the most a consumer accepts in one message.
        host: what this engine listens on; UCX is kept to loopback if that is loopback.

    Raises:
        TransportError: ucxx is missing, or UCX cannot be set up.
    """

    name = "ucx"
    one_sided = False
    copies = True

    def __init__(self, slot_bytes: int, host: str = "127.0.0.1") -> None:
        self._max_bytes = slot_bytes + OVERHEAD_BYTES
        self._numbers = itertools.count(1)  # of writes, links and sources
        self._tag = secrets.randbits(TAG_BITS)
        self._links: dict[int, _Consumer] = {}
        self._written: list[Written] = []
        self._expected: dict[int, int] = {}  # source: the producer's tag
        self._arriving: list[_Move] = []
        self._abandoned: list[_Move] = []
        self._closed = False
        self._api, self._array = import_ucxx()
        # A peer's process that has died without a word is noticed within some seconds.
        options = {"RNDV_THRESH": "inf", "KEEPALIVE_INTERVAL": "2s"}
        if is_loopback(host):
            options["NET_DEVICES"] = "lo"
        try:
            self._workers = UcxWorkers(self._api, options, self._forget_moves)
        except Exception as error:
            raise TransportError(
                f"ucx worker cannot be made: {error!r}; `pd-connector doctor` shows UCX's devices"
            ) from error

    def address(self) -> bytes:
        """As the seam says. Where UCX does not listen any more, it is that of a new worker; the one
        before lives on for those that have a session over it."""
        self._workers.renew_if_deaf()
        return msgspec.msgpack.encode(UcxAddress(self._workers.current.address, self._tag))

    def connect(self, consumer: bytes) -> Link:
        address = read_address(consumer)
        try:
            self._workers.renew_if_worn()
            worker = self._workers.current
            theirs = self._api.UCXAddress.create_from_buffer(address.worker)
            endpoint = self._api.UCXEndpoint.create_from_worker_address(worker.worker, theirs, True)
        except Exception as error:
            self._workers.current.failed_dials += 1
            raise TransportError(f"ucx cannot reach the consumer: {error!r}") from error
        link = next(self._numbers)
        self._links[link] = _Consumer(worker, endpoint)
        worker.users.add(link)
        return link

    def disconnect(self, link: Link) -> None:
        assert isinstance(link, int)
        consumer = self._links.pop(link, None)
        if consumer is None:
            return
        for token, move in consumer.writes.items():
            self._written.append(Written(token, False, "ucx write: the consumer was disconnected"))
            self._abandoned.append(move)
        with contextlib.suppress(Exception):  # it may have failed by itself
            consumer.endpoint.close_blocking()
        self._workers.leave(link)

    def broken(self, link: Link) -> bool:
        assert isinstance(link, int)
        consumer = self._links.get(link)
        return consumer is not None and not consumer.endpoint.alive

    def expect(self, producer: bytes) -> Hashable:
        source = next(self._numbers)
        self._expected[source] = read_address(producer).tag
        self._workers.current.users.add(source)
        return source

    def dismiss(self, source: Hashable) -> None:
        assert isinstance(source, int)
        tag = self._expected.pop(source, None)
        if tag is not None and tag not in self._expected.values():
            self._dismiss(tag)
        self._workers.leave(source)

    def _dismiss(self, tag: int) -> None:
        """No message of this producer is expected any more."""
        # UCX itself only asks whether consumers are there. A producer that has gone without a word
        # would leave its connection, and a descriptor, for ever.
        for worker in self._workers:
            worker.keep_accepted_alive()
        # What is here already belongs to the session that ends, and not to its next one.
        self._match(tag)
        self._abandoned += [move for move in self._arriving if move.tag == tag]
        self._arriving = [move for move in self._arriving if move.tag != tag]

    def write(self, link: Link, header: bytes, payload: memoryview, slot: int) -> int:
        assert isinstance(link, int)
        consumer = self._links.get(link)
        if consumer is None:
            raise TransportError("ucx transport: no such consumer (any more)")
        buffer = make_message(header, payload, slot)
        try:
            tag = self._api.UCXXTag(self._tag)
            request = consumer.endpoint.tag_send(self._array(buffer), tag)
        except Exception as error:
            raise TransportError(f"ucx write cannot start: {error!r}") from error
        token = next(self._numbers)
        consumer.writes[token] = _Move(request, buffer, consumer.worker)
        return token

    def poll(self) -> tuple[list[Written], list[Landed]]:
        if self.restless:
            self._workers.progress()
        for tag in Counter(self._expected.values()):
            self._match(tag)
        self._abandoned = [move for move in self._abandoned if not move.request.completed]
        for consumer in self._links.values():
            self._end_writes(consumer)
        written, self._written = self._written, []
        return written, self._end_arrivals()

    @property
    def pollables(self) -> list[object]:
        return []

    @property
    def restless(self) -> bool:
        # ucxx's progress thread would be one more, and UCX's own descriptor costs it transports.
        return bool(self._links or self._expected or self._abandoned)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._let_writes_end()
        for link in list(self._links):
            self.disconnect(link)
        for source in list(self._expected):
            self.dismiss(source)
        self._workers.close()

    def _let_writes_end(self) -> None:
        """Where consumers take them, writes end at once; one that is cancelled costs memory for ever
        (see the module)."""
        deadline = time.monotonic() + _LINGER_S
        while any(c.writes for c in self._links.values()) and time.monotonic() < deadline:
            self._workers.progress()
            for consumer in self._links.values():
                self._end_writes(consumer)

    def _forget_moves(self, worker: UcxWorker) -> None:
        """This worker has ended, and with it what was under way over it."""
        self._abandoned = [move for move in self._abandoned if move.worker is not worker]
        self._arriving = [move for move in self._arriving if move.worker is not worker]

    def _match(self, tag: int) -> None:
        """Give the messages that wait under this tag memory to arrive in."""
        for worker in self._workers:
            self._match_at(worker, tag)

    def _match_at(self, worker: UcxWorker, tag: int) -> None:
        for _ in range(_MAX_BATCH):
            try:
                probe = worker.worker.tag_probe(self._api.UCXXTag(tag), remove=True)
                if not probe:
                    return
                # One that is too long is cut, fails for that, and is forgotten.
                fits = probe.length <= self._max_bytes
                buffer = np.empty(max(1, probe.length) if fits else 1, np.uint8)
                request = worker.worker.tag_recv_with_handle(self._array(buffer), probe)
            except Exception:
                # Whatever that message was, the peer's session ends for want of it.
                return
            self._arriving.append(_Move(request, buffer, worker, tag))

    def _end_writes(self, consumer: _Consumer) -> None:
        if not consumer.writes:
            return
        is_alive = consumer.endpoint.alive
        for token, move in list(consumer.writes.items()):
            if move.request.completed:
                problem = move.problem
            elif not is_alive:
                problem = "the consumer is gone"
                self._abandoned.append(move)
            else:
                continue
            del consumer.writes[token]
            problem = f"ucx write: {problem}" if problem else ""
            self._written.append(Written(token, not problem, problem))

    def _end_arrivals(self) -> list[Landed]:
        landed: list[Landed] = []
        under_way: list[_Move] = []
        for move in self._arriving:
            if not move.request.completed:
                under_way.append(move)
            elif not move.problem and (arrival := read_message(move.buffer)):
                landed.append(arrival)
        self._arriving = under_way
        return landed
