# SPDX-License-Identifier: Apache-2.0
"""`pd-connector bench plan links`: which affinity the planner chooses when links between nodes are fast and slow."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pd_bench.command_output import exit_codes, report
from pd_bench.plan.searches import TPOT_S, long_enough, promise_of
from pd_bench.plan.stock import nodes
from pd_bench.report import BenchError, Comparison
from pd_bench.sample import Sample
from pd_connector.tools.output import Json
from scheduler_plugins.planner.bound import Bounds, Workload
from scheduler_plugins.planner.front import front
from scheduler_plugins.planner.goodput import Judge, windows_of
from scheduler_plugins.planner.mix import name_of, placed
from scheduler_plugins.planner.search import neighbours
from scheduler_plugins.sim import trace
from scheduler_plugins.sim.trace import TraceError

GBIT_PER_S = (100.0, 25.0, 10.0)
NO_WORSE = 0.98
"""A fleet replaces another from 2 % on, and a rate is known to 1.5 %."""
APART, TOGETHER = "apart", "on each node"
NOTES = [
    "simulated, level 2: no engine was run",
    "costs are estimated from data sheets",
    "apart: prefill engines fill the nodes from the first, decode engines from the last; on each node: both sides alike",
]


def command(
    trace_file: Annotated[Path, typer.Argument(metavar="TRACE", help="Such as azure_code.csv.")],
    json: Json = None,
    gpus: Annotated[int, typer.Option(help="H100 of each of the two nodes.")] = 8,
) -> None:
    """Two nodes of H100 with 100, 25 and 10 Gbit/s between them: our choice beside the best mix of each affinity."""
    rows, won = list[Comparison](), set[str]()
    with exit_codes(console := Console(stderr=True)):
        try:
            requests = trace.load(trace_file)
        except TraceError as error:
            raise BenchError(str(error)) from None
        for gbit_per_s in GBIT_PER_S:
            inventory = nodes("H100", "H100", gpus=gpus, nic_gbit_per_s=gbit_per_s)
            promise = promise_of(inventory, requests)
            ours, each = long_enough(inventory, requests, promise, "planner")
            bounds = Bounds(inventory, Workload.of(requests, TPOT_S))
            mixes = set(front(bounds))
            mixes |= (
                set(neighbours(ours.best.mix, inventory)) | {ours.best.mix} if ours.best else set()
            )
            judge = Judge(windows_of(requests, each), promise)
            judge.first_per_s = max(0.1, bounds.of(bounds.best_first(mixes)[0]) / 8)
            best = dict[str, tuple[float, str]]()
            for affinity in (APART, TOGETHER):
                per_s, name = 0.0, "nothing"
                for mix in bounds.best_first(mixes):
                    fleet = placed(mix, inventory, together=affinity == TOGETHER)
                    if fleet is not None and (higher := judge.goodput(fleet, per_s)) > per_s:
                        per_s, name = higher, name_of(mix)
                best[affinity] = per_s, name
            won.add(max(best, key=lambda affinity: best[affinity][0]))
            chosen = ours.best.name if ours.best else "nothing"
            found = "; ".join(
                f"{affinity} {per_s:.2f} ({name})" for affinity, (per_s, name) in best.items()
            )
            console.print(f"{gbit_per_s:g} Gbit/s: ours {ours.per_s:.2f} ({chosen}); {found}", soft_wrap=True, markup=False, highlight=False)  # fmt: skip
            for affinity, (per_s, _) in best.items():
                params = {"Gbit/s": gbit_per_s, "affinity": affinity, "TTFT s": promise.ttft_s, "each": each}  # fmt: skip
                rows.append(Comparison("rate", params, Sample((ours.per_s,)), Sample((per_s,)), "", NO_WORSE, True))  # fmt: skip
        both = Comparison("affinities that were best somewhere", {}, Sample((float(len(won)),)), Sample((2.0,)), "", 1.0, True)  # fmt: skip
    report([("best of the affinity", rows), ("crossover", [both])], NOTES, json)


def add(app: typer.Typer) -> None:
    """Add the command to `plan`."""
    app.command("links")(command)
