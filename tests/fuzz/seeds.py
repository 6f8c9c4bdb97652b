# SPDX-License-Identifier: Apache-2.0
"""Where a fuzzer begins: what two real agents have said to each other, and the frames of data paths."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import msgspec
from support.agents import KEY, LONG, TOKENS, TRANSPORTS, WHOLE, Rank, geometry_of
from support.state_caches import gdn
from support.waits import until

from fuzz import control
from fuzz.script import Kind, Step, write
from pd_connector.agent import agent as agent_module
from pd_connector.control.seal import sealed
from pd_connector.control.sockets import Connection, Listener
from pd_connector.kv.geometry import Geometry, Shard, state_group
from pd_connector.protocol.wire import messages, params
from pd_connector.protocol.wire.peers import Peer, Source
from pd_connector.transport.base import Landed, Transport, Written
from pd_connector.transport.tcp.frames import ACK, CHUNK, DATA, GREET, PING, ChunkHead, token_body

_OFFER, _LOAD, _HOLD, _DROP = 2, 6, 7, 8
_HONEST = 8
_EXTENDED = (
    Geometry(WHOLE, (*geometry_of().groups, state_group((2, 3), gdn(2, 4), table=1))),
    geometry_of(Shard(0, 2, 1, 2, 2, 1, 2), heads=1, interleave=2),
    geometry_of(state_tokens=4),
    msgspec.structs.replace(geometry_of(window=8), uncached=(0,)),
)
"""Geometries with the fields of schema 2."""


def seeds() -> list[bytes]:
    """Scripts. Each of them goes as it should in at least one target."""
    scripts: list[bytes] = []
    for name in ("shm", "shm direct", "shm written", "tcp"):
        said = [*_recorded(TRANSPORTS[name])]
        begun = [_engine(_OFFER, 0), _engine(_LOAD, 0)]
        scripts.append(write(begun + said))
        # Where a session stands already, a second greeting ends it.
        later = [one for one in said if not _greets(one)]
        scripts.append(write(begun + later))
        scripts += [write([one]) for one in said]
    scripts += [write(steps) for steps in _by_hand()]
    return list(dict.fromkeys(scripts))


def _recorded(settings: dict[str, Any]) -> Iterator[Step]:
    """What passes in one transfer, of which somebody was told before."""
    steps: list[Step] = []

    def hear(original: Callable[..., list[Any]], kind: Kind) -> Callable[..., list[Any]]:
        def receive(self: Any) -> list[Any]:
            found = original(self)
            for one in found:
                data = one[1] if isinstance(one, tuple) else one
                steps.append(Step(kind, b"\0" + data))
            return found

        return receive

    def record(transport: Transport) -> Transport:
        poll = transport.poll

        def polled() -> tuple[list[Written], list[Landed]]:
            written, landed = poll()
            for one in landed:
                first = one.slot | _HONEST | 16 * (transport.name != "shm")
                steps.append(Step(Kind.CHUNK_LANDS, bytes([first]) + one.header))
            return written, landed

        transport.poll = polled  # type: ignore[method-assign]
        return transport

    fixed = mock.patch.object(agent_module.secrets, "randbits", return_value=control.EPOCH)
    ears = (
        mock.patch.object(Listener, "receive", hear(Listener.receive, Kind.CONSUMER_SAYS)),
        mock.patch.object(Connection, "receive", hear(Connection.receive, Kind.PRODUCER_SAYS)),
    )
    with fixed, ears[0], ears[1]:
        producer = Rank(LONG | settings, consumes=False)
        consumer = Rank(LONG | settings, produces=False, seed=1, wrap=record)
        try:
            consumer.load(producer.source, "t0", [0, 1, 2, 3], wait=True)
            until(lambda: bool(producer.gauge("outgoing_transfers")), "opened")
            producer.offer("t0", [4, 5, 6, 7])
            assert consumer.loaded("t0").cause is None
            producer.freed("t0")
            until(lambda: any(b"Pulse" in step.data for step in steps), "a heartbeat")
        finally:
            consumer.agent.close()
            producer.agent.close()
    yield from steps


def _greets(step: Step) -> bool:
    return any(word in step.data for word in (b"Hello", b"Welcome"))


def _engine(command: int, transfer: int, argument: int = 0) -> Step:
    return Step(Kind.ENGINE, bytes([command, transfer, argument]))


def _says(kind: Kind, which: int, message: messages.Message) -> Step:
    return Step(kind, bytes([which]) + messages.encode(message))


def _by_hand() -> Iterator[list[Step]]:
    """What a good pair does not say, or not over a control port."""
    consumer, producer = Kind.CONSUMER_SAYS, Kind.PRODUCER_SAYS
    yield [_says(consumer, 0, control.HELLO), _says(consumer, 1, control.READABLE_HELLO)]
    for geometry in _EXTENDED:
        hello = msgspec.structs.replace(control.HELLO, extended=geometry)
        opened = messages.Open("t0", TOKENS, 0, 16, False, [0, 1], 1 << 20, state_token=15)
        yield [_says(consumer, 0, hello), _says(consumer, 0, opened)]
        answer = msgspec.structs.replace(control.WELCOME, geometry=geometry)
        yield [_engine(_LOAD, 2, 0), _says(producer, 0, answer)]
    for which, welcome in enumerate((control.WELCOME, control.READABLE_WELCOME)):
        yield [_engine(_LOAD, 2, which), _says(producer, which, welcome)]
    yield [_engine(_HOLD, 0, 2), _says(producer, 0, messages.Ready("t0")), _engine(_DROP, 0)]
    for said in (
        messages.Watch("t0"),
        messages.Credit("t0", [0, 1]),
        messages.Taken(0),
        messages.Cancel("t0", "aborted"),
        messages.AskRanks(),
    ):
        yield [_says(consumer, 0, said)]
    for answer in (
        messages.Reject("model", "another", 3, 2),
        messages.Refuse("t0", "tokens", "others"),
        messages.Cancelled("t0"),
        messages.Pulse(control.EPOCH, 1),
    ):
        yield [_says(producer, 0, answer)]
    for pause in range(len(control.PAUSES_S)):
        yield [_engine(_LOAD, 0), Step(Kind.TIME_PASSES, bytes([pause]))]
    yield [_engine(_LOAD, 0), Step(Kind.CONNECTION_BREAKS, b"\0")]
    head = ChunkHead(3, 5, 1, b"header").encode()
    for kind, body in ((GREET, b""), (PING, b""), (ACK, token_body(1))):
        yield [Step(Kind.DIALLER_RECORD, bytes([kind]) + body)]
        yield [Step(Kind.DIALLER_SENDS, bytes([kind]) + body)]
    yield [
        Step(Kind.LISTENER_RECORD, bytes([CHUNK]) + head),
        Step(Kind.LISTENER_RECORD, bytes([DATA]) + b"12345"),
    ]
    yield [Step(Kind.LISTENER_SENDS, head)]
    yield [Step(Kind.DIAL, b"\0pd-tcp2\0"), Step(Kind.DIAL, b"\1more")]
    for first in (1, 5, 9, 13, 26):
        yield [
            Step(Kind.LOBBY, bytes([first]) + b"0123456789abcdef"),
            Step(Kind.NOTE, bytes(4) + bytes([9]) + bytes(7) + b"header"),
        ]
    address = params.ProducerAddress("engine", (Peer(Source("127.0.0.1", 1, "engine"), WHOLE),))
    for known in (address, sealed(address, KEY)):
        for asked in (
            params.decode_params(known, "t0"),
            params.response(known, transfer="t0", pages=[[1]], tokens=4, push=True),
            params.description(known),
            params.prefill_params("t0"),
        ):
            yield [Step(Kind.PARAMS, msgspec.msgpack.encode(asked))]
