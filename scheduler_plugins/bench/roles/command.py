# SPDX-License-Identifier: Apache-2.0
"""`python -m scheduler_plugins.bench roles`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pd_connector.tools.bench.flow import BenchError
from pd_connector.tools.bench.report import Comparison
from pd_connector.tools.bench.sample import Sample
from pd_connector.tools.cli.bench_report import exit_codes, report
from pd_connector.tools.output import Json
from scheduler_plugins.bench.roles import decision_cost
from scheduler_plugins.bench.roles import shift as shifting
from scheduler_plugins.bench.roles.fleets import FLEETS, FleetKind
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.router.roles.registry import ROLES
from scheduler_plugins.sim import trace
from scheduler_plugins.sim.trace import TraceError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Role policies in the simulator, beside fixed ratios and an oracle.",
)
Code = Annotated[Path, typer.Argument(help="A trace with short answers: azure_code.csv.")]
Conv = Annotated[Path, typer.Argument(help="A trace with long answers: azure_conv.csv.")]
FleetName = Annotated[str, typer.Option(help=f"One of {', '.join(FLEETS)}, or all.")]
Requests = Annotated[int, typer.Option(min=200, help="The first N requests of each trace.")]
Jobs = Annotated[int, typer.Option(min=1, help="Processes that simulate.")]


@app.command("shift")
def shift(
    code: Code,
    conv: Conv,
    fleet: FleetName = "all",
    requests: Requests = 3000,
    jobs: Jobs = 2,
    json: Json = None,
) -> None:
    """One trace, then the other, in both orders: the largest common rate that keeps the promises in both.

    A rate of 1.0 is, in each half, the capacity of the best fixed ratio in that very window.
    """
    with exit_codes(Console(stderr=True)):
        traces = {path.stem: _read(path, requests) for path in (code, conv)}
        found = list[shifting.Shifted]()
        for kind in _fleets(fleet):
            halves = shifting.capacities(kind, traces, jobs, _say)
            found += [shifting.compare(kind, order, jobs, _say) for order in (halves, halves[::-1])]
    Console().print(_rates(found))
    tables = []
    for one in found:
        params = {"fleet": one.fleet.name, "traces": one.order}
        rows = [
            Comparison(name, params, _one(ours), _one(theirs), "", bar, True)
            for name, ours, theirs, bar in shifting.bars(one)
        ]
        tables.append(("baseline", rows))
    report(tables, ["simulated, level 2: no engine was run"], json)


@app.command("cost")
def cost(json: Json = None) -> None:
    """The CPU time of one decision for 64 engines."""
    rows = [
        Comparison(
            f"a decision of {name}",
            {"engines": decision_cost.ENGINES},
            _one(decision_cost.decision_ms(name)),
            _one(decision_cost.BAR_MS),
            "ms",
            1.0,
        )
        for name in ROLES
    ]
    report([("allowed", rows)], [], json)


def _rates(found: list[shifting.Shifted]) -> Table:
    names = ["best fixed", "worst fixed", shifting.ORACLE, *shifting.POLICIES]
    table = Table("fleet", "traces", *names, box=None, padding=(0, 2, 0, 0))
    for one in found:
        (worst, least), (best, most) = one.fixed[0], one.fixed[-1]
        cells = [f"{most:.2f} ({best})", f"{least:.2f} ({worst})"]
        cells += [f"{one.rates[name]:.2f}" for name in names[2:]]
        table.add_row(one.fleet.name, one.order, *cells)
    return table


def _fleets(name: str) -> list[FleetKind]:
    if name == "all":
        return list(FLEETS.values())
    if name not in FLEETS:
        raise BenchError(f"fleet {name!r}: must be all or one of {', '.join(FLEETS)}")
    return [FLEETS[name]]


def _read(path: Path, requests: int) -> list[Waiting]:
    try:
        return trace.load(path, requests)
    except TraceError as error:
        raise BenchError(str(error)) from None


def _say(text: str) -> None:
    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)


def _one(value: float) -> Sample:
    return Sample((value,))
