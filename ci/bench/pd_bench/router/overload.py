# SPDX-License-Identifier: Apache-2.0
"""Load of twice the engines' capacity: promises kept with admission, beside admitting every request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass

from pd_bench.report import Comparison, Say
from pd_bench.router.contenders import Contender, Engines
from pd_bench.router.mocks import MockProcess
from pd_bench.router.rotations import cluster
from pd_bench.router.scaled import Sent
from pd_bench.router.sending import Outcome, play
from pd_bench.sample import Sample
from pd_connector.tools.launch import RouterProcess, Service

TTFT_S = 8.0
TPOT_S = 0.1
"""The promises, in the trace's time."""
KEPT_BAR = 0.95
GOODPUT_BAR = 1.3
REFUSED = 429


@dataclass(frozen=True)
class Promising(Contender):
    """Our router with one class of users; the promise is in its file only if `promises`."""

    promises: bool = True
    speed: float = 1.0

    def router(self, engines: Engines) -> Service:
        settings = engines.log.with_name("router.yaml")
        settings.write_text(json.dumps(self.settings(*engines[:2])))  # JSON is YAML too
        args = ["--config", str(settings), "--profile", str(engines.profile)]
        args += ["--log-level", "WARNING"]
        return RouterProcess(*engines.urls, name=self.name, args=args, log_path=engines.log)

    def settings(
        self, prefill: Sequence[MockProcess], decode: Sequence[MockProcess]
    ) -> dict[str, object]:
        """The content of the router's file."""
        engines = []
        for role, side in (("prefill", prefill), ("decode", decode)):
            for engine in side:
                events, replay = engine.events.partition("=")[2].split(",")
                engines.append(
                    {"url": engine.base_url, "role": role, "events": events, "replay": replay}
                )
        slo = {"ttft_ms": TTFT_S / self.speed * 1e3, "tpot_ms": TPOT_S / self.speed * 1e3}
        users = {"name": "all", "reserved_fraction": 1.0, "slo": slo if self.promises else {}}
        return {"engines": engines, "classes": [users]}


def compare(requests: Sequence[Sent], rounds: int, speed: float, say: Say) -> list[Comparison]:
    """Our router with promises beside our router without, with the same requests."""
    runs: dict[bool, list[Sequence[Outcome]]] = {True: [], False: []}
    for _ in range(rounds):
        for promises in (True, False):
            name = "promises" if promises else "lets everybody in"
            with cluster([Promising(name, promises=promises, speed=speed)], speed) as running:
                outcomes = asyncio.run(play([running.router.base_url], requests, speed))
            runs[promises].append(outcomes)
            refused = sum(outcome.status == REFUSED for outcome in outcomes)
            say(f"{name}: {refused} of {len(outcomes)} refused, {_kept(outcomes)} in time")
    admitted = [
        _kept(outcomes) / max(1, sum(outcome.status != REFUSED for outcome in outcomes))
        for outcomes in runs[True]
    ]
    ones = Sample((1.0,) * rounds)
    goodput = [
        Sample(tuple(float(max(1, _kept(outcome))) for outcome in runs[side]))
        for side in (True, False)
    ]
    return [
        Comparison("admitted in time", {}, Sample(tuple(admitted)), ones, "", KEPT_BAR, True),
        Comparison("served in time", {}, goodput[0], goodput[1], "", GOODPUT_BAR, True),
    ]


def _kept(outcomes: Sequence[Outcome]) -> int:
    return sum(
        outcome.served and outcome.ttft_s <= TTFT_S and outcome.tpot_s <= TPOT_S
        for outcome in outcomes
    )
