# SPDX-License-Identifier: Apache-2.0
"""Peers that lie, and bytes that are not messages: an agent serves on."""

import os
import pickle
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from support.agents import (
    GEOMETRY,
    HALVES,
    LONG,
    MODEL,
    SHORT,
    TOKENS,
    TRANSPORTS,
    Rank,
    Ranks,
    assert_pages,
    geometry_of,
    ranks,
    until,
)
from support.leftovers import resident_bytes

from pd_connector.agent.producing.producer_side import MOST_LINES
from pd_connector.errors import Cause
from pd_connector.kv.geometry import Geometry, Section, Shard, state_group
from pd_connector.protocol.wire import messages
from pd_connector.protocol.wire.fields import MAX_MESSAGE_BYTES
from pd_connector.protocol.wire.peers import Source

__all__ = ["ranks"]

each_transport = pytest.mark.parametrize("transport", ["shm", "shm written", "tcp"])
HELLO = messages.Hello(
    messages.SCHEMA, messages.OLDEST_SCHEMA, "liar", "", MODEL, GEOMETRY, ["raw"], {}
)
OPEN = messages.Open("bait", TOKENS, 0, 16, False, [], 1 << 20)


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(linger=0)


class LyingConsumer:
    """A consumer that says what a test wants, over a real control connection."""

    def __init__(self, context: zmq.Context[Any], port: int) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    def say(self, *said: messages.Message | bytes | list[bytes]) -> None:
        for message in said:
            if isinstance(message, messages.Message):
                message = messages.encode(message)
            self.socket.send_multipart(message if isinstance(message, list) else [message])

    def hear(self) -> messages.ProducerMessage:
        assert self.socket.poll(20_000), "the producer answers"
        return messages.decode_producer_message(self.socket.recv())

    def hear_all_until(self, kind: type) -> list[messages.ProducerMessage]:
        heard = [self.hear()]
        while not isinstance(heard[-1], kind):
            heard.append(self.hear())
        return heard


