# SPDX-License-Identifier: Apache-2.0
"""PD_CONNECTOR_CHECK=1: an agent whose books are wrong dies at once, and says so."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from support.agents import LONG, TRANSPORTS, Ranks, assert_pages, ranks, until

from pd_connector.agent.integrity import checks_wanted
from pd_connector.agent.page_gate import PageGate
from pd_connector.agent.producing.send_pipeline import LEFT, SendPipeline
from pd_connector.config import Config
from pd_connector.errors import Cause
from pd_connector.memory.slab import Slab
from pd_connector.protocol.producing.outgoing import OutgoingChunk

__all__ = ["ranks"]


def send_pipeline() -> SendPipeline:
    cache: Any = SimpleNamespace()
    return SendPipeline(Config(), 1, cache, Slab(4, 1 << 12), PageGate())


def chunk(send_slot: int | None = None, session_limit: float = math.inf) -> OutgoingChunk:
    anything: Any = None
    known = OutgoingChunk("t", "r", b"s", anything, anything, [0], b"i", 0, False, False)
    known.send_slot, known.session_limit = send_slot, session_limit
    return known


def lose(box: SendPipeline) -> None:
    box._free_slots.pop()


def free_twice(box: SendPipeline) -> None:
    box._free_slots.append(0)


def free_while_under_way(box: SendPipeline) -> None:
    box.in_flight.chunks["tcp", 1] = chunk(send_slot=2)


def forget_the_limit(box: SendPipeline) -> None:
    for number in range(4):
        box.in_flight.chunks[LEFT, number] = chunk(session_limit=4)


@pytest.mark.parametrize("damage", [lose, free_twice, free_while_under_way, forget_the_limit])
def test_an_outbox_tells_wrong_books_from_right_ones(damage: Any):
    box = send_pipeline()
    box.check_integrity()
    box.in_flight.chunks["tcp", 0] = chunk(send_slot=box._free_slots.pop())
    box.check_integrity()
    damage(box)
    with pytest.raises(RuntimeError, match=r"send slots|backpressured"):
        box.check_integrity()


def test_a_gather_that_fails_gives_its_slot_back():
    box = send_pipeline()

    def fail(*_: Any) -> None:
        raise MemoryError

    box._cache.gather = fail  # type: ignore[method-assign]
    send = chunk()
    path: Any = SimpleNamespace(
        transport=SimpleNamespace(
            copies=False,
            sends_from=None,
            verifies=False,
            prepares=False,
            device_slots=lambda link: None,
        ),
        link=0,
        read=False,
    )
    with pytest.raises(MemoryError):
        box.post(send, path, 0.0)
    box.check_integrity()
    assert box.held == 0


def test_checks_are_asked_for_by_the_environment():
    assert checks_wanted({"PD_CONNECTOR_CHECK": "1"})
    assert not checks_wanted({"PD_CONNECTOR_CHECK": "0"})
    assert not checks_wanted({})


@pytest.mark.parametrize("checked", [True, False])
def test_an_agent_that_is_checked_dies_of_a_lost_slot_and_one_that_is_not_goes_on(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, checked: bool
):
    monkeypatch.setenv("PD_CONNECTOR_CHECK", "1" if checked else "0")
    producer, consumer = ranks.pair(LONG | TRANSPORTS["shm written"])
    producer.offer("t", [1, 2])
    consumer.load(producer.source, "t", [3, 4])
    assert consumer.loaded("t").cause is None
    assert_pages(producer, [1, 2], consumer, [3, 4])
    assert producer.freed("t").cause is None
    side = producer.loop.producer_side
    assert side is not None
    lost = side._send_pipeline._free_slots.pop()
    producer.offer("u", [1])
    if checked:
        assert producer.freed("u").cause == Cause.INTERNAL
        assert producer.count("agent_failures") == 1
        ranks.stop(producer)
        return
    consumer.load(producer.source, "u", [3])
    assert consumer.loaded("u").cause is None
    side._send_pipeline._free_slots.append(lost)
    until(producer.at_rest)
