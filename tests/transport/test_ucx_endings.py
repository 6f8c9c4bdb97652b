# SPDX-License-Identifier: Apache-2.0
"""How a transport over UCX ends when messages have not: of its own, or of a peer that has died."""

import contextlib
import gc
import os
import weakref
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
from support.waits import until
from transport_kinds import UCX
from ucx_peers import SLOT_BYTES, consume, peer, produce

from pd_connector.transport.base import Transport

pytestmark = pytest.mark.parametrize("kind", [UCX])


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_writes_that_are_cancelled_leave_nothing_behind(kind: str) -> None:
    from pd_connector.transport.ucx import UcxTransport

    def close_one() -> int:
        with contextlib.closing(UcxTransport(SLOT_BYTES)) as producer:
            link = producer.connect(address)
            for slot in range(8):
                producer.write(link, b"header", memoryview(bytes(SLOT_BYTES)), slot)
        return _open_files()

    with contextlib.closing(UcxTransport(SLOT_BYTES)) as expected:
        tag = expected.address()
    with peer(consume, tag) as consumer:
        address = consumer.ask("address")
        before = close_one()
        assert max(close_one() for _ in range(3)) <= before


@contextlib.contextmanager
def _cut_off(transport: Transport, when_dismissed: bool) -> Iterator[None]:
    """Within, `transport` has a part of a message whose producer is dead, which no session wants.

    Args:
        when_dismissed: whether that came when nobody expected anything of the producer any more.
    """
    with peer(produce, transport.address()) as producer:
        source = transport.expect(producer.ask("address"))
        producer.ask("send")
        until(lambda: transport.poll()[1], "the first message")
        if when_dismissed:
            transport.dismiss(source)
        producer.ask("send some")
        for _ in range(1000):
            transport.poll()
            transport._workers.progress()  # type: ignore[attr-defined]
        producer.kill()
        if not when_dismissed:
            assert transport.poll()[1] == []
            transport.dismiss(source)
        yield


def _end_after_cuts(when_dismissed: bool, pipe: Connection) -> None:
    from pd_connector.transport.ucx import UcxTransport

    while pipe.recv():
        with (
            contextlib.closing(UcxTransport(SLOT_BYTES)) as transport,
            _cut_off(transport, when_dismissed),
        ):
            pass
        pipe.send(_open_files())


@pytest.mark.parametrize("when_dismissed", [False, True], ids=["expected", "dismissed"])
def test_a_message_that_was_cut_off_neither_holds_up_the_end_nor_is_kept(
    kind: str, when_dismissed: bool
) -> None:
    with peer(_end_after_cuts, when_dismissed) as ending:  # or this process would hang
        open_files = [ending.ask("end") for _ in range(3)]
    assert open_files[2] <= open_files[0], "ucxx keeps workers with half a message"


def test_memory_of_writes_that_were_cancelled_is_given_back(kind: str) -> None:
    from pd_connector.transport.ucx import UcxTransport

    with contextlib.closing(UcxTransport(SLOT_BYTES)) as producer:
        with peer(consume, producer.address()) as consumer:
            link = producer.connect(consumer.ask("address"))
            producer.write(link, b"header", memoryview(bytes(SLOT_BYTES)), 0)
            memory = weakref.ref(next(iter(producer._links[link].writes.values())).buffer)
            producer.disconnect(link)
        assert [one.ok for one in producer.poll()[0]] == [False]
        gc.collect()
        assert memory() is None


def test_memory_of_a_message_that_was_cut_off_goes_with_the_next_session(kind: str) -> None:
    from pd_connector.transport.ucx import UcxTransport

    with contextlib.closing(UcxTransport(SLOT_BYTES)) as transport:
        address = transport.address()
        with _cut_off(transport, when_dismissed=False):
            pass
        assert transport.address() != address, "half a message goes with its worker only"
        assert transport.address() == transport.address()
