# SPDX-License-Identifier: Apache-2.0
"""Inputs that a fuzzer has kept, once more: do they leave something, which are needed, and what does a
live agent make of them?"""

import contextlib
import gc
import logging
import socket
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import msgspec
import zmq
from support.agents import KEY, LONG, Rank, assert_pages

from fuzz.control import SENDERS
from fuzz.script import Kind, read
from fuzz.targets import Targets
from pd_connector.control.keys import CurveKeys

CORPUS = Path(__file__).parent / "corpus"
_TOLERATED = 2000
"""Objects: caches of bounded size that are not full yet."""


def mode(*, keyed: bool, greeted: bool) -> str:
    """The name of a corpus: what its inputs begin with."""
    return ("greeted" if greeted else "fresh") + ("_key" if keyed else "")


def read_corpus(name: str) -> list[bytes]:
    """The inputs that earlier runs have kept."""
    packed = zlib.decompress((CORPUS / f"{name}.msgpack.z").read_bytes())
    return msgspec.msgpack.decode(packed, type=list[bytes])


def write_corpus(name: str, scripts: Sequence[bytes]) -> None:
    """Keep these inputs instead."""
    packed = zlib.compress(msgspec.msgpack.encode(list(scripts)), 9)
    (CORPUS / f"{name}.msgpack.z").write_bytes(packed)


def growth(targets: Targets, scripts: Sequence[bytes]) -> int:
    """How many more objects live after a third run of all scripts than after the second; 0 if it is
    about as many."""
    counts: list[int] = []
    for _ in range(3):
        for script in scripts:
            targets.run(script)
        gc.collect()
        counts.append(len(gc.get_objects()))
    grown = counts[2] - counts[1]
    return grown if grown > _TOLERATED else 0


def minimal(targets: Targets, scripts: Sequence[bytes]) -> list[bytes]:
    """Scripts that together take every jump between lines of pd_connector that all of them take;
    small ones first."""
    kept: list[bytes] = []
    known: set[tuple[CodeType, int, int]] = set()
    for script in sorted(scripts, key=len):
        taken = _jumps(targets, script)
        if not taken <= known:
            known |= taken
            kept.append(script)
    return kept


def _jumps(targets: Targets, script: bytes) -> set[tuple[CodeType, int, int]]:
    taken: set[tuple[CodeType, int, int]] = set()
    lines: dict[FrameType, int] = {}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if "pd_connector" not in frame.f_code.co_filename:
            return None
        if event == "line":
            taken.add((frame.f_code, lines.get(frame, 0), frame.f_lineno))
            lines[frame] = frame.f_lineno
        elif event == "return":
            lines.pop(frame, None)
        return trace

    sys.settrace(trace)
    try:
        targets.run(script)
    finally:
        sys.settrace(None)
    return taken


def on_live_agent(scripts: Sequence[bytes], *, keyed: bool) -> None:
    """Send all frames to the ports of an agent in a thread of its own; it must serve on after them.

    Raises:
        AssertionError: it does not.
    """
    settings = LONG | {"transports": ("tcp",)} | ({"key": KEY} if keyed else {})
    keys = CurveKeys.derive(KEY) if keyed else None
    logger = logging.getLogger("pd_connector")
    level = logger.level
    logger.setLevel(logging.ERROR)  # thousands of refusals say nothing
    producer = Rank(settings, consumes=False)
    consumer = Rank(settings, produces=False, seed=1)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        consumers = [context.socket(zmq.DEALER) for _ in SENDERS]
        for one in consumers:
            one.linger = 0
            if keys:
                keys.present(one)
            one.connect(f"tcp://127.0.0.1:{producer.agent.port}")
        ports = producer.agent.port, producer.agent.data_port
        for script in scripts:
            for kind, data in read(script):
                if kind is Kind.CONSUMER_SAYS and data:
                    with contextlib.suppress(zmq.Again):  # as long as it is not read
                        consumers[data[0] % len(SENDERS)].send(data[1:], zmq.DONTWAIT)
                elif kind in (Kind.DIAL, Kind.DIALLER_SENDS):
                    for port in ports:
                        _knock(port, data)
        producer.offer("good", [1, 2])
        consumer.load(producer.source, "good", [3, 4])
        assert consumer.loaded("good").cause is None
        assert_pages(producer, [1, 2], consumer, [3, 4])
        assert producer.count("agent_failures") == 0
        assert producer.count("session_errors") == 0
    finally:
        logger.setLevel(level)
        context.destroy(linger=0)
        consumer.agent.close()
        producer.agent.close()


def _knock(port: int, data: bytes) -> None:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(data)
