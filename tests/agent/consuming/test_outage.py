# SPDX-License-Identifier: Apache-2.0
"""A deployment in which no KV arrives says so, why, and what to set."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.agents import SHORT, Ranks, ranks, until
from support.descriptors import no_descriptors

from pd_bench.netns import Bed, Namespace, available
from pd_connector.agent.consuming import outage
from pd_connector.agent.consuming.outage import OUTAGE_S, OutageWatch, named_for_what_it_is
from pd_connector.agent.metrics import GAUGES
from pd_connector.errors import Cause
from pd_connector.protocol.wire.peers import Source
from pd_connector.remedies import FAILING_GAUGE

__all__ = ["ranks"]

NOBODY = Source("127.0.0.1", 1, "engine")


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "no KV has arrived" in r.getMessage()]


def test_failures_over_a_minute_without_a_success_are_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = OutageWatch()
    for second in range(int(OUTAGE_S)):
        watch.failed(Cause.UNREACHABLE, "connection refused", float(second))
    assert not watch.failing
    assert said(caplog) == []
    for second in range(int(OUTAGE_S), 300):
        watch.failed(Cause.UNREACHABLE, "connection refused", float(second))
    assert watch.failing
    (line,) = said(caplog)
    assert "61 transfers failed (unreachable 61)" in line
    assert "connection refused" in line
    assert "PD_CONNECTOR_HOST" in line


def test_one_success_between_failures_is_no_outage(caplog: pytest.LogCaptureFixture) -> None:
    watch = OutageWatch()
    watch.failed(Cause.STALLED, "", 0.0)
    watch.succeeded()
    watch.failed(Cause.STALLED, "", OUTAGE_S + 1)
    assert not watch.failing
    watch.failed(Cause.STALLED, "", 3 * OUTAGE_S)
    assert watch.failing
    watch.succeeded()
    assert not watch.failing
    assert len(said(caplog)) == 1


def test_requests_that_ended_for_their_own_reasons_are_no_outage() -> None:
    watch = OutageWatch()
    for cause in (Cause.ABORTED, Cause.NOT_NEEDED, Cause.WINDOW):
        watch.failed(cause, "", 0.0)
        watch.failed(cause, "", 2 * OUTAGE_S)
    assert not watch.failing


def test_a_loopback_address_that_cannot_be_reached_is_named_as_this_machine() -> None:
    told = named_for_what_it_is("127.0.0.1", Cause.UNREACHABLE, "connection refused")
    assert "127.0.0.1 is this machine itself" in told
    assert "PD_CONNECTOR_HOST" in told
    assert named_for_what_it_is("10.0.0.1", Cause.UNREACHABLE, "refused") == "refused"
    assert named_for_what_it_is("127.0.0.1", Cause.STALLED, "no chunk") == "no chunk"


def test_a_producer_that_is_not_reached_for_want_of_descriptors_is_not_called_another_machine() -> (
    None
):
    with no_descriptors():
        told = named_for_what_it_is("127.0.0.1", Cause.UNREACHABLE, "connection refused")
    assert "ulimit -n" in told
    assert "this machine" not in told


def test_an_agent_that_reaches_nobody_shows_it_until_kv_arrives(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outage, "OUTAGE_S", 0.5)
    producer, consumer = ranks.pair(SHORT)
    assert consumer.gauge(FAILING_GAUGE) == 0
    number = 0
    while not consumer.gauge(FAILING_GAUGE):
        number += 1
        consumer.load(NOBODY, f"nobody {number}", [1])
        finished = consumer.loaded(f"nobody {number}")
        assert finished.cause is Cause.UNREACHABLE
        assert "is this machine itself" in finished.detail
        assert number < 1000
    assert len(said(caplog)) == 1
    assert FAILING_GAUGE in GAUGES
    caplog.clear()
    consumer.load(NOBODY, "nobody again", [1])
    assert consumer.loaded("nobody again").cause is Cause.UNREACHABLE
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING], "counted only"
    producer.offer("t", [5])
    consumer.load(producer.source, "t", [2])
    assert consumer.loaded("t").cause is None
    until(lambda: consumer.gauge(FAILING_GAUGE) == 0, "the gauge, which follows the step")


# Two machines, as far as the network is concerned.

PROGRAM = """
import io, json, logging, sys, time
sys.path[:0] = sys.argv[1:3]
from pd_connector.agent.consuming import outage
outage.OUTAGE_S = 1.0
from pd_connector.config import Config
from pd_connector.protocol.wire.peers import Source
from support.agents import Rank

