# SPDX-License-Identifier: Apache-2.0
"""A prefill is preempted, and its pages are overwritten before the agent is told: what was read in
between is never used. Where vLLM overwrites pages: tests/vllm/test_preemption.py."""

import pytest
from support.agents import TRANSPORTS, Rank, Ranks, assert_pages, ranks, until

from pd_connector.agent.commands import Expect, Revoke, Withdraw
from pd_connector.errors import Cause
from pd_connector.protocol.producing.outgoing_stream import OutgoingStream

__all__ = ["ranks"]

LONG = {"wait_timeout_s": 60.0, "stall_timeout_s": 60.0}
REVOKE = Revoke("t", "offer of t")

by_transport = pytest.mark.parametrize("transport", ["shm", "shm written", "tcp"])


def streaming(ranks: Ranks, transport: str, *, late_revokes: bool) -> tuple[Rank, Rank]:
    """A prefill has begun, and a consumer waits for it."""
    settings = LONG | TRANSPORTS[transport]
    producer, consumer = ranks.pair(settings, late_revokes=late_revokes)
    producer.agent.engine_steps()
    producer.agent.submit(Expect("t"))
    consumer.load(producer.source, "t", [5, 6], wait=True)
    return producer, consumer


def overwrite(producer: Rank) -> None:
    """The engine zeroes pages 1 and 2; their KV is in pages 8 and 9 from now on."""
    for layer in producer.layers.values():
        layer[8], layer[9] = layer[1], layer[2]
        layer[1], layer[2] = 0, 0


def all_gathered(producer: Rank, consumer: Rank, *, provisional: bool = False) -> None:
    """All KV of pages 1 and 2 is computed and passes to the consumer."""
    computed = 2 * producer.page_tokens
    producer.offer("t", [1, 2], computed=computed, provisional=provisional)
    nbytes = sum(len(producer.page(page)) for page in (1, 2))
    until(lambda: consumer.count("received_bytes") == nbytes, "both pages, in however many chunks")
    chunks = consumer.count("received_chunks")  # no more will come
    until(lambda: producer.count("sent_chunks") == chunks, "it knows in which step each was read")


def read_before_revoked(producer: Rank, consumer: Rank) -> None:
    """The engine prepares a step and overwrites pages, the agent reads them, the step begins."""
    overwrite(producer)
    all_gathered(producer, consumer)
    producer.agent.engine_steps()
    producer.agent.submit(REVOKE)
    producer.offer("t", [8, 9])


def is_zero(rank: Rank, page: int) -> bool:
    return not any(rank.page(page))


@by_transport
def test_what_was_read_from_overwritten_pages_is_not_used(ranks: Ranks, transport: str) -> None:
    producer, consumer = streaming(ranks, transport, late_revokes=True)
    read_before_revoked(producer, consumer)
    assert consumer.loaded("t").cause == Cause.PREEMPTED
    assert producer.freed("t").cause == Cause.PREEMPTED


def test_from_an_engine_that_does_not_say_that_it_revokes_late_zeros_would_count(
    ranks: Ranks,
) -> None:
    producer, consumer = streaming(ranks, "shm", late_revokes=False)
    read_before_revoked(producer, consumer)
    assert consumer.loaded("t").cause is None
    assert is_zero(consumer, 5)
    producer.freed("t")


def test_without_knowing_when_each_chunk_was_read_zeros_would_count(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = property(lambda self: float("-inf"), lambda self, step: None)
    monkeypatch.setattr(OutgoingStream, "last_gathered", never)
    producer, consumer = streaming(ranks, "shm", late_revokes=True)
    read_before_revoked(producer, consumer)
    assert consumer.loaded("t").cause is None
    assert is_zero(consumer, 5)
    producer.freed("t")


@by_transport
def test_what_was_read_in_an_earlier_step_is_used(ranks: Ranks, transport: str) -> None:
    producer, consumer = streaming(ranks, transport, late_revokes=True)
    all_gathered(producer, consumer)
    assert "load of t" not in consumer.look(), "it is provisional until the prefill has ended"
    producer.agent.engine_steps()
    overwrite(producer)
    producer.agent.engine_steps()
    producer.agent.submit(REVOKE)
    producer.offer("t", [8, 9])
    assert consumer.loaded("t").cause is None
    assert_pages(producer, [8, 9], consumer, [5, 6])
    assert producer.freed("t").cause is None


@by_transport
def test_what_turns_out_to_be_wrong_at_the_end_of_the_prefill_is_not_used(
    ranks: Ranks, transport: str
) -> None:
    """An adapter was replaced while vLLM computed with it."""
    producer, consumer = streaming(ranks, transport, late_revokes=False)
    all_gathered(producer, consumer, provisional=True)
    assert "load of t" not in consumer.look()
    producer.agent.submit(Withdraw("t", "offer of t"))
    assert consumer.loaded("t").cause == Cause.PREFILL_ENDED


def test_what_is_not_said_to_be_provisional_is_used_before_the_end(ranks: Ranks) -> None:
    producer, consumer = streaming(ranks, "shm", late_revokes=False)
    all_gathered(producer, consumer)
    assert consumer.loaded("t").cause is None
    producer.agent.submit(Withdraw("t", "offer of t"))


@by_transport
def test_pages_that_are_taken_back_in_time_are_not_read(ranks: Ranks, transport: str) -> None:
    producer, consumer = streaming(ranks, transport, late_revokes=False)
    producer.agent.take_back([REVOKE])
    overwrite(producer)
    producer.offer("t", [1, 2], computed=2 * producer.page_tokens)
    producer.agent.engine_steps()
    producer.agent.submit(REVOKE)
    producer.offer("t", [8, 9])
    assert consumer.loaded("t").cause is None
    assert_pages(producer, [8, 9], consumer, [5, 6])
    assert producer.freed("t").cause is None
