# SPDX-License-Identifier: Apache-2.0
"""`pd-connector bench plan links`: which affinity the planner chooses when links between nodes are fast and slow."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pd_bench.command_output import exit_codes, report
from pd_bench.plan.searches import long_enough, promise_of
from pd_bench.plan.stock import nodes
from pd_bench.report import BenchError, Comparison
from pd_bench.sample import Sample
from pd_connector.tools.output import Json
from scheduler_plugins.planner.bound import Bounds, Workload
from scheduler_plugins.planner.front import front
from scheduler_plugins.planner.goodput import Judge, windows_of
from scheduler_plugins.planner.mix import name_of, placed
from scheduler_plugins.planner.search import Candidate, neighbours
from scheduler_plugins.sim import trace
from scheduler_plugins.sim.trace import TraceError

GBIT_PER_S = (100.0, 25.0, 10.0)
EACH = 400
"""Requests of a window. With fewer, links of 100 Gbit/s are never full."""
NO_WORSE = 0.98
"""A fleet replaces another from 2 % on, and a rate is known to 1.5 %."""
HIGH, LOW = "over all nodes", "within each node"
NOTES = [
    "simulated, level 2: no engine was run",
    "costs are estimated from data sheets",
    f"{HIGH}: prefill engines fill the nodes from the first, decode engines from the last",
    f"{LOW}: each node has both sides and half of the requests, and no KV leaves it (DistServe's low affinity)",
]


def command(
    trace_file: Annotated[Path, typer.Argument(metavar="TRACE", help="Such as azure_code.csv.")],
    json: Json = None,
    gpus: Annotated[int, typer.Option(help="H100 of each of the two nodes.")] = 4,
) -> None:
    """Two nodes of H100 with 100, 25 and 10 Gbit/s between them: the plan's choice beside the best of each affinity."""
    rows, won = list[Comparison](), set[str]()
    with exit_codes(console := Console(stderr=True)):
        try:
            requests = trace.load(trace_file)
        except TraceError as error:
            raise BenchError(str(error)) from None
        for gbit_per_s in GBIT_PER_S:
            inventory = nodes("H100", "H100", gpus=gpus, nic_gbit_per_s=gbit_per_s)
            promise = promise_of(inventory, requests)
            ours, each = long_enough(inventory, requests, promise, "planner", EACH)
            low, _ = long_enough(inventory, requests, promise, "distserve, low affinity", each)
            bounds = Bounds(inventory, Workload.of(requests, promise.tpot_s))
            judge = Judge(windows_of(requests, each), promise)
            judge.first_per_s = max(0.1, bounds.of(front(bounds)[0]) / 8)
            chosen = max(
                ours, low, key=lambda search: search.per_s
            )  # as a plan chooses from its rows
            best = {HIGH: apart(ours.best, judge, bounds), LOW: (low.per_s, _name(low.best))}
            won.add(max(best, key=lambda affinity: best[affinity][0]))
            shown = "; ".join(f"{way} {per_s:.2f} ({name})" for way, (per_s, name) in best.items())
            text = (
                f"{gbit_per_s:g} Gbit/s: chosen {chosen.per_s:.2f} ({_name(chosen.best)}); {shown}"
            )
            console.print(text, soft_wrap=True, markup=False, highlight=False)
            for way, (per_s, _) in best.items():
                params: dict[str, str | int | float] = {
                    "Gbit/s": gbit_per_s, "affinity": way, "TTFT s": promise.ttft_s, "each": each
                }  # fmt: skip
                rows.append(_row("rate", params, chosen.per_s, per_s, NO_WORSE))
    crossed = _row("affinities that are best at some rate of the link", {}, len(won), 2, 1.0)
    report([("best of the affinity", rows), ("both", [crossed])], NOTES, json)


def apart(ours: Candidate | None, judge: Judge, bounds: Bounds) -> tuple[float, str]:
    """The best mix with prefill and decode engines on nodes of their own: of the front, and of the swaps of our choice."""
    inventory, best = bounds.inventory, (0.0, "nothing")
    near = {ours.mix, *neighbours(ours.mix, inventory)} if ours else set()
    for mix in bounds.best_first({*front(bounds), *near}):
        fleet = placed(mix, inventory)
        if fleet is not None and (per_s := judge.goodput(fleet, best[0])) > best[0]:
            best = per_s, name_of(mix)
    return best


def _name(candidate: Candidate | None) -> str:
    return candidate.name if candidate else "nothing"


def _row(
    name: str, params: dict[str, str | int | float], ours: float, theirs: float, bar: float
) -> Comparison:
    theirs = max(theirs, 1e-3)  # 0: nothing keeps the promise
    return Comparison(name, params, Sample((float(ours),)), Sample((float(theirs),)), "", bar, True)


def add(app: typer.Typer) -> None:
    """Add the command to `plan`."""
    app.command("links")(command)
