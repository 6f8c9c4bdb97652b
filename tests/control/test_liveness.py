# SPDX-License-Identifier: Apache-2.0
"""A connection that reaches nobody any more is told from a peer that is slow, after a few round trips."""

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest
from support.vanishing import swallow
from support.waits import until

from pd_connector.control.liveness import is_unanswered

Pair = tuple[socket.socket, socket.socket]
LONGER_S = 1.5
"""Than it takes to find out that a connection on this machine is gone."""


@pytest.fixture
def pair() -> Iterator[Pair]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialled = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        with dialled, accepted:
            dialled.sendall(b"before")
            assert accepted.recv(6) == b"before"
            yield dialled, accepted


@pytest.mark.parametrize("both", [True, False], ids=["nothing passes", "one way only"])
def test_a_connection_whose_packets_vanish_is_unanswered(pair: Pair, both: bool) -> None:
    here, there = pair
    swallow(there)
    if both:
        swallow(here)
    assert not is_unanswered(here), "nothing has been sent over it"
    here.sendall(b"lost")
    until(lambda: is_unanswered(here))


def test_a_peer_that_does_not_read_answers(pair: Pair) -> None:
    here, _ = pair
    here.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            here.send(bytes(1 << 16))
    ends = time.monotonic() + LONGER_S
    while time.monotonic() < ends:
        assert not is_unanswered(here)
        time.sleep(0.05)


def test_a_peer_that_says_nothing_answers(pair: Pair) -> None:
    here, _ = pair
    here.sendall(b"heard, and not replied to")
    ends = time.monotonic() + LONGER_S
    while time.monotonic() < ends:
        assert not is_unanswered(here)
        time.sleep(0.05)


def test_a_connection_that_has_ended_is_not_unanswered(pair: Pair) -> None:
    here, there = pair
    there.close()
    assert here.recv(1) == b""
    assert not is_unanswered(here)
