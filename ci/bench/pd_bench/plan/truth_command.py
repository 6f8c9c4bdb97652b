# SPDX-License-Identifier: Apache-2.0
"""`pd-connector bench plan truth`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pd_bench.command_output import exit_codes, printing, report
from pd_bench.model import write_model
from pd_bench.plan import truth, truth_engines
from pd_bench.report import Comparison
from pd_bench.sample import Sample
from pd_connector.tools.launch.service import log_folder
from pd_connector.tools.output import Json

POINTS = 3.0
TIMES = (0.9, 1.0)
"""Rates at which fleets are played, as multiples of the planned one."""
NOTES = ["engines are mocks, which take the time of an invented cost model", "the router is real"]
ENGINE_NOTES = [
    "engines and router are real; the engine's costs were measured on one core, while the other one had no engine",
    f"fleets count as apart from {truth_engines.POINTS} points on",
]


def command(
    json: Json = None,
    requests: Annotated[int, typer.Option(help="Requests of each run.")] = 120,
    engines: Annotated[
        bool, typer.Option("--engines", help="Two real engines of vLLM's CPU build, one core each.")
    ] = False,
) -> None:
    """Eight mock engines in real time as the plan's fleets: parts in time beside those that the plan predicts."""
    rows = list[Comparison]()
    with exit_codes(console := Console(stderr=True)):
        logs = log_folder()
        console.print(f"logs in {logs}", markup=False, highlight=False)
        if engines:
            rows = _of_engines(requests, logs, console)
            report([("plan", rows)], ENGINE_NOTES, json)
            return
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


def _of_engines(requests: int, logs: Path, console: Console) -> list[Comparison]:
    """Real engines: whether fleets that the plan sees apart have the same order live."""
    say = printing(console)
    with tempfile.TemporaryDirectory(prefix="pd-connector-model-") as folder:
        model, window = write_model(Path(folder)), truth_engines.window_of(requests)
        inventory = truth_engines.stock(truth_engines.profiled(model, logs, say))
        fleets = truth_engines.fleets(inventory)
        case = truth_engines.furthest(inventory, fleets, window)
        ttft_s, tpot_s = case.promise
        say(
            f"{case.per_s:.2f} requests a second, first token within {ttft_s:.2f} s, tokens within {tpot_s:.3f} s"
        )
        live = list[float]()
        for n, fleet in enumerate(fleets):
            (its := logs / str(n)).mkdir()
            reached, refused = truth_engines.played(fleet, case, inventory, window, model, its)
            live.append(reached)
            say(
                f"{fleet.name}: predicted {case.predicted[n]:.3f} in time, live {reached:.3f}, {refused} refused"
            )
    params: dict[str, str | int | float] = {"per s": round(case.per_s, 2)}
    same = sum(live[better] > live[worse] for better, worse in case.apart)
    both = Sample((float(same),)), Sample((float(len(case.apart)),))
    return [
        Comparison("pairs of fleets in the plan's order", params, *both, "", 1.0, True),
        *(
            Comparison(
                "in time off",
                {
                    "fleet": fleet.name,
                    **params,
                    "predicted": round(predicted, 3),
                    "live": round(reached, 3),
                },
                Sample((100 * abs(predicted - reached),)),
                Sample((float(truth_engines.POINTS),)),
                "points",
            )
            for fleet, predicted, reached in zip(fleets, case.predicted, live, strict=True)
        ),
    ]


def add(app: typer.Typer) -> None:
    """Add the command to `plan`."""
    app.command("truth")(command)
