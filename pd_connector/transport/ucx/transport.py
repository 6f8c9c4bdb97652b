# SPDX-License-Identifier: Apache-2.0
"""The transport that moves chunks as tagged messages of UCX, through ucxx: over RDMA where there is any, else over
shared memory or TCP.

A chunk is one message under the producer's tag. The producer copies it once; it arrives in memory of its own, and the
slot that it names is only a credit. Messages are sent eagerly (UCX's term): a peer never fetches from our memory,
so nothing reads the source of a write that was given up.

UCX neither encrypts nor authenticates, and C code parses its addresses. Anything that reaches its port can do
harm. Outside of loopback the network between the engines must be trusted, with a key or without.
"""

import contextlib
import importlib
import itertools
import os
import secrets
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from pd_connector.errors import TransportError
from pd_connector.hosts import is_loopback
from pd_connector.transport.base import Landed, Link, Transport, TransportParts, Written
from pd_connector.transport.ucx.address import (
    OVERHEAD_BYTES,
    TAG_BITS,
    UcxAddress,
    make_message,
    read_address,
    read_message,
)
from pd_connector.transport.ucx.worker import Move, UcxWorker, UcxWorkers


def import_ucxx() -> tuple[Any, Any]:
    """ucxx's core, and what wraps its buffers. Raises TransportError if it is not installed."""
    before = set(os.environ)
    try:
        with contextlib.suppress(ModuleNotFoundError):  # a UCX of the system needs no help
            # ucxx does this only where librmm is installed, which host memory has no need of.
            importlib.import_module("libucx").load_library()
        from ucxx._lib import libucxx
        from ucxx._lib.arr import Array
    except ImportError as error:
        raise TransportError(
            f"transport ucx: {error}. Install it with `pip install 'pd-connector[ucx]'`, or "
            "take it out of the config key transports"
        ) from error
    finally:
        # The import sets UCX's variables, which other users of UCX in this process would inherit.
        for name in set(os.environ) - before:
            del os.environ[name]
    return libucxx, Array


_MAX_BATCH = 64  # messages taken from one producer at a time
_DIALLING_POLLS = 100
"""Within this time a dial that is refused at once has failed. A dial that is refused later breaks its link."""


@dataclass(slots=True)
class _Consumer:
    worker: UcxWorker
    endpoint: Any
    writes: dict[int, Move] = field(default_factory=dict)  # by token
    has_failed: bool = False

    @property
    def alive(self) -> bool:
        # UCX does not always report a failed endpoint: then every write fails.
        return self.endpoint.alive and not self.has_failed


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
        self._closed = False
        self._api, self._array = import_ucxx()
        options = {
            "RNDV_THRESH": "inf",
            # A peer's process that has died without a word is noticed within some seconds.
            "KEEPALIVE_INTERVAL": "2s",
            # Otherwise this thread waits for every dial, and UCX forgets that one was refused while the
            # endpoint was made: it is written to all the same, and the process dies (1.21).
            "TCP_CONN_NB": "y",
        }
        if is_loopback(host):
            options["NET_DEVICES"] = "lo"
        try:
            self._workers = UcxWorkers(self._api, self._array, options)
        except Exception as error:
            raise TransportError(
                f"ucx worker cannot be made: {error!r}; `pd-connector doctor` shows UCX's devices"
            ) from error

    @classmethod
    def make(cls, parts: TransportParts) -> Self:
        return cls(parts.config.slot_bytes, parts.config.host)

    def address(self) -> bytes:
        """See `Transport.address`. If UCX does not listen any more, this is the address of a new worker. The previous
        worker stays for the peers that have a session over it."""
        self._workers.renew_if_spent()
        return msgspec.msgpack.encode(UcxAddress(self._workers.current.address, self._tag))

    def connect(self, consumer: bytes) -> Link:
        address = read_address(consumer)
        try:
            self._workers.renew_if_worn()
            worker = self._workers.current
            theirs = self._api.UCXAddress.create_from_buffer(address.worker)
            endpoint = self._api.UCXEndpoint.create_from_worker_address(worker.worker, theirs, True)
            for _ in range(_DIALLING_POLLS):
                worker.worker.progress()
            endpoint.raise_on_error()
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
        gone = "ucx write: the consumer was disconnected"
        self._written += [Written(token, False, gone) for token in consumer.writes]
        consumer.worker.cancel(consumer.writes.values())
        with contextlib.suppress(Exception):  # it may have failed by itself
            consumer.endpoint.close_blocking()
        self._workers.leave(link)

    def broken(self, link: Link) -> bool:
        assert isinstance(link, int)
        consumer = self._links.get(link)
        return consumer is not None and not consumer.alive

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
        for worker in self._workers:
            worker.forsake(tag)

    def write(self, link: Link, header: bytes, payload: memoryview, slot: int) -> int:
        assert isinstance(link, int)
        consumer = self._links.get(link)
        if consumer is None:
            raise TransportError("ucx transport: no such consumer (any more)")
        if not consumer.alive:
            raise TransportError("ucx write: the consumer is gone")
        buffer = make_message(header, payload, slot)
        try:
            tag = self._api.UCXXTag(self._tag)
            request = consumer.endpoint.tag_send(self._array(buffer), tag)
        except Exception as error:
            consumer.has_failed = True
            raise TransportError(f"ucx write cannot start: {error!r}") from error
        token = next(self._numbers)
        consumer.writes[token] = Move(request, buffer)
        return token

    def poll(self) -> tuple[list[Written], list[Landed]]:
        if self.restless:
            self._workers.progress()
        for tag in Counter(self._expected.values()):
            self._match(tag)
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
        return bool(self._links or self._expected)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for link in list(self._links):
            self.disconnect(link)
        for source in list(self._expected):
            self.dismiss(source)
        self._workers.close()

    def _match(self, tag: int) -> None:
        """Receive the messages that wait under this tag."""
        for worker in self._workers:
            self._match_at(worker, tag)

    def _match_at(self, worker: UcxWorker, tag: int) -> None:
        # Whatever UCX does not take, the peer's session ends because of that.
        with contextlib.suppress(Exception):
            for _ in range(_MAX_BATCH):
                if not worker.receive(tag, self._max_bytes):
                    return

    def _end_writes(self, consumer: _Consumer) -> None:
        if not consumer.writes:
            return
        is_alive = consumer.alive
        for token, move in list(consumer.writes.items()):
            if move.request.completed:
                problem = move.problem
            elif not is_alive:
                problem = "the consumer is gone"
                consumer.worker.cancel([move])
            else:
                continue
            del consumer.writes[token]
            consumer.has_failed |= bool(problem)
            problem = f"ucx write: {problem}" if problem else ""
            self._written.append(Written(token, not problem, problem))

    def _end_arrivals(self) -> list[Landed]:
        landed: list[Landed] = []
        for worker in self._workers:
            ended = worker.arrived()
            arrivals = [read_message(move.buffer) for move in ended if not move.problem]
            landed += [arrival for arrival in arrivals if arrival]
        return landed
