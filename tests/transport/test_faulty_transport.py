# SPDX-License-Identifier: Apache-2.0
"""The faults come when the plan says so, and at no other time."""

from collections.abc import Hashable

import pytest
from support.faulty_transport import (
    Corrupt,
    Delay,
    Fail,
    FaultPlan,
    FaultTransport,
    Lose,
    Repeat,
    Truncate,
)

from chaos.wrapping import WrappingTransport
from pd_connector.errors import TransportError
from pd_connector.transport.base import Landed, Transport, Written


class Echo(Transport):
    """What is written lands here at the next poll."""

    name = "echo"
    one_sided = True
    readable = True

    def __init__(self) -> None:
        self.closed = False
        self._tokens = 0
        self._landed: list[Landed] = []
        self._read: list[Landed] = []

    def address(self) -> bytes:
        return b"echo"

    def connect(self, consumer: bytes) -> Hashable:
        return consumer

    def disconnect(self, route: Hashable) -> None:
        pass

    def expect(self, producer: bytes) -> Hashable:
        return producer

    def dismiss(self, source: Hashable) -> None:
        pass

    def write(self, route: Hashable, header: bytes, payload: memoryview, slot: int) -> int:
        self._tokens += 1
        self._landed.append(Landed(header, slot, payload))
        return self._tokens

    def read(self, source: Hashable, send_slot: int, nbytes: int, slot: int, header: bytes) -> None:
        self._read.append(Landed(header, slot, memoryview(bytes([send_slot]) * nbytes)))

    def poll(self) -> tuple[list[Written], list[Landed]]:
        landed, self._landed = self._landed, []
        read, self._read = self._read, []
        first = self._tokens - len(landed) + 1
        return [Written(first + n, True, "") for n in range(len(landed))], landed + read

    @property
    def pollables(self) -> list[object]:
        return []

    @property
    def restless(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True


def _run(plan: FaultPlan, writes: int = 4, polls: int = 1) -> tuple[list[Written], list[Landed]]:
    transport = FaultTransport(Echo(), plan)
    route = transport.connect(b"")
    for number in range(writes):
        transport.write(route, b"%d" % number, memoryview(bytes(range(10))), number)
    written: list[Written] = []
    landed: list[Landed] = []
    for _ in range(polls):
        more_written, more_landed = transport.poll()
        written += more_written
        landed += more_landed
    return written, landed


def _tokens(written: list[Written]) -> list[int]:
    return [completion.token for completion in written]


def _headers(landed: list[Landed]) -> list[bytes]:
    return [arrival.header for arrival in landed]


def test_without_a_plan_it_is_the_wrapped_transport() -> None:
    echo = Echo()
    transport = FaultTransport(echo, FaultPlan())
    assert (transport.name, transport.one_sided, transport.readable) == ("echo", True, True)
    assert transport.address() == b"echo"
    assert (transport.pollables, transport.restless) == ([], False)
    assert transport.expect(b"producer") == b"producer"
    transport.close()
    assert echo.closed
    assert _run(FaultPlan(), polls=3) == (
        [Written(token, True, "") for token in (1, 2, 3, 4)],
        [Landed(b"%d" % n, n, memoryview(bytes(range(10)))) for n in range(4)],
    )


def test_the_connect_that_is_planned_to_fail_fails() -> None:
    transport = FaultTransport(Echo(), FaultPlan(connects={1: Fail()}))
    assert transport.connect(b"first") == b"first"
    with pytest.raises(TransportError, match="injected: connect 1"):
        transport.connect(b"second")
    assert transport.connect(b"third") == b"third"


def test_a_write_that_fails_at_its_start_sends_nothing() -> None:
    transport = FaultTransport(Echo(), FaultPlan(writes={0: Fail()}))
    with pytest.raises(TransportError, match="injected: write 0"):
        transport.write(b"", b"first", memoryview(b"x"), 0)
    transport.write(b"", b"second", memoryview(b"x"), 0)
    written, landed = transport.poll()
    assert (_tokens(written), _headers(landed)) == ([1], [b"second"])


@pytest.mark.parametrize(
    ("fault", "tokens"),
    [(Lose(), [1, 3, 4]), (Repeat(), [1, 2, 2, 3, 4]), (Delay(2), [1, 3, 4, 2])],
)
def test_completions_are_lost_repeated_or_late(
    fault: Lose | Repeat | Delay, tokens: list[int]
) -> None:
    written, landed = _run(FaultPlan(completions={1: fault}), polls=5)
    assert _tokens(written) == tokens
    assert _headers(landed) == [b"0", b"1", b"2", b"3"]


def test_a_completion_reports_a_failure_of_what_has_landed() -> None:
    written, landed = _run(FaultPlan(completions={2: Fail()}))
    assert [completion.ok for completion in written] == [True, True, False, True]
    assert len(landed) == 4


@pytest.mark.parametrize(
    ("faults", "headers"),
    [
        ({0: Lose()}, [b"1", b"2", b"3"]),
        ({3: Repeat()}, [b"0", b"1", b"2", b"3", b"3"]),
        ({0: Delay(3), 1: Delay(1)}, [b"2", b"3", b"1", b"0"]),
    ],
)
def test_chunks_are_lost_repeated_or_out_of_order(
    faults: dict[int, Lose | Repeat | Delay], headers: list[bytes]
) -> None:
    written, landed = _run(FaultPlan(landings=dict(faults)), polls=5)
    assert _headers(landed) == headers
    assert all(bytes(arrival.payload) == bytes(range(10)) for arrival in landed)
    assert _tokens(written) == [1, 2, 3, 4]


def test_what_is_delayed_keeps_the_transport_restless_until_it_comes() -> None:
    transport = FaultTransport(Echo(), FaultPlan(landings={0: Delay(2)}))
    transport.write(b"", b"late", memoryview(b"x"), 0)
    seen = [(_headers(transport.poll()[1]), transport.restless) for _ in range(3)]
    assert seen == [([], True), ([], True), ([b"late"], False)]


def test_one_byte_of_one_payload_is_corrupted_in_a_copy() -> None:
    source = bytearray(range(10))
    transport = FaultTransport(Echo(), FaultPlan(landings={1: Corrupt(9)}))
    for slot in range(3):
        transport.write(b"", b"", memoryview(source), slot)
    payloads = [bytes(arrival.payload) for arrival in transport.poll()[1]]
    assert payloads == [source, bytes(range(9)) + b"\xf6", source]
    assert source == bytes(range(10))


def test_one_payload_is_truncated() -> None:
    landed = _run(FaultPlan(landings={2: Truncate(3)}))[1]
    assert [len(arrival.payload) for arrival in landed] == [10, 10, 3, 10]
    assert bytes(landed[2].payload) == b"\x00\x01\x02"


def test_the_read_that_is_planned_to_fail_fails_and_fetches_nothing() -> None:
    transport = FaultTransport(Echo(), FaultPlan(reads={0: Fail()}))
    with pytest.raises(TransportError, match="injected: read 0"):
        transport.read(b"", 1, 3, 0, b"first")
    transport.read(b"", 2, 3, 1, b"second")
    assert transport.poll()[1] == [Landed(b"second", 1, memoryview(b"\2\2\2"))]


def test_reads_are_landings_and_may_end_without_their_bytes() -> None:
    plan = FaultPlan(landings={0: Lose(), 1: Fail(), 2: Corrupt(0), 3: Truncate(1)})
    transport = FaultTransport(Echo(), plan)
    for number in range(5):
        transport.read(b"", 1, 2, number, b"%d" % number)
    failed, *others = transport.poll()[1]
    assert (failed.header, failed.slot, bytes(failed.payload)) == (b"1", 1, b"")
    assert failed.problem == "injected: landing 1 fails"
    assert [bytes(landed.payload) for landed in others] == [b"\xfe\1", b"\1", b"\1\1"]
    assert not any(landed.problem for landed in others)


def test_what_wraps_a_transport_hands_on_all_that_a_transport_has() -> None:
    """What is not handed on is answered with the default: chunks take another path where a fault is to hit them."""
    wrapped = WrappingTransport(Echo())
    handed_on = {name for name in dir(Transport) if not name.startswith("_")} - {"make"}
    assert handed_on <= {*vars(WrappingTransport), *vars(wrapped)}


def test_what_is_told_to_the_wrapper_of_destinations_is_told_to_its_transport() -> None:
    wrapped = WrappingTransport(Echo())
    asked = lambda header, slot, nbytes: None  # noqa: E731
    wrapped.destinations = asked
    assert wrapped.inner.destinations is asked
    assert wrapped.destinations is asked
