# SPDX-License-Identifier: Apache-2.0
"""`pd-connector bench plan truth`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from pd_bench.command_output import exit_codes, report
from pd_bench.plan import truth
from pd_bench.report import Comparison
from pd_bench.sample import Sample
from pd_connector.tools.launch.service import log_folder
from pd_connector.tools.output import Json

POINTS = 3.0
TIMES = (0.9, 1.0)
"""Rates at which fleets are played, as multiples of the planned one."""
NOTES = ["engines are mocks, which take the time of an invented cost model", "the router is real"]


def command(
    json: Json = None,
    requests: Annotated[int, typer.Option(help="Requests of each run.")] = 120,
) -> None:
    """Eight mock engines in real time as the plan's fleets: parts in time beside those that the plan predicts."""
    rows = list[Comparison]()
    with exit_codes(console := Console(stderr=True)):
        logs = log_folder()
        console.print(f"logs in {logs}", markup=False, highlight=False)
        judge, stock = truth.planned(requests)
        for n, case in enumerate(truth.cases(judge, stock, TIMES)):
            (folder := logs / str(n)).mkdir()
            both = truth.played(case, judge, stock, folder)
            text = (
                f"{case.candidate.name}, {case.per_s:.2f} a second: predicted {both.predicted:.3f} in time, "
                f"live {both.live:.3f}, {both.refused} refused"
            )
            console.print(text, soft_wrap=True, markup=False, highlight=False)
            params: dict[str, str | int | float] = {
                "fleet": case.candidate.name,
                "per s": round(case.per_s, 2),
                "predicted": round(both.predicted, 3),
                "live": round(both.live, 3),
            }
            off = Sample((both.points,)), Sample((POINTS,))
            rows.append(Comparison("in time off", params, *off, "points", 1.0))
    report([("allowed", rows)], NOTES, json)


def add(app: typer.Typer) -> None:
    """Add the command to `plan`."""
    app.command("truth")(command)
