# SPDX-License-Identifier: Apache-2.0
"""`python -m scheduler_plugins.bench queue`, and `replay` for recorded workloads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pd_connector.bench.report import Comparison, missed, table, write_json
from scheduler_plugins.bench import classes, order, overhead, overload, plot
from scheduler_plugins.sim import trace

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def group() -> None:
    """Benchmarks of the scheduler's policies, on a simulated engine."""


@app.command()
def queue(
    seeds: Annotated[int, typer.Option(min=1, help="Repetitions with other arrivals.")] = 10,
    cached_profiles: Annotated[
        float, typer.Option(min=0.1, help="User profiles that the cache holds, of 20.")
    ] = 14.0,
    minutes: Annotated[
        float, typer.Option(min=2.0, help="Simulated time of the parts on classes and admission.")
    ] = 4.0,
    svg: Annotated[Path | None, typer.Option(help="Draw the lambda sweep to this file.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
) -> None:
    """Order, classes, admission and overhead of the queue, each against its bar.

    The order: PrefillOnly's workload (20 users x 50 posts that share the users' profiles, at a
    tenth of its lengths) at 0.7, 0.9 and 1.1 of the rate at which FCFS drains it. Exit code 1
    when a bar is missed.
    """
    console = Console()
    workload = order.Workload(cached_profiles=cached_profiles)
    chosen, duration_s = range(seeds), minutes * 60
    parts: list[tuple[str, list[Comparison]]] = [
        ("Order within a class", order.compare(workload, chosen)),
        ("Classes", classes.compare(chosen, duration_s)),
        ("Admission at twice the capacity", overload.compare(chosen, duration_s)),
        ("Time of the queue in a step", overhead.compare()),
    ]
    for title, comparisons in parts:
        console.print(f"\n[bold]{title}[/]")
        console.print(table(comparisons, "baseline"))
    if svg is not None:
        svg.write_text(plot.svg(order.sweep(workload, chosen)))
        console.print(f"lambda sweep: {svg}")
    found = [one for _, comparisons in parts for one in comparisons]
    if json is not None:
        write_json(json, found)
    for one in missed(found):
        console.print(f"[red]missed:[/] {one.name} {dict(one.params)}: ratio {one.ratio:.2f}")
    raise typer.Exit(1 if missed(found) else 0)


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="A trace in Mooncake's form (JSON lines).")],
    requests: Annotated[int, typer.Option(min=10, help="Take only the first so many.")] = 3000,
    cache_tokens: Annotated[
        int, typer.Option(min=512, help="Tokens that the cache holds.")
    ] = 2_000_000,
    seeds: Annotated[int, typer.Option(min=1, help="Repetitions with other jitter.")] = 1,
    svg: Annotated[Path | None, typer.Option(help="Draw the lambda sweep to this file.")] = None,
) -> None:
    """Order of the queue on a recorded workload, at 0.7, 0.9 and 1.1 of what FCFS can do.

    The bars of `queue` are shown, but were set for its workload: the exit code is 0.
    """
    console = Console()
    try:
        recorded = order.Recorded(trace.read(file, requests), cache_tokens)
    except trace.TraceError as error:
        raise typer.BadParameter(str(error), param_hint="FILE") from None
    console.print(table(order.compare(recorded, range(seeds)), "baseline"))
    if svg is not None:
        svg.write_text(plot.svg(order.sweep(recorded, range(seeds))))
        console.print(f"lambda sweep: {svg}")


if __name__ == "__main__":
    app()
