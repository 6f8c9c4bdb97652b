# SPDX-License-Identifier: Apache-2.0
"""`python -m scheduler_plugins.bench`: `queue`, `qos`, `admission` and `replay`, in simulation or in
real engines, `ablation`, `overhead` and `hybrid`."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pd_connector.tools.bench.report import Comparison, missed, table, write_json
from pd_connector.tools.cli.bench_report import exit_codes
from scheduler_plugins.bench import ablation, classes, order, overhead, overload, plot
from scheduler_plugins.bench.routers import command as routers
from scheduler_plugins.sim import trace

app = typer.Typer(add_completion=False, no_args_is_help=True)

Seeds = Annotated[int, typer.Option(min=1, help="Repetitions with other arrivals.")]
Minutes = Annotated[float, typer.Option(min=2.0, help="Simulated time.")]
Json = Annotated[Path | None, typer.Option(help="Write the figures to this file.")]


class EngineKind(StrEnum):
    """Engines that can be measured."""

    VLLM = "vllm"
    SGLANG = "sglang"


Live = Annotated[
    EngineKind | None, typer.Option("--engine", help="In real engines, not in simulation.")
]
Quick = Annotated[
    bool, typer.Option("--quick", help="With --engine: so little that the figures mean nothing.")
]


@app.callback()
def group() -> None:
    """Benchmarks of the scheduler's policies, in simulation or with --engine in real engines."""


app.add_typer(routers.app, name="router")


@app.command()
def queue(
    seeds: Seeds = 10,
    cached_profiles: Annotated[
        float, typer.Option(min=0.1, help="User profiles that the cache holds, of 20.")
    ] = 14.0,
    minutes: Annotated[
        float, typer.Option(min=2.0, help="Simulated time of the parts on classes and admission.")
    ] = 4.0,
    svg: Annotated[Path | None, typer.Option(help="Draw the lambda sweep to this file.")] = None,
    json: Json = None,
    engine: Live = None,
    load: Annotated[
        list[float] | None,
        typer.Option(min=0.1, help="With --engine: of what FCFS drains; may be repeated."),
    ] = None,
    posts: Annotated[
        int, typer.Option(min=2, help="With --engine: posts that each of 20 users is asked about.")
    ] = 50,
    rounds: Annotated[
        int, typer.Option(min=1, help="With --engine: repetitions with other arrivals.")
    ] = 3,
    quick: Quick = False,
) -> None:
    """Order, classes, admission and overhead of the queue, each against its bar.

    The order: PrefillOnly's workload (20 users x 50 posts that share the users' profiles, at a
    tenth of its lengths) at 0.7, 0.9 and 1.1 of the rate at which FCFS drains it. With --engine the
    order alone, in real engines. Exit code 1 when a bar is missed.
    """
    if engine is not None:
        _queue_in_engines(engine, load, posts, rounds, quick, json)
        return
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


def _queue_in_engines(
    kind: EngineKind,
    load: list[float] | None,
    posts: int,
    rounds: int,
    quick: bool,
    json: Path | None,
) -> None:
    from scheduler_plugins.bench import live_commands

    loads = load or ((0.9,) if quick else order.LOADS)
    sizes = (4, loads, 1) if quick else (posts, loads, rounds)
    if kind is EngineKind.SGLANG:
        from pd_connector.tools.launch.sglang import sglang_python
        from scheduler_plugins.bench import live_sglang

        measure = partial(live_sglang.compare, *sizes)
        live_commands.run("baseline", measure, json, check=sglang_python)
        return
    from scheduler_plugins.bench import live_queue

    live_commands.run("baseline", partial(live_queue.compare, *sizes), json)


def _vllm_only(kind: EngineKind) -> None:
    """Raises BadParameter for another kind of engine: admission is the middleware's, and that is
    vLLM's."""
    if kind is not EngineKind.VLLM:
        raise typer.BadParameter(f"{kind}: only `queue` is measured in it", param_hint="--engine")


@app.command()
def qos(
    seeds: Seeds = 10,
    minutes: Minutes = 4.0,
    json: Json = None,
    engine: Live = None,
    quick: Quick = False,
) -> None:
    """Premium users beside free ones who bring 3 times the capacity, and the classes' shares."""
    if engine is not None:
        _vllm_only(engine)
        from scheduler_plugins.bench import live_commands, live_qos

        durations = (18.0, 62.0) if quick else (180.0, 80.0)
        live_commands.run("baseline", partial(live_qos.compare, *durations), json)
        return
    _tell("Classes", classes.compare(range(seeds), minutes * 60), json)


@app.command("ablation")
def without(
    seeds: Seeds = 5,
    minutes: Minutes = 2.0,
    traces: Annotated[
        list[Path] | None,
        typer.Option("--trace", help="Recorded lengths, besides made ones; may be repeated."),
    ] = None,
    json: Json = None,
) -> None:
    """What each part of the scheduler is worth: with it, and with it switched off, in simulation."""
    try:
        found = ablation.compare(range(seeds), minutes * 60, traces or ())
    except trace.TraceError as error:
        raise typer.BadParameter(str(error), param_hint="--trace") from None
    _tell("Parts of the scheduler", found, json)


