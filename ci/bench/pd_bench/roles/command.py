# SPDX-License-Identifier: Apache-2.0
"""`pd-connector bench roles`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pd_bench.command_output import exit_codes, printing, report
from pd_bench.report import BenchError, Compared, Comparison
from pd_bench.roles import decision_cost, request_cost
from pd_bench.roles import dop as paralleling
from pd_bench.roles import shift as shifting
from pd_bench.roles import steady as steadying
from pd_bench.roles import truth_command as beside_live
from pd_bench.roles.fleets import FLEETS, FleetKind
from pd_bench.roles.truth import (
    LOAD,
    POINTS_OFF,
    POINTS_OFF_MOCKS,
    POLICIES,
    compared,
)
from pd_bench.sample import single
from pd_connector.tools.launch.family import terminate_as_interrupt
from pd_connector.tools.output import Json
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.router.roles.registry import ROLES
from scheduler_plugins.sim import trace
from scheduler_plugins.sim.trace import TraceError

_say = printing(Console(stderr=True))

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
        traces = _both(code, conv, requests)
        results = list[shifting.Shifted]()
        for kind in _fleets(fleet):
            halves = shifting.capacities(kind, traces, jobs, _say)
            results += [
                shifting.compare(kind, order, jobs, _say) for order in (halves, halves[::-1])
            ]
    Console().print(_rates(results))
    tables = []
    for result in results:
        params = {"fleet": result.fleet.name, "traces": result.order}
        rows = [
            Comparison(name, params, single(ours), single(theirs), "", bar, True)
            for name, ours, theirs, bar in shifting.bars(result)
        ]
        tables.append(("baseline", rows))
    report(tables, ["simulated, level 2: no engine was run"], json)


@app.command("steady")
def steady(
    code: Code,
    conv: Conv,
    fleet: FleetName = "opt-13b-a100",
    requests: Requests = 3000,
    minutes: Annotated[float, typer.Option(min=1, help="Simulated time of each workload.")] = 15.0,
    only: Annotated[str, typer.Option(help="Workloads whose name has this text.")] = "",
    jobs: Jobs = 2,
    json: Json = None,
) -> None:
    """Traffic that keeps its shape or swings: Poisson, the traces' own bursts, steps, sines of the mix.

    Parts of the requests that are served in time, beside the best fixed ratio.
    """
    with exit_codes(Console(stderr=True)):
        traces = _both(code, conv, requests)
        tables, rows = (
            list[Compared](),
            Table("fleet", "workload", "load", "best fixed", *steadying.POLICIES, box=None),
        )
        for kind in _fleets(fleet):
            halves = shifting.capacities(kind, traces, jobs, _say)
            chosen = steadying.cases(halves, minutes * 60)
            chosen = [case for case in chosen if only in case.name]
            for result in steadying.compare(kind, chosen, jobs, _say):
                best = result.fixed[result.best]
                cells = [f"{run.kept:.3f} ({run.moves})" for run in result.roles.values()]
                ratio = f"{best.kept:.3f} ({kind.ratio_name(result.best)})"
                rows.add_row(kind.name, result.case.name, f"{result.case.load:g}", ratio, *cells)
                tables.append(("allowed", _steady_bars(kind, result)))
    Console().print(rows)
    Console().print("in parentheses: moves in the whole time")
    report(tables, ["simulated, level 2: no engine was run"], json)


def _steady_bars(fleet: FleetKind, result: steadying.Steady) -> list[Comparison]:
    params: dict[str, str | int | float] = {
        "fleet": fleet.name,
        "workload": result.case.name,
        "load": result.case.load,
    }
    ours = result.roles["pressure"]
    below = max(0.0, 100 * (result.fixed[result.best].kept - ours.kept))
    rows = [
        Comparison("points below fixed", params, single(below), single(result.case.points), "", 1.0)
    ]
    if result.case.moves is not None:
        moves, most = single(float(ours.moves)), single(float(result.case.moves))
        rows.append(Comparison("moves", params, moves, most, "", 1.0))
    return rows


@app.command("dop")
def dop(
    traces: Annotated[list[Path], typer.Argument(help="Mooncake's traces.")],
    requests: Requests = 3000,
    speed: Annotated[float, typer.Option(min=0.1, help="Times faster than recorded.")] = 1.0,
    jobs: Jobs = 2,
    json: Json = None,
) -> None:
    """Prefill engines of different tensor parallelism with the policy dop, beside the best uniform fleet."""
    tables = []
    with exit_codes(Console(stderr=True)):
        for path in traces:
            results = paralleling.compare(_read(path, requests), speed, jobs)
            for result in results:
                _say(f"{path.stem}, {result.name}: mean TTFT {result.ttft_s:.3f} s")
            uniform = [result for result in results if result.sizes in paralleling.UNIFORM]
            best = min(uniform, key=lambda result: result.ttft_s)
            eight = uniform[0]
            for result in results:
                if result.policy != "dop":
                    continue
                params = {"trace": path.stem, "engines": result.name}
                ours = single(result.ttft_s)
                beside = f"mean TTFT beside {best.name}"
                tables.append(
                    Comparison(beside, params, ours, single(best.ttft_s), "s", paralleling.BAR)
                )
                tables.append(
                    Comparison(
                        "mean TTFT beside eight TP1", params, ours, single(eight.ttft_s), "s"
                    )
                )
    report([("uniform", tables)], ["simulated: no engine was run"], json)


@app.command("cost")
def cost(
    requests: Annotated[int, typer.Option(min=100, help="Of each round and router.")] = 1000,
    rounds: Annotated[int, typer.Option(min=1, help="Both routers in turn.")] = 7,
    json: Json = None,
) -> None:
    """The CPU time of one decision for 64 engines, and of a request at a router with roles and at one without."""
    rows = [
        Comparison(
            f"a decision of {name}",
            {"engines": decision_cost.ENGINES},
            single(decision_cost.decision_ms(name)),
            single(decision_cost.BAR_MS),
            "ms",
            1.0,
        )
        for name in ROLES
    ]
    with exit_codes(Console(stderr=True)), terminate_as_interrupt():
        of_requests = request_cost.compare(requests, rounds, _say)
    report([("allowed", rows), ("without", [of_requests])], [], json)


@app.command("truth")
def truth(
    code: Code,
    conv: Conv,
    mocks: Annotated[
        bool, typer.Option("--mocks", help="Eight mock engines, and no vLLM.")
    ] = False,
    seconds: Annotated[float, typer.Option(min=10, help="Of each of three phases.")] = 120.0,
    load: Annotated[
        float, typer.Option(min=0.1, help="Part of the simulated capacity of the best fixed ratio.")
    ] = LOAD,
    policies: Annotated[str, typer.Option(help="Of roles, with commas.")] = ",".join(POLICIES),
    jobs: Jobs = 1,
    json: Json = None,
) -> None:
    """The simulator beside live engines: code, conversations, and code again, with each policy.

    Three vLLM engines (kv_both) on this machine, with their measured costs, or mocks. Mean TTFT and TPOT within 15 %,
    the part in time within 10 points (mocks: 3), policies in the same order. Times are real, so the machine must be
    quiet. A policy takes three phases.
    """
    stderr, names = Console(stderr=True), [name for name in policies.split(",") if name]
    with exit_codes(stderr), terminate_as_interrupt():
        traces = [_read(path, None) for path in (code, conv)]
        both = beside_live.compare(traces[0], traces[1], names, mocks, seconds, load, jobs, _say)
    for line in both.lines():
        _say(line)
    points = POINTS_OFF_MOCKS if mocks else POINTS_OFF
    report([("allowed", compared(both.live, both.simulated, points))], both.lines(), json)


def _rates(results: list[shifting.Shifted]) -> Table:
    names = ["best fixed", "worst fixed", shifting.ORACLE, *shifting.POLICIES]
    table = Table("fleet", "traces", *names, box=None, padding=(0, 2, 0, 0))
    for result in results:
        (worst, least), (best, most) = result.fixed[0], result.fixed[-1]
        cells = [f"{most:.2f} ({best})", f"{least:.2f} ({worst})"]
        cells += [f"{result.rates[name]:.2f}" for name in names[2:]]
        table.add_row(result.fleet.name, result.order, *cells)
    return table


def _fleets(name: str) -> list[FleetKind]:
    if name == "all":
        return list(FLEETS.values())
    if name not in FLEETS:
        raise BenchError(f"fleet {name!r}: must be all or one of {', '.join(FLEETS)}")
    return [FLEETS[name]]


def _both(code: Path, conv: Path, requests: int) -> dict[str, list[Waiting]]:
    """Both traces by name."""
    if code.stem == conv.stem:
        raise BenchError(f"{code} and {conv}: both are {code.stem!r} in the tables; give two names")
    return {path.stem: _read(path, requests) for path in (code, conv)}


def _read(path: Path, requests: int | None) -> list[Waiting]:
    try:
        return trace.load(path, requests)
    except TraceError as error:
        raise BenchError(str(error)) from None
