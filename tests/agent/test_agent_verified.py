# SPDX-License-Identifier: Apache-2.0
"""A chunk without a checksum is believed where its transport has verified it, and nowhere else."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from support.agents import KEY, LONG, TRANSPORTS, Ranks, assert_pages, ranks  # noqa: F401
from support.faulty_transport import Corrupt, FaultPlan, FaultTransport

from pd_connector.agent.consuming import receive_pipeline as receive_pipeline
from pd_connector.agent.producing import send_pipeline as send_pipeline
from pd_connector.errors import Cause
from pd_connector.protocol.wire.header import decode_header, encode_header
from pd_connector.transport.base import Landed, Transport

Wrap = Callable[[Transport], Transport]
SEALED = LONG | {"transports": ("tcp",), "key": KEY}


class Stripped(FaultTransport):
    """Every chunk's header loses its checksum on its way; `forged` also says it was verified."""

    forged = False

    def poll(self) -> Any:
        written, landed = super().poll()
        return written, [self._strip(arrival) for arrival in landed]

    def _strip(self, landed: Landed) -> Landed:
        header = decode_header(landed.header)
        bare = encode_header(msgspec.structs.replace(header, checksum=b""))
        return landed._replace(header=bare, verified=landed.verified or self.forged)


class Forged(Stripped):
    forged = True


class Corrupted(Forged):
    """What it says is verified has one wrong byte."""

    def _strip(self, landed: Landed) -> Landed:
        wrong = bytearray(landed.payload)
        wrong[7] ^= 1
        return super()._strip(landed)._replace(payload=memoryview(wrong))


def load(ranks: Ranks, settings: dict[str, Any], wrap: Wrap | None = None) -> Any:  # noqa: F811
    """One transfer; returns both ranks and the cause of its failure, if any."""
    producer = ranks(LONG | settings, consumes=False)
    options = {"wrap": wrap} if wrap else {}
    consumer = ranks(LONG | settings, seed=1, produces=False, **options)
    producer.offer("t", [5, 3])
    consumer.load(producer.source, "t", [20, 1])
    return producer, consumer, consumer.loaded("t").cause


@pytest.mark.parametrize("name", ["tcp", "shm written"])
def test_a_transport_that_does_not_verify_needs_a_checksum(
    ranks: Ranks,  # noqa: F811
    name: str,
) -> None:
    _, _, cause = load(ranks, TRANSPORTS[name], lambda t: Stripped(t, FaultPlan()))
    assert cause is Cause.CHECKSUM


def test_where_bytes_are_verified_no_checksum_is_formed(
    ranks: Ranks,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(*_: Any) -> bytes:
        raise AssertionError("a checksum was formed")

    for module in (receive_pipeline, send_pipeline):
        monkeypatch.setattr(module, "checksum_of", none)
    producer, consumer, cause = load(ranks, SEALED)
    assert cause is None
    assert_pages(producer, [5, 3], consumer, [20, 1])


def test_a_checksum_that_came_is_checked_also_where_bytes_are_verified(
    ranks: Ranks,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        send_pipeline.SendPipeline, "_checksum", lambda self, payload, path: b"wrong"
    )
    assert load(ranks, SEALED)[2] is Cause.CHECKSUM


def test_what_was_changed_after_it_was_verified_is_not_verified(
    ranks: Ranks,  # noqa: F811
) -> None:
    plan = FaultPlan(landings={0: Corrupt(7)})
    assert load(ranks, SEALED, lambda t: FaultTransport(t, plan))[2] is Cause.CHECKSUM


@pytest.mark.parametrize("wrap", [Forged, Corrupted])
def test_a_transport_that_called_all_verified_would_let_wrong_bytes_in(
    ranks: Ranks,  # noqa: F811
    wrap: type[Stripped],
) -> None:
    """The harm with the guard off: nothing else looks at the bytes."""
    producer, consumer, cause = load(
        ranks, TRANSPORTS["tcp"], lambda transport: wrap(transport, FaultPlan())
    )
    assert cause is None
    same = all(producer.page(a) == consumer.page(b) for a, b in ((5, 20), (3, 1)))
    assert same == (wrap is Forged)


def test_memory_that_is_verified_is_nothing_that_a_peer_can_write(
    ranks: Ranks,  # noqa: F811
) -> None:
    """Slots of shared memory are written by peers whenever they like."""
    producer, consumer = ranks.pair(LONG | {"transports": ("shm", "tcp"), "key": KEY})
    for rank in (producer, consumer):
        buffers = rank.loop.buffers
        tcp = next(t for t in rank.transports if t.verifies)
        assert tcp.sends_from is buffers.private_sending
        for private, shared in (
            (buffers.private_sending, buffers.sending),
            (buffers.private_landing, buffers.landing),
        ):
            assert private is not shared
            assert private.handle < 0 <= shared.handle
