# SPDX-License-Identifier: Apache-2.0
"""`pd-connector bench scheduler`: `queue`, `qos`, `admission` and `replay`, in simulation or in
real engines, `overhead`, `hybrid`, and costs of the router."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pd_bench.command_output import exit_codes
from pd_bench.report import Compared, missed, table, write_json
from pd_bench.scheduler import classes, order, overhead, overload, plot
from pd_bench.scheduler.options import EngineKind, Live, Minutes, Quick, Seeds, tell
from pd_bench.scheduler.replay_command import replay
from pd_connector.tools.output import Json, checked

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_show_locals=False)


@app.callback()
def group() -> None:
    """Benchmarks of the scheduler's policies, in simulation or with --engine in real engines."""


app.command()(replay)


@app.command()
def queue(
    seeds: Seeds = 10,
    cached_profiles: Annotated[
        float, typer.Option(min=0.1, help="User profiles that the cache holds, of 20.")
    ] = 14.0,
    minutes: Annotated[
        float, typer.Option(min=2.0, help="Simulated time of the parts on classes and admission.")
    ] = 4.0,
    svg: Annotated[
        Path | None, typer.Option(help="Draw the lambda sweep to this file.", callback=checked)
    ] = None,
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
    parts: list[Compared] = [
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
    rows = [row for _, comparisons in parts for row in comparisons]
    if json is not None:
        write_json(json, rows)
    for row in missed(rows):
        console.print(f"[red]missed:[/] {row.name} {dict(row.params)}: ratio {row.ratio:.2f}")
    raise typer.Exit(1 if missed(rows) else 0)


def _queue_in_engines(
    kind: EngineKind,
    load: list[float] | None,
    posts: int,
    rounds: int,
    quick: bool,
    json: Path | None,
) -> None:
    from pd_bench.scheduler import live_commands

    loads = load or ((0.9,) if quick else order.LOADS)
    sizes = (4, loads, 1) if quick else (posts, loads, rounds)
    if kind is EngineKind.SGLANG:
        from pd_bench.scheduler import live_sglang
        from pd_connector.tools.launch.sglang import sglang_python

        measure = partial(live_sglang.compare, *sizes)
        live_commands.run("baseline", measure, json, check=sglang_python)
        return
    from pd_bench.scheduler import live_queue

    live_commands.run("baseline", partial(live_queue.compare, *sizes), json)


def _vllm_only(kind: EngineKind) -> None:
    """Raises BadParameter for another kind of engine. Admission is in the middleware, which exists only for vLLM."""
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
        from pd_bench.scheduler import live_commands, live_qos

        durations = (18.0, 62.0) if quick else (180.0, 80.0)
        live_commands.run("baseline", partial(live_qos.compare, *durations), json)
        return
    tell("Classes", classes.compare(range(seeds), minutes * 60), json)


@app.command()
def admission(
    seeds: Seeds = 10,
    minutes: Minutes = 4.0,
    json: Json = None,
    engine: Live = None,
    quick: Quick = False,
) -> None:
    """Refusing requests whose promise cannot be kept, at twice the capacity, beside admitting every request."""
    if engine is not None:
        _vllm_only(engine)
        from pd_bench.scheduler import live_admission, live_commands

        compare = partial(live_admission.compare, 24.0 if quick else 60.0, ("ttft", "tpot"))
        live_commands.run("baseline", compare, json)
        return
    tell("Admission at twice the capacity", overload.compare(range(seeds), minutes * 60), json)


@app.command("overhead")
def added(json: Json = None) -> None:
    """Time that our scheduler adds to a step of vLLM, with 100 and 10,000 waiting requests."""
    from pd_bench.scheduler.live import check_possible

    with exit_codes(Console(stderr=True)):
        check_possible()
        from pd_bench.scheduler import live_overhead

        tell("Time added to a step of vLLM's scheduler", live_overhead.compare(), json)


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
    from pd_bench.scheduler import sglang_steps as measured

    comparisons = measured.compare(posts, load or order.LOADS, range(seeds))
    tell("Order of waiting requests in SGLang's steps", comparisons, json)


@app.command()
def hybrid(
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Of PD_HYBRID_PREFILL_CHUNK.")] = 1024,
    json: Json = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short prompts only.")] = False,
) -> None:
    """Memory of long prefills in a real engine, with hybrid prefilling and without it."""
    from pd_bench.scheduler import hybrid as measured
    from pd_bench.scheduler import live_commands

    lengths, most = ((4096,), 8192) if quick else ((4096, 8192, 12288), 32768)
    live_commands.run("whole", partial(measured.compare, lengths, most, chunk_tokens), json)


@app.command()
def index(
    engines: Annotated[int, typer.Option(min=1, help="Engines whose caches are known.")] = 64,
    blocks: Annotated[int, typer.Option(min=500, help="Blocks of each engine.")] = 200_000,
    json: Json = None,
) -> None:
    """Memory and time of the router's index of cached blocks, against what is allowed."""
    from pd_bench.scheduler import prefixes

    tell("The router's index", prefixes.compare(engines, blocks), json)


@app.command("router-cpu")
def router_cpu(
    requests: Annotated[int, typer.Option(min=100, help="Short ones of each round.")] = 2000,
    streams: Annotated[int, typer.Option(min=10, help="Long streams of each round.")] = 100,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; one worker and two in turn.")] = 3,
    json: Json = None,
) -> None:
    """CPU time of the router for a request and a streamed event, with one worker and with two workers."""
    from pd_bench.scheduler import router_overhead

    console = Console(stderr=True)
    with exit_codes(console):
        comparisons = asyncio.run(router_overhead.compare(requests, streams, rounds, console.print))
    tell("CPU time of the router", comparisons, json)
