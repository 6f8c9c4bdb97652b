# SPDX-License-Identifier: Apache-2.0
"""When a consumer knows that a producer copies no more: the producer's links have hung up."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from pd_connector.memory.pins import Pins
from pd_connector.memory.slab import Slab
from pd_connector.transport.shm import consumer_half
from pd_connector.transport.shm.address import ShmAddress
from pd_connector.transport.shm.consumer_half import ConsumerHalf

ADDRESS = ShmAddress("listens", b"token of a peer.", 4, 4096)


@pytest.fixture
def half() -> Iterator[ConsumerHalf]:
    landing = Slab(4, 4096, shared=True)
    made = ConsumerHalf(landing, Pins())
    yield made
    made.close()
    landing.close()


def linked(half: ConsumerHalf, links: int = 2) -> tuple[int, list[socket.socket]]:
    """A source whose producer has some links; and the producer's ends of them."""
    source = half.expect(ADDRESS)
    pairs = [socket.socketpair() for _ in range(links)]
    half._producers[ADDRESS.token].links = [ours for ours, _ in pairs]
    return source, [theirs for _, theirs in pairs]


def test_links_that_hang_up_a_moment_after_the_session_silence_the_producer(
    half: ConsumerHalf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel closes the sockets of a process that has ended one after the other."""
    monkeypatch.setattr(consumer_half, "_HANG_UP_S", 60.0)
    source, theirs = linked(half)
    theirs[0].close()
    later = threading.Timer(0.05, theirs[1].close)
    later.start()
    assert half.silenced(source, waits=True)
    later.join()


def test_a_producer_with_a_link_that_stands_may_still_copy(half: ConsumerHalf) -> None:
    source, theirs = linked(half)
    theirs[0].close()
    before = time.monotonic()
    assert not half.silenced(source, waits=True)
    assert time.monotonic() - before >= consumer_half._HANG_UP_S
    theirs[1].close()
    assert half.silenced(source, waits=False)


def test_nobody_waits_for_the_links_of_a_producer_that_lives(
    half: ConsumerHalf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_half, "_HANG_UP_S", 600.0)
    source, _theirs = linked(half)
    assert not half.silenced(source, waits=False)