def fetched(rank, source):
    for transfer in ("t", "u") * 20:
        rank.load(source, transfer, [2])
        finished = rank.loaded(transfer)
        rank.ended.clear()
        if finished.cause is None or rank.gauge("failing_ranks"):
            break
        time.sleep(0.1)
    return [finished.cause, finished.detail, rank.gauge("failing_ranks")]

for line in sys.stdin:
    settings, environment, address = json.loads(line)
    log = io.StringIO()
    logging.basicConfig(stream=log, level=logging.WARNING, force=True)
    config = Config.load(settings, environment, "HOST_OF_THE_ENGINE")
    settings = {name: getattr(config, name) for name in config.__struct_fields__}
    consumes = address is not None
    rank = Rank(settings, seed=consumes, produces=not consumes, consumes=consumes)
    if consumes:
        print(json.dumps(fetched(rank, Source(*address, "engine"))), flush=True)
    else:
        rank.offer("t", [5])
        rank.offer("u", [5])
        print(json.dumps([config.host, rank.agent.port]), flush=True)
        sys.stdin.readline()
    rank.agent.close()
    print(json.dumps(log.getvalue()), flush=True)
"""
SETTINGS: dict[str, Any] = {
    "insecure": True,
    "transports": ["tcp"],
    "connect_timeout_s": 2.0,
    "lease_s": 300.0,
}


class Machine:
    """A process in a namespace of its own, in which ranks are started one after the other."""

    def __init__(self, side: Namespace) -> None:
        self.address = side.address
        tests = Path(__file__).parents[2]
        command = [*side.prefix, sys.executable, "-c", PROGRAM, str(tests), str(tests.parent)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe)

    def tell(self, line: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[Machine, Machine]]:
    """Both start at the same time, once: their imports take seconds."""
    with Bed() as bed:
        left, right = (Machine(side) for side in bed.namespaces)
        yield left, right
        left.end()
        right.end()


def between_machines(machines: tuple[Machine, Machine], **host: str) -> tuple[list[Any], str, str]:
    """What the consumer on one machine makes of a producer on the other; and both sides' logs.

    Args:
        host: variables of the producer's environment; `{address}` stands for its address.
    """
    left, right = machines
    told = {name: value.format(address=left.address) for name, value in host.items()}
    left.tell([SETTINGS, told, None])
    right.tell([SETTINGS, {"HOST_OF_THE_ENGINE": right.address}, left.hear()])
    found, log = right.hear(), right.hear()
    left.tell("end")
    return found, log, left.hear()


@pytest.mark.netns
@pytest.mark.skipif(bool(available()), reason=f"no network namespaces: {available()}")
def test_an_engine_that_tells_its_loopback_address_to_another_machine_is_named(
    machines: tuple[Machine, Machine],
) -> None:
    (cause, detail, failing), log, producers_log = between_machines(machines)
    assert cause == "unreachable"
    assert "127.0.0.1 is this machine itself" in detail
    assert failing == 1
    assert log.count("no KV has arrived for") == 1
    assert "set `host` (config key, or PD_CONNECTOR_HOST) of the prefill engine" in log
    assert "engines on other machines would dial themselves" in producers_log


@pytest.mark.netns
@pytest.mark.skipif(bool(available()), reason=f"no network namespaces: {available()}")
@pytest.mark.parametrize("variable", ["HOST_OF_THE_ENGINE", "PD_CONNECTOR_HOST"])
def test_with_the_engines_own_address_kv_passes_between_machines(
    machines: tuple[Machine, Machine], variable: str
) -> None:
    host = {variable: "{address}"}
    (cause, detail, failing), log, producers_log = between_machines(machines, **host)
    assert cause is None, (detail, log)
    assert failing == 0
    assert "themselves" not in producers_log
