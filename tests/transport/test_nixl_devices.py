# SPDX-License-Identifier: Apache-2.0
"""NIXL between slots on devices. Its real library moves the bytes; host memory stands for a device's."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from transport_ends import SLOT_BYTES, Arrival, End, drive, meet

from pd_connector.config import Config
from pd_connector.errors import ConfigError, TransportError
from pd_connector.memory.buffers import Buffers
from pd_connector.memory.device_bytes import DeviceBytes
from pd_connector.memory.device_slab import DeviceSlab
from pd_connector.transport.base import Landed, TransportParts
from pd_connector.transport.nixl.agent import NixlAgent, try_out
from pd_connector.transport.nixl.transport import NixlTransport
from pd_connector.transport.registry import slot_use

pytest.importorskip("nixl._api", reason="nixl cannot be imported")

MakeEnd = Callable[..., End]
CPU = torch.device("cpu")
HOST_FIELDS = 8
"""Fields of an address before there were slots on devices."""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def kind() -> str:
    return "nixl"


def raw_landings(end: End) -> list[Landed]:
    """What lands at this end from now on, as its transport delivers it."""
    seen: list[Landed] = []
    poll = end.transport.poll

    def watched() -> Any:
        written, landed = poll()
        seen.extend(landed)
        return written, landed

    end.transport.poll = watched  # type: ignore[method-assign]
    return seen


def fill(slot: DeviceBytes, payload: bytes) -> DeviceBytes:
    slot.tensor.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    return slot


@pytest.mark.parametrize("reads", [False, True])
def test_two_ranks_with_slots_on_devices_use_these_and_no_others(
    make_end: MakeEnd, reads: bool
) -> None:
    producer, consumer = make_end(on_device=True), make_end(on_device=True)
    seen = raw_landings(consumer)
    consumer.landing.slot(2)[:] = b"\x11" * SLOT_BYTES
    link, source = meet(producer, consumer)
    slots = producer.transport.device_slots(link)
    assert slots is producer.on_device.sending
    payload = fill(slots.slot(1, 5000), bytes(range(250)) * 20)
    if reads:
        consumer.transport.read(source, 1, 5000, 2, b"header")
    else:
        producer.transport.write(link, b"header", payload, 2)
    drive(producer, consumer, until=lambda: bool(seen))
    assert consumer.landed == [Arrival(b"header", 2, bytes(payload))]
    landed = seen[0].payload
    assert isinstance(landed, DeviceBytes)
    assert landed.address == consumer.on_device.landing.address + 2 * SLOT_BYTES
    untouched = b"\x11" * SLOT_BYTES
    assert bytes(consumer.landing.slot(2)) == untouched, "the slot in host memory"


@pytest.mark.parametrize("which", ["the producer", "the consumer"])
def test_where_one_side_has_no_device_both_use_host_memory(make_end: MakeEnd, which: str) -> None:
    producer = make_end(on_device=which == "the producer")
    consumer = make_end(on_device=which == "the consumer")
    link, source = meet(producer, consumer)
    assert producer.transport.device_slots(link) is None
    producer.send(link, b"written", b"over host memory", slot=3)
    nbytes = producer.offer(1, b"read from it")
    consumer.transport.read(source, 1, nbytes, 4, b"read")
    drive(producer, consumer, until=lambda: len(consumer.landed) == 2)
    assert {bytes(consumer.landing.slot(3, 16)), bytes(consumer.landing.slot(4, 12))} == {
        b"over host memory",
        b"read from it",
    }


def test_a_peer_of_the_version_before_knows_nothing_of_devices(make_end: MakeEnd) -> None:
    """Its address has fewer fields, and it passes over those that are new."""
    producer, consumer = make_end(on_device=True), make_end(on_device=True)
    link = producer.transport.connect(shortened(consumer.transport.address()))
    consumer.transport.expect(shortened(producer.transport.address()))
    assert producer.transport.device_slots(link) is None
    producer.send(link, b"header", b"payload", slot=0)
    drive(producer, consumer, until=lambda: bool(consumer.landed))
    assert consumer.landed == [Arrival(b"header", 0, b"payload")]


def shortened(address: bytes) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.decode(address)[:HOST_FIELDS])


def test_a_payload_of_the_other_kind_of_memory_is_refused(make_end: MakeEnd) -> None:
    both = [make_end(on_device=on_device) for on_device in (True, True, False)]
    producer, consumer, without = both
    on_device = producer.transport.connect(consumer.transport.address())
    on_host = producer.transport.connect(without.transport.address())
    assert producer.on_device.sending is not None
    for link, payload in (
        (on_device, producer.sending.slot(0, 8)),
        (on_host, producer.on_device.sending.slot(0, 8)),
        (on_device, DeviceSlab(1, 64, CPU).slot(0, 8)),
    ):
        with pytest.raises(TransportError, match="is not in the sending slab"):
            producer.transport.write(link, b"", payload, 0)


def parts(memory: str) -> TransportParts:
    config = Config(slot_mib=1, slots=2, slot_memory=memory, transports=("nixl",))  # type: ignore[arg-type]
    buffers = Buffers(
        config, CPU, slot_use(config.transports), produces=True, consumes=True, slot_device=CPU
    )
    return TransportParts(None, config, None, buffers)  # type: ignore[arg-type]


def fail_to_move(monkeypatch: pytest.MonkeyPatch, how: str) -> str:
    """What goes wrong with device memory in UCX; returns what must be said of it."""
    start = NixlAgent.start

    def lost(agent: NixlAgent, *where: Any) -> Any:
        operation, name, here, _, nbytes = where
        return start(agent, operation, name, here, here, nbytes)  # never reaches its target

    def refused(*_: Any) -> Any:
        raise RuntimeError("NIXL_ERR_BACKEND")

    monkeypatch.setattr(NixlAgent, "start", lost if how == "lost" else refused)
    return "what arrived is not what was sent" if how == "lost" else "NIXL_ERR_BACKEND"


@pytest.mark.parametrize("how", ["lost", "refused"])
def test_ucx_that_does_not_move_device_memory_leaves_slots_in_host_memory(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """It registers device memory without CUDA support, too: only a transfer tells."""
    works = parts("auto")
    NixlTransport.make(works).close()
    assert (works.buffers.why_host, works.buffers.slot_memory) == (None, "slots in device memory")
    said = fail_to_move(monkeypatch, how)
    fails = parts("auto")
    transport = NixlTransport.make(fails)
    assert fails.buffers.device_slots.slabs == []
    assert fails.buffers.why_host is not None
    assert fails.buffers.why_host.cause == "setup"
    assert said in fails.buffers.slot_memory
    assert msgspec.msgpack.decode(transport.address())[HOST_FIELDS + 2 :] == [0, 0]
    transport.close()
    with pytest.raises(ConfigError, match=r"slot_memory 'device': .*Set `auto`"):
        NixlTransport.make(parts("device"))


def test_a_transfer_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd_connector.transport.nixl.agent._TRIAL_S", 0.05)
    monkeypatch.setattr(NixlAgent, "progress", lambda agent, handle: None)
    slab = DeviceSlab(1, SLOT_BYTES, CPU)
    agent = NixlAgent("trial", "127.0.0.1", slab)
    with pytest.raises(TransportError, match="nothing arrived"):
        try_out(agent, "trial", slab)
    agent.close()
