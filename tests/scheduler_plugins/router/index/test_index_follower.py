# SPDX-License-Identifier: Apache-2.0
"""A follower over real sockets, whose engine sends what no engine should."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from router_fakes import run, until
from support.vanishing import forget

from pd_connector.control import liveness
from scheduler_plugins.router.index import follower as following
from scheduler_plugins.router.index import held
from scheduler_plugins.router.index.events import Batch, Stored
from scheduler_plugins.router.index.follower import EventFollower
from scheduler_plugins.router.index.hashes import token_bytes
from scheduler_plugins.router.index.prefixes import Prefixes
from scheduler_plugins.router.index.prompt_keys import PromptKeys

TOKENS = list(range(100, 116))
LARGEST = 2**64 - 1


def message(number: int, ts: float, *events: Any) -> list[bytes]:
    batch = msgspec.msgpack.encode(Batch(ts, list(events)))
    return [b"", number.to_bytes(8, "big"), batch]


class Failing(Prefixes):
    """Raises for the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def apply_events(self, engine: str, batch: Batch, rank: int = 0) -> None:
        self.calls += 1
        if self.calls == 1:
            raise KeyError("what nobody thought of")
        super().apply_events(engine, batch, rank)


@pytest.mark.parametrize("prefixes", [Prefixes, Failing])
def test_a_follower_goes_on_whatever_its_engine_sends(
    prefixes: type[Prefixes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_RETRY_S", 0.01)

    async def scenario() -> None:
        known = prefixes()
        with zmq.asyncio.Context() as context, context.socket(zmq.XPUB) as engine:
            engine.setsockopt(zmq.LINGER, 0)
            port = engine.bind_to_random_port("tcp://127.0.0.1")
            one = EventFollower("e", f"tcp://127.0.0.1:{port}", None, known, context)
            task = asyncio.create_task(one.run())
            await engine.recv()  # it listens
            nonsense: list[list[bytes]] = [
                [b"alone"],
                [b"", b"short", b""],
                [b"", bytes(8), b"no msgpack"],
                message(LARGEST, 1e300, Stored([1], None, TOKENS[:4], 4)),
                message(0, 1.0, Stored([2], None, TOKENS[:4], 2**62)),
            ]
            for frames in nonsense:
                await engine.send_multipart(frames)
            whole = Stored([5, 6, 7, 8], None, TOKENS, 4)
            number, asked = 0, PromptKeys((), token_bytes(TOKENS))

            # What is sent while it connects again is lost.
            while known.match(asked, [Known("e")], 64, 0.0) != [4]:
                await engine.send_multipart(message(number, 2e300 + number * 1e290, whole))
                number += 1
                await asyncio.sleep(0.01)
            assert not task.done()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    run(scenario())


class Known:
    block_tokens = 4

    def __init__(self, name: str) -> None:
        self.name = name


def test_an_event_of_more_blocks_than_an_engine_may_have_is_not_even_hashed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(held, "MOST_BLOCKS", 3)

    def hashes(*given: object) -> None:
        raise AssertionError("hashed")

    monkeypatch.setattr(held, "block_hashes", hashes)
    known = Prefixes()
    known.apply_events("e", Batch(0.0, [Stored([1, 2, 3, 4], None, TOKENS, 4)]))
    assert known.state("e").blocks == 0


def test_names_of_the_same_blocks_are_bounded_as_blocks_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(held, "MOST_BLOCKS", 8)
    known = Prefixes()
    for first in (10, 20):
        known.apply_events("e", Batch(0.0, [Stored([*range(first, first + 4)], None, TOKENS, 4)]))
    assert known.state("e").blocks == 4, "they are the same blocks"
    known.apply_events("e", Batch(0.0, [Stored([30, 31, 32, 33], None, TOKENS, 4)]))
    assert known.state("e").blocks == 0, "its part is dropped"


@pytest.mark.parametrize("ends", ["at the start", "later"])
def test_a_port_that_cannot_be_reached_is_told_until_it_can(
    ends: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(following, "_SILENT_S", 0.2)
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        with zmq.asyncio.Context() as context:
            engine = context.socket(zmq.XPUB)
            engine.setsockopt(zmq.LINGER, 0)
            address = f"tcp://127.0.0.1:{engine.bind_to_random_port('tcp://127.0.0.1')}"
            one = EventFollower("e", address, None, Prefixes(), context)
            if ends == "at the start":
                engine.close()
            task = asyncio.create_task(one.run())
            if ends == "later":
                await until(lambda: bool(one.reached), "reached")
                assert "cannot be reached" not in one.describe()["note"]
                caplog.clear()  # a busy machine may have connected late
                engine.close()
                await until(lambda: one.reached is False, "not reached")
            await until(lambda: "cannot be reached" in caplog.text, "the log")
            assert address in caplog.text
            assert "--kv-events-config" in caplog.text
            assert address in one.describe()["note"]
            again = context.socket(zmq.XPUB)
            again.setsockopt(zmq.LINGER, 0)
            again.bind(address)
            await until(lambda: bool(one.reached), "reached")
            await until(lambda: "followed again" in caplog.text, "the log")
            assert caplog.text.count("cannot be reached") == 1
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            again.close()

    run(scenario())


def test_a_publisher_that_was_forgotten_on_the_way_is_followed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A subscriber sends nothing that could be missed, so the system has to ask."""
    for name in ("IDLE_S", "INTERVAL_S", "PROBES"):
        monkeypatch.setattr(liveness, name, 1)

    async def scenario() -> None:
        with zmq.asyncio.Context() as context, context.socket(zmq.XPUB) as engine:
            engine.setsockopt(zmq.LINGER, 0)
            port = engine.bind_to_random_port("tcp://127.0.0.1")
            one = EventFollower("e", f"tcp://127.0.0.1:{port}", None, Prefixes(), context)
            task = asyncio.create_task(one.run())
            await until(lambda: bool(one.reached), "reached")
            assert forget(port) == 2
            await until(lambda: one.reached is False, "not reached")
            await until(lambda: bool(one.reached), "reached again")
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    run(scenario())


class Turns(Prefixes):
    """Notes in which turn of the loop each batch came."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.turns_of_batches = 0, list[int]()

    def apply_events(self, engine: str, batch: Batch, rank: int = 0) -> None:
        self.turns_of_batches.append(self.turn)

    async def count(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)


@pytest.mark.parametrize("replayed", [False, True])
def test_other_work_goes_on_between_batches_that_have_come_together(replayed: bool) -> None:
    batches = 50

    async def scenario() -> None:
        known = Turns()
        with (
            zmq.asyncio.Context() as context,
            context.socket(zmq.XPUB) as engine,
            context.socket(zmq.ROUTER) as history,
        ):
            for socket in (engine, history):
                socket.setsockopt(zmq.LINGER, 0)
            port, replay = (
                socket.bind_to_random_port("tcp://127.0.0.1") for socket in (engine, history)
            )
            asked = f"tcp://127.0.0.1:{replay}" if replayed else None
            one = EventFollower("e", f"tcp://127.0.0.1:{port}", asked, known, context)
            tasks = [asyncio.create_task(one.run()), asyncio.create_task(known.count())]
            if replayed:
                asking, *_ = await history.recv_multipart()
                sending, to = history, [asking]
            else:
                await engine.recv()
                sending, to = engine, []
            for number in range(batches):
                await sending.send_multipart([*to, *message(number, 1.0)])
            time.sleep(0.2)  # noqa: ASYNC251 - the loop stands still while all arrive
            await until(lambda: len(known.turns_of_batches) == batches, "all came")
            assert len(set(known.turns_of_batches)) == batches
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    run(scenario())
