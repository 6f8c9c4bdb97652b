# SPDX-License-Identifier: Apache-2.0
"""`python -m pd_bench.scheduler replay`: a recorded workload, simulated or sent to engines."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pd_bench.command_output import exit_codes
from pd_bench.report import table
from pd_bench.scheduler import order, plot
from pd_bench.scheduler.options import tell
from pd_connector.tools.output import checked
from scheduler_plugins.sim import trace


def replay(
    file: Annotated[Path, typer.Argument(help="A trace in Mooncake's form (JSON lines).")],
    requests: Annotated[int, typer.Option(min=10, help="Take only the first so many.")] = 3000,
    cache_tokens: Annotated[
        int, typer.Option(min=512, help="Simulated: tokens that the cache holds.")
    ] = 2_000_000,
    seeds: Annotated[int, typer.Option(min=1, help="Simulated: repetitions.")] = 1,
    svg: Annotated[
        Path | None, typer.Option(help="Simulated: draw the lambda sweep.", callback=checked)
    ] = None,
    blocks: Annotated[
        int | None,
        typer.Option(min=300, help="What stays in a cache of so many of the trace's blocks."),
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Send it to this running engine; may be repeated."),
    ] = None,
    scale: Annotated[
        float, typer.Option(min=1e-4, help="With --engine: what lengths are multiplied by.")
    ] = 1.0,
    rate: Annotated[
        float | None,
        typer.Option(min=1e-3, help="With --engine: requests per second, if not as recorded."),
    ] = None,
    priority: Annotated[
        bool, typer.Option("--priority", help="With --engine: priority = length of the prompt.")
    ] = False,
    api_key: Annotated[
        str | None, typer.Option(envvar="VLLM_API_KEY", help="Of the engines.", show_default=False)
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="With --blocks: write the figures here.", callback=checked)
    ] = None,
) -> None:
    """Order of the queue on a recorded workload, at 0.7, 0.9 and 1.1 of what FCFS can do.

    The bars of `queue` are shown, but were set for its workload: the exit code is 0. With --blocks the
    order of eviction instead: hits of the whole trace, and of PrefillOnly's workload, by vLLM's scheduler
    and by ours; exit code 1 when a bar is missed. With --engine the trace goes to running engines, one
    after the other, and their times are shown.
    """
    console = Console()
    try:
        recorded = trace.read(file, None if blocks else requests)
    except trace.TraceError as error:
        raise typer.BadParameter(str(error), param_hint="FILE") from None
    if blocks is not None:
        from pd_bench.scheduler.live import check_possible

        with exit_codes(Console(stderr=True)):
            check_possible()
            from pd_bench.scheduler import eviction

            tell("Hits of the prefix cache", eviction.compare(recorded, blocks, range(3)), json)
    if engine:
        from pd_bench.scheduler import live_replay

        how = live_replay.Scale(scale, rate, priority)
        stderr = Console(stderr=True)
        with exit_codes(stderr):
            say = partial(stderr.print, markup=False, highlight=False)
            replays = asyncio.run(live_replay.replay(engine, recorded, how, api_key, say))
        console.print(live_replay.table(replays))
        return
    workload = order.Recorded(recorded, cache_tokens)
    console.print(table(order.compare(workload, range(seeds)), "baseline"))
    if svg is not None:
        svg.write_text(plot.svg(order.sweep(workload, range(seeds))))
        console.print(f"lambda sweep: {svg}")
