# SPDX-License-Identifier: Apache-2.0
"""Landing slots among thousands of streams that wait for some."""

from typing import Any
from unittest import mock

import pytest

from pd_connector.config import Config
from pd_connector.memory.slab import SlotPool
from pd_connector.protocol.consuming.grants import Grants
from pd_connector.protocol.consuming.incoming import ProducerSession, Tell
from pd_connector.protocol.consuming.incoming_stream import IncomingStream
from pd_connector.protocol.wire.peers import Source

SLOTS = 8
SOURCE = Source("127.0.0.1", 1, "")
CHUNK: Any = object()
SESSIONS = {SOURCE: ProducerSession(1, 1 << 20, ())}


def waiting(grants: Grants, count: int, *, complete: bool) -> list[IncomingStream]:
    """Streams with more chunks than there are slots."""
    streams = []
    for number in range(count):
        missing = dict.fromkeys(range(2 * SLOTS), CHUNK)
        stream = IncomingStream(
            1, opened=True, accepted=True, waits=True, complete=complete, missing=missing
        )
        grants.wait(f"{number}", SOURCE, stream)
        streams.append(stream)
    return streams


def granted(grants: Grants) -> list[str]:
    tells = grants.grant_free(now=0.0)
    assert all(isinstance(tell, Tell) for tell in tells)
    return [tell.message.transfer for tell in tells]  # type: ignore[union-attr]


@pytest.fixture
def grants() -> Grants:
    return Grants(Config(slots=SLOTS), SlotPool(SLOTS), SESSIONS)


def test_streams_that_may_have_no_more_slots_are_not_asked_again(grants: Grants) -> None:
    waiting(grants, 1000, complete=False)  # which leave slots for prefills that have ended
    assert granted(grants)
    with mock.patch.object(Grants, "_may_have", side_effect=AssertionError("asked")):
        for _ in range(3):
            assert granted(grants) == []


def test_a_stream_that_comes_later_gets_a_slot_at_once(grants: Grants) -> None:
    streams = waiting(grants, 100, complete=False)
    granted(grants)
    assert granted(grants) == []
    streams[50].complete = True  # its prefill has ended
    grants.wait("50", SOURCE, streams[50])
    assert granted(grants) == ["50"]


def test_a_slot_that_comes_home_is_granted_again(grants: Grants) -> None:
    first, *_ = streams = waiting(grants, 3, complete=True)
    granted(grants)
    assert granted(grants) == []
    slot = first.slots[0]
    del first.missing[0]
    grants.give_back("0", SOURCE, first, slot)
    grants.wait("0", SOURCE, first)
    assert len(granted(grants)) == 1
    grants.check_integrity({(f"{n}", SOURCE): stream for n, stream in enumerate(streams)})


def test_a_stream_that_is_forgotten_is_noticed(grants: Grants) -> None:
    streams = waiting(grants, 100, complete=False)
    granted(grants)
    known = {(f"{n}", SOURCE): stream for n, stream in enumerate(streams)}
    grants.check_integrity(known)
    streams[50].complete = True  # and nobody says that it wants more now
    with pytest.raises(RuntimeError, match=r"slots are free, and .* gets none"):
        grants.check_integrity(known)


def test_a_stream_with_enough_slots_gets_more_together(grants: Grants) -> None:
    """One message for four of them; and at once what comes home to a stream that has few."""
    many = Grants(Config(slots=16), SlotPool(16), SESSIONS)
    (stream,) = waiting(many, 1, complete=True)
    stream.missing = dict.fromkeys(range(100), CHUNK)
    messages = []
    for placed in range(32):
        granted(many)
        del stream.missing[placed]
        many.give_back("0", SOURCE, stream, stream.slots[0])
        many.wait("0", SOURCE, stream)
        messages.append(len(granted(many)))
        many.check_integrity({("0", SOURCE): stream})
        assert len(stream.slots) > 12
    assert sum(messages) == 8
    (few,) = waiting(grants, 1, complete=True)
    granted(grants)
    del few.missing[0]
    grants.give_back("0", SOURCE, few, few.slots[0])
    grants.wait("0", SOURCE, few)
    assert len(granted(grants)) == 1