@app.command()
def admission(
    seeds: Seeds = 10,
    minutes: Minutes = 4.0,
    json: Json = None,
    engine: Live = None,
    quick: Quick = False,
) -> None:
    """Turning away what cannot be kept, at twice the capacity, beside letting everything in."""
    if engine is not None:
        _vllm_only(engine)
        from scheduler_plugins.bench import live_admission, live_commands

        compare = partial(live_admission.compare, 24.0 if quick else 60.0, ("ttft", "tpot"))
        live_commands.run("baseline", compare, json)
        return
    _tell("Admission at twice the capacity", overload.compare(range(seeds), minutes * 60), json)


@app.command("overhead")
def added(json: Json = None) -> None:
    """What our scheduler adds to a step of vLLM's, with 100 and 10,000 requests waiting."""
    from scheduler_plugins.bench.live import check_possible

    with exit_codes(Console(stderr=True)):
        check_possible()
        from scheduler_plugins.bench import live_overhead

        _tell("Time added to a step of vLLM's scheduler", live_overhead.compare(), json)


@app.command("sglang")
def sglang_steps(
    seeds: Seeds = 3,
    posts: Annotated[int, typer.Option(min=2, help="That each of 20 users is asked about.")] = 50,
    load: Annotated[
        list[float] | None, typer.Option(min=0.1, help="Of what FCFS drains; may be repeated.")
    ] = None,
    json: Json = None,
) -> None:
    """SGLang's own policies and ours with SGLang's cache and prefill adder, in simulated time.

    Run it with the Python that has SGLang. For real engines: `queue --engine sglang`.
    """
    from scheduler_plugins.bench import sglang_steps as measured

    found = measured.compare(posts, load or order.LOADS, range(seeds))
    _tell("Order of waiting requests in SGLang's steps", found, json)


@app.command()
def hybrid(
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Of PD_HYBRID_PREFILL_CHUNK.")] = 1024,
    json: Json = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short prompts only.")] = False,
) -> None:
    """Memory of long prefills in a real engine, with hybrid prefilling and without it."""
    from scheduler_plugins.bench import hybrid as measured
    from scheduler_plugins.bench import live_commands

    lengths, most = ((4096,), 8192) if quick else ((4096, 8192, 12288), 32768)
    live_commands.run("whole", partial(measured.compare, lengths, most, chunk_tokens), json)


@app.command()
def index(
    engines: Annotated[int, typer.Option(min=1, help="Engines whose caches are known.")] = 64,
    blocks: Annotated[int, typer.Option(min=500, help="Blocks of each engine.")] = 200_000,
    json: Json = None,
) -> None:
    """Memory and time of the router's index of cached blocks, against what is allowed."""
    from scheduler_plugins.bench import prefixes

    _tell("The router's index", prefixes.compare(engines, blocks), json)


@app.command("router-cpu")
def router_cpu(
    requests: Annotated[int, typer.Option(min=100, help="Short ones of each round.")] = 2000,
    streams: Annotated[int, typer.Option(min=10, help="Long streams of each round.")] = 100,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; one worker and two in turn.")] = 3,
    json: Json = None,
) -> None:
    """CPU time of the router for a request and a streamed event, with one worker and with two."""
    from scheduler_plugins.bench import router_overhead

    with exit_codes(Console(stderr=True)):
        found = asyncio.run(router_overhead.compare(requests, streams, rounds))
    _tell("CPU time of the router", found, json)


def _tell(title: str, found: list[Comparison], json: Path | None) -> None:
    """Print a table, and end with 1 when a bar was missed."""
    console = Console()
    console.print(f"\n[bold]{title}[/]")
    console.print(table(found, "baseline"))
    if json is not None:
        write_json(json, found)
    raise typer.Exit(1 if missed(found) else 0)


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="A trace in Mooncake's form (JSON lines).")],
    requests: Annotated[int, typer.Option(min=10, help="Take only the first so many.")] = 3000,
    cache_tokens: Annotated[
        int, typer.Option(min=512, help="Simulated: tokens that the cache holds.")
    ] = 2_000_000,
    seeds: Annotated[int, typer.Option(min=1, help="Simulated: repetitions.")] = 1,
    svg: Annotated[Path | None, typer.Option(help="Simulated: draw the lambda sweep.")] = None,
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
        Path | None, typer.Option(help="With --blocks: write the figures here.")
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
        from scheduler_plugins.bench.live import check_possible

        with exit_codes(Console(stderr=True)):
            check_possible()
            from scheduler_plugins.bench import eviction

            _tell("Hits of the prefix cache", eviction.compare(recorded, blocks, range(3)), json)
    if engine:
        from scheduler_plugins.bench import live_replay

        how = live_replay.Scale(scale, rate, priority)
        stderr = Console(stderr=True)
        with exit_codes(stderr):
            say = partial(stderr.print, markup=False, highlight=False)
            found = asyncio.run(live_replay.replay(engine, recorded, how, api_key, say))
        console.print(live_replay.table(found))
        return
    workload = order.Recorded(recorded, cache_tokens)
    console.print(table(order.compare(workload, range(seeds)), "baseline"))
    if svg is not None:
        svg.write_text(plot.svg(order.sweep(workload, range(seeds))))
        console.print(f"lambda sweep: {svg}")


if __name__ == "__main__":
    app()
