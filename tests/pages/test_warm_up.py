# SPDX-License-Identifier: Apache-2.0
"""Kernels are compiled before chunks need them, and the agent's thread does not wait for that."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import agents
from support.agents import LONG, TRANSPORTS, Rank, Ranks, assert_pages, ranks, until
from support.setups import Layer, Setup

from pd_connector import compiler as compiler_module
from pd_connector.agent.commands import Drop, Hold
from pd_connector.errors import Cause
from pd_connector.pages.kernel_pages import WarmUp
from pd_connector.plan.route import Route, routes
from pd_connector.protocol.wire.peers import Peer

pytest.importorskip("triton")
__all__ = ["ranks"]

COMMAND = Path(__file__).parents[1] / "support" / "compiles.py"
SOON_S = 0.3


def route() -> Route:
    (geometry,) = Setup().geometries((Layer(2),) * 2)
    (found,) = routes(geometry, geometry, ("raw",), ("raw",))
    return found


class Compiler:
    """Takes until it is let go, and may fail."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.asked: list[tuple[Route, bool]] = []
        self.may_end = threading.Event()
        self.problem = problem

    def __call__(self, route: Route, gathers: bool) -> None:
        self.asked.append((route, gathers))
        assert self.may_end.wait(30)
        if self.problem:
            raise self.problem


def test_each_route_and_direction_is_compiled_once_and_nobody_waits_for_it() -> None:
    compiler, one = Compiler(), route()
    warm = WarmUp(compiler)
    assert not warm.begin(one, True)
    until(lambda: compiler.asked, "its thread runs")  # and not that of the next one first
    assert not warm.begin(one, True)
    assert not warm.begin(one, False)
    assert compiler.asked == [(one, True)], "one at a time"
    compiler.may_end.set()
    until(lambda: warm.begin(one, True) and warm.begin(one, False))
    assert compiler.asked == [(one, True), (one, False)]
    assert warm.usable(one, True)


def test_a_chunk_waits_for_a_compiler_that_was_begun_and_for_no_other() -> None:
    compiler, one = Compiler(), route()
    warm = WarmUp(compiler)
    warm.begin(one, True)
    assert warm.usable(one, False), "compiled at its first launch"
    threading.Timer(0.05, compiler.may_end.set).start()
    assert warm.usable(one, True)
    assert compiler.may_end.is_set()