class LyingProducer:
    """A producer that answers what a test wants."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self.socket = context.socket(zmq.ROUTER)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.source = Source("127.0.0.1", port, "")

    def hear(self) -> tuple[bytes, messages.ConsumerMessage]:
        assert self.socket.poll(20_000), "the consumer speaks"
        sender, data = self.socket.recv_multipart()
        return sender, messages.decode_consumer_message(data)

    def say(self, to: bytes, *said: messages.Message | list[bytes]) -> None:
        for message in said:
            frames = message if isinstance(message, list) else [messages.encode(message)]
            self.socket.send_multipart([to, *frames])


def assert_serves_on(ranks: Ranks, producer: Rank, transport: str = "") -> None:
    settings = LONG | (TRANSPORTS[transport] if transport else {})
    consumer = ranks(settings, produces=False, seed=9)
    producer.offer("good", [1, 2])
    consumer.load(producer.source, "good", [3, 4])
    assert consumer.loaded("good").cause is None
    assert_pages(producer, [1, 2], consumer, [3, 4])
    assert producer.count("agent_failures") == 0


def valid_messages() -> list[bytes]:
    said: list[messages.Message] = [
        HELLO,
        OPEN,
        messages.Credit("bait", [1, 2]),
        messages.Done("bait"),
        messages.Cancel("bait", "aborted"),
        messages.Heartbeat(["bait"]),
        messages.Watch("bait"),
        messages.Taken(1),
        messages.Welcome(
            messages.SCHEMA, "e", 1, MODEL, GEOMETRY, ["raw"], "tcp2", b"", 1 << 20, True
        ),
        messages.Ready("bait"),
        messages.LeftInSlot("bait", 0, 0, 0, 100, b"header"),
        messages.LeftInPages("bait", 0, 0, 8, bytes(16), b"header"),
        messages.Accept("bait", 1, True),
    ]
    return [messages.encode(message) for message in said]


def garbage(chance: random.Random) -> list[bytes]:
    """Frames of one message: noise, broken and truncated messages, several frames."""
    valid = chance.choice(valid_messages())
    match chance.randrange(6):
        case 0:
            return [chance.randbytes(chance.randrange(300))]
        case 1:
            return [valid[: chance.randrange(len(valid))]]
        case 2:
            broken = bytearray(valid)
            broken[chance.randrange(len(broken))] ^= 1 << chance.randrange(8)
            return [bytes(broken)]
        case 3:
            return [valid, valid]
        case 4:
            return [b"\x91" * chance.choice([10, 100_000])]
        case _:
            return [b"\xdd\xff\xff\xff\xff" + valid, b"", b""]


def test_messages_that_are_none_cost_their_sender_the_session_only(
    ranks: Ranks, context: zmq.Context[Any], caplog: pytest.LogCaptureFixture
):
    producer = ranks(LONG, consumes=False)
    chance = random.Random(7)
    for _ in range(3):
        liar = LyingConsumer(context, producer.agent.port)
        liar.say(HELLO)
        liar.say(*(garbage(chance) for _ in range(150)))
    until(lambda: producer.count("rejected_sessions", cause=Cause.MALFORMED_MESSAGE) > 100)
    said = [one for one in caplog.messages if f"({Cause.MALFORMED_MESSAGE})" in one]
    assert len(said) == MOST_LINES, "nobody fills the log"
    assert_serves_on(ranks, producer)


def test_a_message_above_the_limit_is_not_even_received(ranks: Ranks, context: zmq.Context[Any]):
    producer = ranks(LONG, consumes=False)
    for _ in range(3):
        LyingConsumer(context, producer.agent.port).say(bytes(MAX_MESSAGE_BYTES + 1))
    assert_serves_on(ranks, producer)
    assert producer.count("rejected_sessions", cause=Cause.MALFORMED_MESSAGE) == 0


def test_nothing_is_unpickled(ranks: Ranks, context: zmq.Context[Any], tmp_path: Path):
    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "exploded"),)

    bomb = pickle.dumps(Bomb())
    producer = ranks(LONG | {"transports": ("tcp",)}, consumes=False)
    liar = LyingConsumer(context, producer.agent.port)
    liar.say(bomb, [bomb, bomb])
    liar.say(msgspec.structs.replace(HELLO, transports={"tcp2": bomb, "shm": bomb}))
    assert_serves_on(ranks, producer)
    assert not (tmp_path / "exploded").exists()
    pickle.loads(bomb)
    assert (tmp_path / "exploded").exists()


ADDRESSES: dict[str, bytes] = {
    "empty": b"",
    "noise": bytes(range(256)),
    "deep": b"\x94" + b"\x91" * 100_000,
    "deep tail": b"\x96\xa1a\xc4\x01a\x01\x01" + b"\x91" * 100_000 + b"\x01\x01",
    "no text": b"\x93\xa2\xff\xfe\x01\xc4\x01a",
    "no text of shm": b"\x94\xa2\xff\xfe\xc4\x01a\x01\x01",
    "nobody": msgspec.msgpack.encode(("x" * 300, 2**63, b"")),
    "nobody of shm": msgspec.msgpack.encode(("x" * 300, b"", 2**63, 2**63)),
    "nothing of shm": msgspec.msgpack.encode(("", b"", 0, 0)),
    "a name": msgspec.msgpack.encode(("host.invalid", 1, bytes(16), bytes(32), 1, 1 << 20, True)),
    "nobody of tcp2": msgspec.msgpack.encode(
        ("127.0.0.1", 1, bytes(16), bytes(32), 1, 1 << 20, True)
    ),
    "short secret": msgspec.msgpack.encode(("127.0.0.1", 1, bytes(16), b"", 1, 1 << 20, True)),
    "longer identity": msgspec.msgpack.encode(("127.0.0.1", 1, b"x" * 5000)),
}


def test_addresses_of_transports_that_are_none(ranks: Ranks, context: zmq.Context[Any]):
    producer = ranks(SHORT, consumes=False)
    for name, data in ADDRESSES.items():
        every = ("tcp2", "shm")
        for offered in (*({name: data} for name in every), dict.fromkeys(every, data)):
            liar = LyingConsumer(context, producer.agent.port)
            producer.offer("bait", [1, 2, 3, 4])
            liar.say(msgspec.structs.replace(HELLO, transports=offered))
            liar.say(
                OPEN,
                messages.Credit("bait", [0, 1]),
                messages.Heartbeat([]),
                messages.Cancel("bait", ""),
            )
            liar.hear_all_until(messages.Cancelled | messages.Reject)  # type: ignore[arg-type]
            assert producer.count("agent_failures") == 0, name
    assert_serves_on(ranks, producer)


@each_transport
@pytest.mark.parametrize("slot", [4, 2**32 - 1])
def test_slots_that_the_consumer_does_not_have(
    ranks: Ranks, context: zmq.Context[Any], transport: str, slot: int
):
    settings = SHORT | TRANSPORTS[transport]
    producer, lender = ranks(settings, consumes=False), ranks(settings, produces=False)
    address = {t.name: t.address() for t in lender.transports}
    liar = LyingConsumer(context, producer.agent.port)
    producer.offer("bait", [1, 2, 3, 4])
    liar.say(msgspec.structs.replace(HELLO, transports=address))
    liar.say(msgspec.structs.replace(OPEN, slots=[slot, slot]))
    liar.say(
        *[messages.Credit("bait", [slot] * 4000)] * 5, messages.Done("bait"), messages.Heartbeat([])
    )
    liar.hear_all_until(messages.Pulse | messages.Reject)  # type: ignore[arg-type]
    producer.freed("bait")
    assert_serves_on(ranks, producer, transport)


def test_a_flood_of_openings_and_farewells_is_forgotten(ranks: Ranks, context: zmq.Context[Any]):
    producer = ranks(SHORT | {"session_timeout_s": 8.0, "lease_s": 8.0}, consumes=False)
    shy = ranks(SHORT, produces=False)
    address = {t.name: t.address() for t in shy.transports}
    liar = LyingConsumer(context, producer.agent.port)
    liar.say(msgspec.structs.replace(HELLO, transports=address))
    for i in range(500):
        liar.say(messages.Open(f"{i}", TOKENS, 0, 2**62, True, [7] * 50, 1 << 20, 1 + i % 3))
        liar.say(messages.Credit(f"{i}", [9] * 50), messages.Cancel(f"no {i}", "no cause"))
        liar.say(messages.Watch(f"{i}"), messages.Taken(i), messages.Cancel(f"nor {i}", "", 2))
        liar.say(messages.Done(f"nothing {i}"))
    until(lambda: producer.gauge("outgoing_transfers") == 1000)
    until(lambda: producer.gauge("outgoing_transfers") == 0)
    until(lambda: not producer.loop.producer_side._producer._past._unwanted)
    assert_serves_on(ranks, producer)


@each_transport
def test_noise_on_every_port(ranks: Ranks, transport: str):
    producer = ranks(LONG | TRANSPORTS[transport], consumes=False)
    ports = [producer.agent.port]
    ports += [producer.agent.data_port] if producer.agent.data_port else []
    chance = random.Random(3)
    greeting = bytes.fromhex("ff00000000000000017f0300") + b"NULL" + bytes(48)
    for port in ports:
        for i in range(40):
            with socket.create_connection(("127.0.0.1", port)) as noisy:
                prefix = greeting if i % 2 else b""
                noisy.sendall(prefix + chance.randbytes(chance.randrange(1, 2000)))
    assert_serves_on(ranks, producer, transport)


def test_many_connections_at_once_and_no_memory_kept(ranks: Ranks):
    producer = ranks(LONG | {"transports": ("tcp",)}, consumes=False)
    ports = [producer.agent.port, producer.agent.data_port]
    before = resident_bytes()
    for _ in range(2):
        crowd = [socket.create_connection(("127.0.0.1", p)) for p in ports for _ in range(200)]
        assert_serves_on_once(ranks, producer)
        for stranger in crowd:
            stranger.close()
    assert resident_bytes() - before < 64 << 20


def assert_serves_on_once(ranks: Ranks, producer: Rank) -> None:
    assert_serves_on(ranks, producer, "tcp")
    producer.look()
    producer.ended.clear()


DIALLED = msgspec.msgpack.encode(("127.0.0.1", 9, bytes(16), bytes(32), 1, 1 << 20, True))
WELCOME = messages.Welcome(
    messages.SCHEMA, "engine", 5, MODEL, GEOMETRY, ["raw"], "tcp2", DIALLED, 1 << 20
)
LIES: dict[str, tuple[list[messages.Message | list[bytes]], set[Cause]]] = {
    "silence": ([], {Cause.UNREACHABLE}),
    "noise": ([[b"\xc1"]], {Cause.MALFORMED_MESSAGE}),
    "two frames": ([[messages.encode(WELCOME), b""]], {Cause.MALFORMED_MESSAGE}),
    "a consumer's message": ([HELLO], {Cause.MALFORMED_MESSAGE}),
    "another schema": (
        [msgspec.structs.replace(WELCOME, schema=messages.SCHEMA + 1)],
        {Cause.VERSION},
    ),
    "another transport": (
        [msgspec.structs.replace(WELCOME, transport="x")],
        {Cause.MALFORMED_MESSAGE},
    ),
    "welcome twice": ([WELCOME, WELCOME], {Cause.MALFORMED_MESSAGE}),
    "slots smaller than a page": (
        [msgspec.structs.replace(WELCOME, slot_bytes=1)],
        {Cause.GEOMETRY},
    ),
    "slots so small that a plan would never end": (
        [msgspec.structs.replace(WELCOME, slot_bytes=4096)],
        {Cause.GEOMETRY},
    ),
    "only pulses": ([messages.Pulse(1)] * 3, {Cause.UNREACHABLE}),
    "welcome and silence": ([WELCOME], {Cause.SESSION_LOST, Cause.WAIT_TIMEOUT}),
    "no cause": ([messages.Reject("no such", "", 9, 9)], {Cause.UNREACHABLE}),
    "a refusal without a cause": (
        [WELCOME, messages.Refuse("t", "no such", "")],
        {Cause.TRANSPORT, Cause.SESSION_LOST, Cause.WAIT_TIMEOUT},
    ),
    "another plan": (
        [WELCOME, messages.Accept("t", 2**60, True)],
        {Cause.CHUNK_MISMATCH, Cause.SESSION_LOST, Cause.WAIT_TIMEOUT},
    ),
    "another geometry": (
        [msgspec.structs.replace(WELCOME, geometry=geometry_of(heads=8))],
        {Cause.GEOMETRY},
    ),
    "half of a geometry": (
        [
            msgspec.structs.replace(WELCOME, geometry=geometry_of(HALVES[0])),
            messages.Accept("t", 1, True),
        ],
        {Cause.STALLED, Cause.SESSION_LOST, Cause.WAIT_TIMEOUT},
    ),
    "no codec that anyone knows": (
        [msgspec.structs.replace(WELCOME, codecs=["zip", ""]), messages.Accept("t", 1, True)],
        {Cause.STALLED, Cause.SESSION_LOST, Cause.WAIT_TIMEOUT},
    ),
    "ready for what nobody watches": (
        [WELCOME, messages.Ready("t"), messages.Ready("u"), messages.Cancelled("t")],
        {Cause.SESSION_LOST, Cause.WAIT_TIMEOUT},
    ),
    "offers of what it never wrote": (
        [
            msgspec.structs.replace(WELCOME, read=True),
            *(messages.LeftInSlot("t", 0, slot, slot, 2**40, b"") for slot in (0, 3, 4, 2**32 - 1)),
        ],
        {Cause.TRANSPORT, Cause.SESSION_LOST, Cause.WAIT_TIMEOUT},
    ),
    "offers of pages that are not where it says": (
        [
            msgspec.structs.replace(WELCOME, read=True, direct=True),
            *(
                messages.LeftInPages("t", 0, slot, size, addresses, b"")
                for slot in (0, 3, 2**32 - 1)
                for size in (1, 2**40)
                for addresses in (b"", bytes(7), bytes(16), b"\xff" * 8)
            ),
        ],
        {Cause.TRANSPORT, Cause.SESSION_LOST, Cause.WAIT_TIMEOUT},
    ),
    "accepted and nothing more": (
        [WELCOME, messages.Accept("t", 1, False), messages.Accept("t", 1, True)],
        {Cause.STALLED, Cause.SESSION_LOST, Cause.WAIT_TIMEOUT},
    ),
} | {
    f"address {name}": (
        [msgspec.structs.replace(WELCOME, transport=transport, transport_address=data)],
        # What can be dialled at all turns out to be silent.
        {Cause.TRANSPORT, Cause.SESSION_LOST, Cause.WAIT_TIMEOUT},
    )
    for name, data in ADDRESSES.items()
    for transport in ("tcp2", "shm")
}


def test_a_producer_that_lies_fails_the_load_with_a_cause(ranks: Ranks, context: zmq.Context[Any]):
    """All lies at once: each is told by a producer of its own, to the same consumer."""
    # Each liar must have had time to speak.
    consumer = ranks(SHORT | {"connect_timeout_s": 5.0}, produces=False)
    liars = {name: LyingProducer(context) for name in LIES}
    for name, liar in liars.items():
        consumer.load(liar.source, name, [0])
    for name, liar in liars.items():
        sender, hello = liar.hear()
        assert isinstance(hello, messages.Hello)
        for message in LIES[name][0]:
            if isinstance(
                message,
                (
                    messages.Refuse,
                    messages.Accept,
                    messages.Ready,
                    messages.LeftInSlot,
                    messages.LeftInPages,
                ),
            ):
                message = msgspec.structs.replace(message, transfer=name)
            liar.say(sender, message)
    for name in liars:
        assert consumer.loaded(name).cause in LIES[name][1], (name, consumer.loaded(name))
    producer = ranks(LONG, consumes=False)
    producer.offer("good", [1])
    consumer.load(producer.source, "good", [2])
    assert consumer.loaded("good").cause is None


def test_a_producer_that_only_pulses_is_not_kept(ranks: Ranks, context: zmq.Context[Any]):
    consumer = ranks(SHORT, produces=False)
    liar = LyingProducer(context)
    consumer.load(liar.source, "t", [0])
    sender, _ = liar.hear()

    def pulse() -> bool:
        liar.say(sender, messages.Pulse(1))
        return consumer.gauge("producer_sessions") == 0

    until(pulse)
    assert consumer.loaded("t").cause == Cause.UNREACHABLE


LIED_GEOMETRIES = {
    "a rank beyond its group": geometry_of(Shard(0, 2, 3, 2)),
    "ranks without number": geometry_of(Shard(0, 2, 0, 1 << 31)),
    "layers of no stage": geometry_of(Shard(7, 3, 0, 1), layers=(0, 1)),
    "layers twice": geometry_of(layers=(0, 0, 1, 1)),
    "a page for everything": geometry_of(page_size=1 << 31),
    "one head of many": geometry_of(heads=1 << 31),
    "a window of one": geometry_of(window=1),
    "another dtype": geometry_of(dtype="fp4"),
    "scales of nothing": geometry_of(dtype="fp8_e4m3", scales=((0.0, float("nan")),) * 2),
    "scales for one layer": geometry_of(dtype="fp8_e4m3", scales=((1.0, 1.0),)),
    "a state without sections": geometry_of(kind="state"),
    "sections that are no state's": geometry_of(sections=(Section("ssm", 2, 4, 4, "bfloat16"),)),
    "a state of everything": Geometry(
        Shard(0, 2, 0, 1),
        (state_group((0, 1), (Section("ssm", 1 << 31, 1 << 31, 1 << 31, "float32"),)),),
    ),
    "a state of nothing known": Geometry(
        Shard(0, 2, 0, 1), (state_group((0, 1), (Section("ssm", 2, 4, 4, "fp4"),)),)
    ),
    "one entry for everything": geometry_of(state_tokens=1 << 31),
    "an interleave beyond the page": geometry_of(Shard(0, 2, 0, 2, cp_size=2), interleave=1 << 31),
    "tokens that nobody holds": geometry_of(Shard(0, 2, 0, 1, cp_size=4096), interleave=1),
    "a long period": geometry_of(Shard(0, 2, 0, 4093, cp_size=4093), heads=1, interleave=16),
    "a rank beyond its copies": geometry_of(Shard(0, 2, 0, 1, pcp_rank=9, pcp_size=2)),
    "a table far away": geometry_of(table=1 << 31),
}


@pytest.mark.parametrize("name", LIED_GEOMETRIES)
def test_a_geometry_that_is_none_costs_its_sender_the_transfer_only(
    ranks: Ranks, context: zmq.Context[Any], name: str
):
    producer = ranks(SHORT | {"transports": ("tcp",)}, consumes=False)
    producer.offer("bait", [1, 2, 3, 4])
    address = {"tcp2": DIALLED}
    liar = LyingConsumer(context, producer.agent.port)
    geometry = LIED_GEOMETRIES[name]
    said = {"geometry": geometry}
    if geometry.needs_schema > 1:
        said = {"extended": geometry}
    liar.say(msgspec.structs.replace(HELLO, transports=address, **said))
    for size in (256 << 10, 1 << 20):
        liar.say(msgspec.structs.replace(OPEN, chunk_bytes=size, slots=[0, 1]))
    liar.say(messages.Heartbeat([]), messages.Cancel("bait", ""), messages.Done("bait"))
    liar.hear_all_until(messages.Cancelled | messages.Reject)  # type: ignore[arg-type]
    assert_serves_on(ranks, producer, "tcp")
