# SPDX-License-Identifier: Apache-2.0
"""`roles truth`: our router with a role policy, in front of engines that run."""

from __future__ import annotations

import asyncio
import string
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import NamedTuple

from pd_bench.report import BenchError, Say
from pd_bench.roles.fleets import FleetKind
from pd_bench.roles.truth import Figures, Plan
from pd_bench.router import sending
from pd_bench.router.mocks import MockProcess
from pd_bench.router.scaled import Sent
from pd_connector.tools.launch import RouterProcess, Service, stop_services, wait_all
from pd_connector.tools.launch.service import log_folder
from scheduler_plugins.cost.profile import save
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.sim.links import Network
from scheduler_plugins.sim.mock.server import BYTES_PER_TOKEN
from scheduler_plugins.sim.trace import PAGE_SIZE

MOST_FAILED = 0.01
_LETTERS = string.ascii_lowercase + " "
_MOVES = "pd_router:role_moves_total"


class Answered(NamedTuple):
    """The times of one answer, in seconds."""

    ttft_s: float
    tpot_s: float


class Live(NamedTuple):
    """Engines that run, all of which can have both roles."""

    fleet: FleetKind
    engines: Sequence[Service]
    letters: int  # of a token
    profile: Path  # what the router is told of their costs
    logs: Path


@contextmanager
def mocks(fleet: FleetKind, say: Say) -> Iterator[Live]:
    """Mock engines with the fleet's costs, room and links, in real time."""
    logs = log_folder()
    say(f"logs in {logs}")
    save(costs := logs / "costs.json", fleet.costs)
    usual = Network()
    # Mocks have the usual size of a token. Links that are slower by the same factor take the same time.
    rate = usual.bytes_per_s * usual.kv_bytes_per_token / fleet.kv_bytes_per_token
    args = ["--kv-tokens", str(fleet.kv_tokens), "--bytes-per-s", str(rate)]
    args += ["--block-tokens", str(PAGE_SIZE)]
    # The router takes the room from the size of the cache, as with vLLM, whose cache has both.
    args += ["--cache-blocks", str(round(fleet.kv_tokens / PAGE_SIZE))]
    engines = [
        MockProcess(f"engine{n}", costs, 1.0, logs / f"engine{n}.log", args)
        for n in range(fleet.engines)
    ]
    try:
        for engine in engines:
            engine.start()
        wait_all(engines)
        yield Live(fleet, engines, BYTES_PER_TOKEN, costs, logs)
    finally:
        stop_services(engines)


@contextmanager
def routed(live: Live, prefill: int, policy: str) -> Iterator[RouterProcess]:
    """A router in front of these engines, the first `prefill` of which prefill."""
    urls = [engine.base_url for engine in live.engines]
    args = ["--roles", policy, "--profile", str(live.profile)]
    log = live.logs / f"router-{policy}.log"
    router = RouterProcess(urls[:prefill], urls[prefill:], args=args, log_path=log)
    try:
        yield router.start().wait_ready()
    finally:
        stop_services([router])


def measured(live: Live, given: Plan, policy: str, say: Say) -> Figures:
    """The figures of one policy.

    Raises:
        BenchError: more than one in a hundred requests failed.
    """
    sent = [_sent(request, policy, live.letters) for request in given.requests]
    with routed(live, given.prefill, policy) as router:
        tenth = max(1, len(sent) // 10)

        def note(number: int) -> None:
            if number and number % tenth == 0:
                say(f"{policy}: {number:,} of {len(sent):,} requests sent")

        outcomes = asyncio.run(sending.play([router.base_url], sent, 1.0, note))
        moves = router.metrics().total(_MOVES, cause=policy)
    failed = [outcome for outcome in outcomes if not outcome.served]
    if len(failed) > MOST_FAILED * len(outcomes):
        raise BenchError(
            f"{policy}: {len(failed)} of {len(outcomes)} requests failed, the first: "
            f"{failed[0].status} {failed[0].error}; see {router.log_path}"
        )
    answers = [
        Answered(
            outcome.ttft_s, (outcome.end_s - outcome.ttft_s) / max(1, sent_request.max_tokens - 1)
        )
        if outcome.served
        else None
        for outcome, sent_request in zip(outcomes, sent, strict=True)
    ]
    return Figures.of(live.fleet, answers, round(moves))


def _sent(request: Waiting, run: str, letters: int) -> Sent:
    """Every prompt is new in every run: the traces share no prefixes."""
    text = "".join(Random(f"{run} {request.id}").choices(_LETTERS, k=request.tokens * letters))
    return Sent(request.arrival_s, text, request.max_tokens, request.tokens)
