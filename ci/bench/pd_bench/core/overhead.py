# SPDX-License-Identifier: Apache-2.0
"""The Python cost of one request without its bytes: planning, and both sides' bookkeeping."""

import statistics
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from pd_connector.config import Config
from pd_connector.kv.geometry import Geometry, Group, Shard, pages_for
from pd_connector.memory.slab import SlotPool
from pd_connector.plan.route import routes
from pd_connector.protocol.consuming.audit import AuditBook
from pd_connector.protocol.consuming.consumer import Consumer
from pd_connector.protocol.consuming.incoming import Action as ConsumerAction
from pd_connector.protocol.consuming.incoming import (
    Finished,
    IncomingChunk,
    Load,
    ProducerSession,
    Tell,
)
from pd_connector.protocol.producing.outgoing import Action as ProducerAction
from pd_connector.protocol.producing.outgoing import Offer, OutgoingChunk, Reply
from pd_connector.protocol.producing.producer import Producer
from pd_connector.protocol.wire import messages
from pd_connector.protocol.wire.header import ChunkHeader
from pd_connector.protocol.wire.peers import Peer, Source

_LAYERS = 32
_TOKENS = 8192
_PAGE_TOKENS = 16
_RUNS = 50
_WARM_UPS = 10
_SOURCE = Source("127.0.0.1", 1, "")
_SESSION = b"consumer"
_NOW = 1.0

P = ParamSpec("P")
R = TypeVar("R")


def planning_overhead(*, audits: bool = False) -> tuple[float, float]:
    """CPU time of one request at the producer and at the consumer, in milliseconds.

    A request has 8,192 tokens or a few less; each has another length. The model has 32 layers of 8 KV heads x 128 in
    bfloat16, with 16 MiB slots. The time runs from offer and load to the last freed page. No bytes move, and no message
    is coded. The result is the median of 50 requests on an open session.

    Args:
        audits: whether the producer has passed an audit, which each request must find out.
    """
    pair = _LinkedMachines(AuditBook() if audits else None)
    for number in range(_WARM_UPS):
        pair.request(_TOKENS - number)
    spent = [pair.request(_TOKENS - _WARM_UPS - number) for number in range(_RUNS)]
    producer_ms, consumer_ms = (statistics.median(side) for side in zip(*spent, strict=True))
    return producer_ms, consumer_ms


class _LinkedMachines:
    """A producer and a consumer that exchange messages by calls."""

    def __init__(self, audits: AuditBook | None) -> None:
        shard = Shard(0, _LAYERS, 0, 1)
        layers = tuple(range(_LAYERS))
        group = Group(
            "attention", layers, 8, 128, 128, _PAGE_TOKENS, 0, "bfloat16", "bench", heads_apart=True
        )
        geometry = Geometry(shard, (group,))
        config = Config()
        self._routes = routes(geometry, geometry, ("raw",), ("raw",))
        self._peer = Peer(_SOURCE, shard)
        self._producer = Producer(config)
        pool = SlotPool(config.slots)
        self._consumer = Consumer(config, geometry, pool, one_sided=False, audits=audits)
        session = ProducerSession(1, config.slot_bytes, self._routes)
        if audits is not None:
            audits.passed(session.counterpart(_SOURCE, coded=True), "")
        self._consumer.session_up(_SOURCE, session, _NOW)
        self._spent_ns = {"producer": 0, "consumer": 0}
        self._finished = False
        self._slot = memoryview(bytearray(config.slot_bytes))  # one for all, never written

    def request(self, tokens: int) -> tuple[float, float]:
        """Hand one prompt over. Returns milliseconds of the producer and of the consumer."""
        self._spent_ns = {"producer": 0, "consumer": 0}
        self._finished = False
        name, pages = f"request of {tokens}", (list(range(pages_for(tokens, _PAGE_TOKENS))),)
        offer = Offer(name, name, pages, b"identity", tokens, tokens, final=True)
        load = Load(name, name, (self._peer,), b"identity", 0, tokens, pages, wait=False)
        self._produced(self._producer.offer, offer, _NOW)
        self._consumed(self._consumer.load, load, _NOW)
        while chunk := self._timed("producer", self._producer.next_send):
            self._deliver(chunk)
        assert self._finished
        assert self._producer.transfers == self._consumer.transfers == 0
        return self._spent_ns["producer"] / 1e6, self._spent_ns["consumer"] / 1e6

    def _timed(self, side: str, step: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        began = time.thread_time_ns()
        result = step(*args, **kwargs)
        self._spent_ns[side] += time.thread_time_ns() - began
        return result

    def _deliver(self, chunk: OutgoingChunk) -> None:
        planned = chunk.planned
        nbytes = self._timed("producer", planned.nbytes, chunk.route)
        header = ChunkHeader(
            chunk.transfer,
            1,
            planned.sequence,
            chunk.identity,
            planned.route,
            planned.first_layer,
            planned.stop_layer,
            planned.first_token,
            planned.stop_token,
            chunk.route.codec,
            nbytes,
            b"checksum",
        )
        self._produced(self._producer.written, _SESSION, chunk.transfer, True, "")
        payload = self._slot[:nbytes]
        self._consumed(self._consumer.landings.landed, header, chunk.slot, payload, _NOW)

    def _produced(
        self, step: Callable[P, list[ProducerAction]], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        for action in self._timed("producer", step, *args, **kwargs):
            if isinstance(action, Reply) and isinstance(action.message, messages.Accept):
                self._consumed(self._consumer.accept, _SOURCE, action.message, _NOW)

    def _consumed(
        self, step: Callable[P, list[ConsumerAction]], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        for action in self._timed("consumer", step, *args, **kwargs):
            match action:
                case IncomingChunk():
                    self._consumed(self._consumer.landings.placed, action, None, "", _NOW)
                case Tell(_, message):
                    self._produced(self._hear, message)
                case Finished(cause=None):
                    self._finished = True
                case _:
                    raise AssertionError(action)

    def _hear(self, message: messages.Message) -> list[ProducerAction]:
        match message:
            case messages.Open():
                return self._producer.open(_SESSION, message, self._routes, _NOW)
            case messages.Credit(transfer, slots):
                self._producer.credit(_SESSION, transfer, slots)
                return []
            case messages.Done(transfer):
                return self._producer.done(_SESSION, transfer)
        raise AssertionError(message)
