# SPDX-License-Identifier: Apache-2.0
"""One host and port are enough: any rank of an engine tells who all its ranks are."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from support.agents import HALVES, LONG, Ranks, assert_pages, geometry_of, ranks

from pd_connector.agent.consuming.discovery import ask_ranks
from pd_connector.agent.handshake import RefusedError
from pd_connector.config import Config
from pd_connector.errors import Cause
from pd_connector.protocol.wire.peers import Peer

__all__ = ["ranks"]

CONFIG = Config()
KEYS = ("7c1de0a94b2f8365d07e9c1a5b3f2e48", "e10b7f3a9d2c4856b1f0a7c3d5e92846")


def ask(port: int, config: Config = CONFIG, wait_s: float = 20.0) -> tuple[Peer, ...]:
    return ask_ranks(config, "127.0.0.1", port, time.monotonic() + wait_s)


def test_the_only_rank_tells_of_itself(ranks: Ranks) -> None:
    rank = ranks(LONG)
    assert ask(rank.agent.port) == (rank.peer,)


def test_any_rank_tells_of_all_and_a_load_from_them_is_whole(ranks: Ranks) -> None:
    halves = [ranks(LONG, geometry=geometry_of(shard=shard), shards=HALVES) for shard in HALVES]
    assert not isinstance(halves, tuple)
    for half in halves:
        half.agent.introduce([half.peer for half in halves])
    consumer = ranks(LONG, seed=1)
    for half in halves:
        peers = ask(half.agent.port)
        assert peers == tuple(half.peer for half in halves)
    for half in halves:
        half.offer("t", [1, 2])
    consumer.load(peers, "t", [3, 4])
    assert consumer.loaded("t").cause is None
    assert_pages(halves, [1, 2], consumer, [3, 4])


def test_a_rank_whose_engine_has_not_introduced_its_ranks_is_no_answer(ranks: Ranks) -> None:
    half = ranks(LONG, geometry=geometry_of(shard=HALVES[0]), shards=HALVES)
    with pytest.raises(RefusedError, match="reports no ranks") as refused:
        ask(half.agent.port)
    assert refused.value.cause is Cause.MALFORMED_MESSAGE


def test_nobody_there_and_addresses_that_may_not_be_dialled(ranks: Ranks) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(RefusedError) as refused:
            ask(unused.getsockname()[1], wait_s=0.5)
    assert refused.value.cause is Cause.UNREACHABLE
    with pytest.raises(RefusedError) as refused:
        ask_ranks(CONFIG, "192.0.2.1", 1, time.monotonic() + 20)
    assert refused.value.cause is Cause.INSECURE_ADDRESS


def test_only_who_has_the_key_is_told(ranks: Ranks) -> None:
    rank = ranks(LONG | {"key": KEYS[0]})
    assert ask(rank.agent.port, Config(key=KEYS[0])) == (rank.peer,)
    with pytest.raises(RefusedError):
        ask(rank.agent.port, Config(key=KEYS[1]), wait_s=5.0)
    with pytest.raises(RefusedError):
        ask(rank.agent.port, wait_s=1.0)


@pytest.fixture
def web_server() -> Iterator[int]:
    """Something else that listens: it reads a little, answers as HTTP does, and hangs up."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(16)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    thread = threading.Thread(target=serve)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def test_a_port_where_something_else_listens_is_told_apart(web_server: int) -> None:
    with pytest.raises(RefusedError) as refused:
        ask(web_server, wait_s=2.0)
    assert refused.value.cause in (Cause.UNREACHABLE, Cause.SESSION_LOST, Cause.AUTHENTICATION)