def test_a_compiler_s_failure_is_told_once_and_torch_moves_these_pages(
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiler, one = Compiler(RuntimeError("ptxas: out of registers")), route()
    warm = WarmUp(compiler)
    compiler.may_end.set()
    until(lambda: warm.begin(one, True))
    for _ in range(3):
        assert warm.begin(one, True)
        assert not warm.usable(one, True)
    assert warm.usable(one, False)
    assert caplog.text.count("ptxas: out of registers") == 1
    assert "gather layers 0-1 as raw cannot be compiled" in caplog.text


# What Triton is asked to compile.


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, Any]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = COMMAND.parents[2]
    paths = [str(root), str(root / "kernels"), str(root / "tests")]
    environment["PYTHONPATH"] = os.pathsep.join([*paths, environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(COMMAND)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


def test_no_chunk_needs_a_kernel_that_was_not_compiled_before(
    compiled: dict[str, dict[str, Any]],
) -> None:
    """No kernel is compiled that no chunk needs: as many as chunks alone would have compiled."""
    assert len(compiled) > 5
    for case, count in compiled.items():
        assert count["after"] == 0, case
        assert count["before"] == count["cold"] > 0, case


def test_kernels_of_another_codec_are_of_no_use(compiled: dict[str, dict[str, Any]]) -> None:
    """The count would see a kernel that is missing."""
    others = [count for count in compiled.values() if count["other"] is not None]
    assert len(others) > 5
    assert all(count["other"] > 0 for count in others)


# Between agents.

SIDES = {"the producer": (True, False), "the consumer": (False, True)}


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    """In place of that of every cache."""
    slow = Compiler()
    name = "pd_connector.pages.kernel_pages.KernelPages._compile_for"
    monkeypatch.setattr(name, lambda pages, route, gathers: slow(route, gathers))
    yield slow
    slow.may_end.set()


def started(ranks: Ranks, compiler: Compiler) -> tuple[Rank, Rank]:
    """A producer and a consumer, with a transfer that waits for the compiler."""
    producer, consumer = ranks.pair(LONG | TRANSPORTS["shm"])
    producer.offer("t", [5, 3])
    consumer.load(producer.source, "t", [20, 1])
    until(lambda: compiler.asked, "the compiler is asked")
    return producer, consumer


def assert_loads(producer: Rank, consumer: Rank, transfer: str = "t") -> None:
    assert consumer.loaded(transfer).cause is None
    assert_pages(producer, [5, 3], consumer, [20, 1])


def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile in the thread that asks."""

    class Thread:
        def __init__(self, target: Any, name: str, daemon: bool) -> None:
            self.start = target

        def is_alive(self) -> bool:
            return False

        def join(self) -> None:
            return None

    fake = SimpleNamespace(Thread=Thread, Lock=threading.Lock)
    monkeypatch.setattr(compiler_module, "threading", fake)


@pytest.fixture(params=[True, False])
def threaded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether kernels are compiled in a thread of their own; else in the one that asks."""
    if not request.param:
        inline(monkeypatch)
    return bool(request.param)


def test_a_producer_answers_while_its_kernels_are_compiled(
    ranks: Ranks,
    kernels_at: list[bool],
    compiler: Compiler,
    threaded: bool,
) -> None:
    """It does not where its own thread compiles."""
    kernels_at += SIDES["the producer"]
    producer, consumer = started(ranks, compiler)
    producer.offer("u", [2])
    peers = (Peer(producer.source, agents.WHOLE),)
    consumer.agent.submit(Hold("load of u", "u", peers, True))
    if threaded:
        assert consumer.held("u").cause is None
    else:
        threading.Event().wait(SOON_S)
        assert not consumer.look()
        assert not consumer.told
    assert "load of t" not in consumer.look(), "no chunk has come"
    compiler.may_end.set()
    assert_loads(producer, consumer)
    assert consumer.held("u").cause is None
    consumer.agent.submit(Drop("load of u", Cause.ABORTED))
    assert producer.freed("u")


def test_a_consumer_obeys_while_its_kernels_are_compiled(
    ranks: Ranks,
    kernels_at: list[bool],
    compiler: Compiler,
    threaded: bool,
) -> None:
    """It does not where its own thread compiles."""
    kernels_at += SIDES["the consumer"]
    producer, consumer = started(ranks, compiler)
    producer.offer("u", [2])
    consumer.load(producer.source, "u", [7])
    consumer.agent.submit(Drop("load of u", Cause.ABORTED))
    if threaded:
        assert consumer.loaded("u").cause is Cause.ABORTED
    else:
        threading.Event().wait(SOON_S)
        assert not consumer.look()
    assert "load of t" not in consumer.look(), "nothing has been asked for"
    compiler.may_end.set()
    assert_loads(producer, consumer)
    assert consumer.loaded("u").cause in (Cause.ABORTED, None)
    assert producer.freed("u")


@pytest.mark.parametrize("who", SIDES)
def test_what_cannot_be_compiled_is_moved_all_the_same(
    ranks: Ranks,
    kernels_at: list[bool],
    compiler: Compiler,
    caplog: pytest.LogCaptureFixture,
    who: str,
) -> None:
    kernels_at += SIDES[who]
    compiler.problem = RuntimeError("no such target")
    compiler.may_end.set()
    producer, consumer = ranks.pair(LONG | TRANSPORTS["tcp"])
    for transfer in ("t", "u"):
        producer.offer(transfer, [5, 3])
        consumer.load(producer.source, transfer, [20, 1])
        assert_loads(producer, consumer, transfer)
    assert caplog.text.count("no such target") == 1
