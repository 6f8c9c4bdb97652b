# SPDX-License-Identifier: Apache-2.0
"""`pd-connector bench plan`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pd_bench.command_output import exit_codes, printing, report
from pd_bench.plan import links_command, scaling_command, truth_command
from pd_bench.plan.searches import (
    Searched,
    front_cpu_s,
    long_enough,
    mixed,
    on_the_other_half,
    promise_of,
)
from pd_bench.plan.stock import alike, nodes
from pd_bench.report import BenchError, Comparison
from pd_bench.sample import Sample
from pd_connector.tools.output import Json
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.planner.plan import SEARCHES
from scheduler_plugins.sim import trace
from scheduler_plugins.sim.trace import TraceError

_say = printing(Console(stderr=True))

OF_EXHAUSTIVE, ON_OTHER_HALF, MOST_SIMULATED, MOST_FRONT_S = 0.97, 0.95, 300_000.0, 5.0
PAPERS = tuple(name for name in SEARCHES if name not in ("planner", "colocated"))
Traces = Annotated[list[Path], typer.Argument(help="Traces: azure_code.csv, Mooncake's.")]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="The planner's search beside an exhaustive one and papers, simulated.",
)


links_command.add(app)
scaling_command.add(app)
truth_command.add(app)


@app.command("search")
def search(traces: Traces, json: Json = None) -> None:
    """Eight H100, tensor parallelism 1, 2, 4: ours beside every mix, and on the other half of the trace; and the traces
    mixed, if there are several."""
    rows, counts = list[Comparison](), list[Comparison]()
    with exit_codes(Console(stderr=True)):
        for name, requests in _workloads(traces):
            inventory = alike()
            promise = promise_of(inventory, requests)
            ours, each = long_enough(inventory, requests, promise, "planner")
            theirs, most = long_enough(inventory, requests, promise, "exhaustive", each)
            if most > each:
                ours, each = long_enough(inventory, requests, promise, "planner", most)
            params: dict[str, str | int | float] = {
                "trace": name,
                "TTFT s": promise.ttft_s,
                "each": each,
            }
            _say(
                f"{name}, {promise.ttft_s} s, {each}: ours {_text(ours)}; exhaustive {_text(theirs)}"
            )
            rows.append(_row("rate", params, ours.per_s, theirs.per_s, OF_EXHAUSTIVE))
            counts.append(
                _row("simulated requests", params, ours.simulated, theirs.simulated, None)
            )
            both, _ = long_enough(inventory, requests, promise, "colocated", each)
            _say(f"{name}: engines that do both {_text(both)}")
            best = max(ours.per_s, both.per_s)
            rows.append(_row("recommended beside colocated", params, best, both.per_s, 1.0))
            halves, plans = on_the_other_half(inventory, requests, each, promise)
            _say(f"{name}, first half: ours {_text(plans[0])}; exhaustive {_text(plans[1])}")
            rows.append(
                _row("rate, other half", params, halves.ours, halves.exhaustive, ON_OTHER_HALF)
            )
    report([("exhaustive", rows), ("exhaustive", counts)], _NOTES, json)


@app.command("unlike")
def unlike(traces: Traces, json: Json = None) -> None:
    """A node of eight H100 and one of eight A100: ours beside the searches of papers, and what all took."""
    rows, counts = list[Comparison](), list[Comparison]()
    with exit_codes(Console(stderr=True)):
        for name, requests in _workloads(traces):
            inventory = nodes("H100", "A100")
            promise = promise_of(inventory, requests)
            ours, each = long_enough(inventory, requests, promise, "planner")
            _say(f"{name}, {promise.ttft_s} s, {each}, planner: {_text(ours)}")
            params: dict[str, str | int | float] = {
                "trace": name,
                "TTFT s": promise.ttft_s,
                "each": each,
            }
            results = dict[str, Searched]()
            for search in ("colocated", *PAPERS):
                results[search], _ = long_enough(inventory, requests, promise, search, each)
                _say(f"{name}, {search}: {_text(results[search])}")
            for paper in PAPERS:
                if results[paper].best:
                    rows.append(
                        _row(f"beside {paper}", params, ours.per_s, results[paper].per_s, 0.98)
                    )
            both = results["colocated"].per_s
            rows.append(
                _row("recommended beside colocated", params, max(ours.per_s, both), both, 1.0)
            )
            counts.append(_row("simulated requests", params, ours.simulated, MOST_SIMULATED, 1.0))
    report([("paper", rows), ("allowed", counts)], _NOTES, json)


@app.command("front")
def front(traces: Traces, json: Json = None) -> None:
    """64 GPUs of four kinds: CPU seconds of the front."""
    rows = []
    with exit_codes(Console(stderr=True)):
        for name, requests in _workloads(traces):
            took_s, mixes = front_cpu_s(nodes("H100", "A100", "L40S", "H200", gpus=16), requests)
            _say(f"{name}: {mixes} mixes in {took_s:.2f} CPU s")
            params: dict[str, str | int | float] = {"trace": name, "mixes": mixes}
            rows.append(_row("CPU s", params, took_s, MOST_FRONT_S, 1.0))
    report([("allowed", rows)], [], json)


_NOTES = [
    "simulated, level 2: no engine was run",
    "costs are estimated from data sheets",
    "a rate is results to 1.5 %, and a fleet replaces another from 2 % on",
]


def _text(search: Searched) -> str:
    name = search.best.name if search.best else "nothing"
    took = f"{search.runs} runs, {search.simulated:,} requests"
    return f"{name}, {search.per_s:.2f} a second ({took})"


def _row(
    name: str,
    params: dict[str, str | int | float],
    ours: float,
    theirs: float,
    bar: float | None,
) -> Comparison:
    higher = name not in ("simulated requests", "CPU s")
    return Comparison(name, params, Sample((ours,)), Sample((theirs,)), "", bar, higher)


def _workloads(paths: Sequence[Path]) -> Iterator[tuple[str, Sequence[Waiting]]]:
    """The traces, then their mix, if there are several."""
    try:
        traces = {path.stem: trace.load(path) for path in paths}
    except TraceError as error:
        raise BenchError(str(error)) from None
    yield from traces.items()
    if len(traces) > 1:
        yield "mix", mixed(list(traces.values()))
