# SPDX-License-Identifier: Apache-2.0
"""`pd-connector bench plan scaling`."""

from __future__ import annotations

import typer
from rich.console import Console

from pd_bench.command_output import exit_codes, printing, report
from pd_bench.plan import scaling
from pd_bench.plan.scaling import Played, drawn, scaled
from pd_bench.plan.scaling_rules import Dynamo, Oracle
from pd_bench.report import Comparison
from pd_bench.sample import Sample
from pd_connector.tools.output import Json
from scheduler_plugins.router.roles.registry import create

_say = printing(Console(stderr=True))

POINTS, OF_HOURS, MOST_CHANGES, MINIMA_S = 0.01, 0.85, 2.0, 600.0
STEADY = (1.7, 2.5, 3.3)
"""Requests a second of the constant loads."""
NOTES = [
    "simulated, level 2: no engine was run",
    "the engine is invented; 16 of them are enough for 4 requests a second",
]


def command(json: Json = None) -> None:
    """16 engines, start 60 s: `slo` beside a fixed fleet, an oracle and Dynamo's rule, under a sine, constant loads, and
    when traffic ends or no engine comes."""
    with exit_codes(Console(stderr=True)):
        rows = [*_sine(), *_steady(), *_ends()]
    report([("bar", rows)], NOTES, json)


def _sine() -> list[Comparison]:
    requests = drawn(scaling.sine, scaling.SECONDS)
    fixed = scaling.smallest(requests, scaling.SECONDS, _say)
    ours = scaled(requests, create("slo"), scaling.SECONDS)
    _said("slo", ours)
    oracle = Oracle(scaling.sine, *scaling.mean_request(requests))
    _said("oracle", scaled(requests, oracle, scaling.SECONDS))
    _said("Dynamo's rule", scaled(requests, Dynamo(), scaling.SECONDS, settles=False))
    cut = ours.cut + sum(1 for each in ours.served if each.end_s is None and not each.rejected)
    return [
        _row("in time", ours.kept, fixed.kept - POINTS, higher=True),
        _row("engine hours", ours.engine_h, OF_HOURS * fixed.engine_h),
        _row("requests not cut", len(ours.served) - cut, len(ours.served), higher=True),
    ]


def _steady() -> list[Comparison]:
    rows = list[Comparison]()
    for per_s in STEADY:
        requests = drawn(lambda _, per_s=per_s: per_s, scaling.SECONDS)  # type: ignore[misc]
        run = scaled(requests, create("slo"), scaling.SECONDS, prefill=8, decode=4)
        _said(f"{per_s} a second", run)
        settled = [change for change in run.scaled if change.at_s >= scaling.HOUR_S / 2]
        changes = len(settled) / (scaling.SECONDS / scaling.HOUR_S - 0.5)
        rows.append(_row(f"changes an hour, {per_s} a second", changes, MOST_CHANGES))
    return rows


def _ends() -> list[Comparison]:
    rows = list[Comparison]()
    requests = drawn(scaling.ends, scaling.HOUR_S)
    for name, come in (("traffic ends", True), ("no engine comes, traffic ends", False)):
        run = scaled(requests, create("slo"), scaling.HOUR_S, prefill=7, decode=4, come=come)
        _said(name, run)
        engines = {"prefill": 7, "decode": 4}
        at_s = scaling.HOUR_S
        for change in run.scaled:
            engines[change.scale.role] = change.scale.engines
            if set(engines.values()) == {1}:
                at_s = min(at_s, change.at_s)
        rows.append(_row(f"{name}: seconds to the minima", at_s - scaling.HOUR_S / 2, MINIMA_S))
    return rows


def _row(name: str, ours: float, bar: float, *, higher: bool = False) -> Comparison:
    return Comparison(name, {}, Sample((ours,)), Sample((bar,)), "", 1.0, higher)


def _said(name: str, run: Played) -> None:
    _say(
        f"{name}: {run.kept:.4f} in time, {run.engine_h:.1f} engine hours, {len(run.scaled)} changes, {run.cut} cut"
    )


def add(app: typer.Typer) -> None:
    """Add the command to `plan`."""
    app.command("scaling")(command)
