# SPDX-License-Identifier: Apache-2.0
"""`pd-connector bench router`: the router in front of mock engines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pd_bench.command_output import BAR_MISSED, exit_codes, printing, report
from pd_bench.report import BenchError
from pd_bench.router import deaths as dying
from pd_bench.router import overload as overloaded
from pd_bench.router import processes as multiplied
from pd_bench.router import rotations, scaled, truth, truth_engines
from pd_bench.router import two as doubled
from pd_bench.router.contenders import OURS, Ours, peers, version
from pd_connector.tools.launch.family import terminate_as_interrupt
from pd_connector.tools.output import Json
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.router.policies.registry import DEFAULT
from scheduler_plugins.sim.trace import TraceError

CAPACITY = 1.6
"""Capacity of 4 + 4 engines, as a multiple of the conversation trace's own rate. With `conductor`, the prefill engines
are busy for 62 % of the time in simulation."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="The router in front of 4 + 4 mock engines, under a recorded trace.",
)

Trace = Annotated[Path, typer.Argument(help="A trace in Mooncake's form (JSON lines).")]
Policy = Annotated[str, typer.Option(help="Of our router.")]
Requests = Annotated[int, typer.Option(min=20, help="Only the first N requests of the trace.")]
Rounds = Annotated[int, typer.Option(min=1, help="Repetitions.")]
Speed = Annotated[float, typer.Option(min=0.5, help="Times faster than the trace's time.")]


@app.command("peers")
def beside_peers(
    trace: Trace,
    vllm_env: Annotated[
        Path | None,
        typer.Option(help="Virtual environment with vllm-router.", show_default=False),
    ] = None,
    sglang_env: Annotated[
        Path | None,
        typer.Option(help="Virtual environment with sglang-router.", show_default=False),
    ] = None,
    policy: Policy = DEFAULT,
    requests: Requests = rotations.WARM.end,
    rounds: Rounds = 1,
    speed: Speed = 4.0,  # the time of two cores for a request counts this many times
    json: Json = None,
) -> None:
    """Our router beside vLLM's and SGLang's, and the simulator beside our router.

    Each router in turn gets fresh engines and the same requests. Bars hold for the requests 1-2,500 and
    5,001-7,500; with fewer --requests all of them are one window without bars. A round takes 10 minutes for each
    router (two are SGLang's), with --requests 2500 3 minutes. Exit code 1 when a bar is missed, 2 when nothing was
    measured.
    """
    stderr = Console(stderr=True)
    with exit_codes(stderr), terminate_as_interrupt():
        others = peers(vllm_env, sglang_env)
        if not others:
            raise BenchError("no peer to compare with: name --vllm-env, --sglang-env, or both")
        recorded = _read(trace, requests)
        windows = rotations.windows(len(recorded))
        # Started as users start it, so the router learns the engines' costs.
        contenders = [Ours(OURS, policy=policy, profiled=False), *others]
        sent = scaled.sent(recorded)
        measured = rotations.rotate(contenders, sent, windows, rounds, speed, printing(stderr))
        seen = rotations.seen(measured[OURS], windows)
        said = truth.simulated(recorded, policy, [range(span.first, span.end) for span in windows])
    envs = (("vllm-router", vllm_env), ("sglang-router", sglang_env))
    notes = [f"{name} {version(env, name)}" for name, env in envs if env is not None]
    off = [
        row
        for window, live, model in zip(windows, seen, said, strict=True)
        for row in truth.compared(window.name, live, model)
    ]
    tables = [*rotations.compared(measured, windows), ("allowed", off)]
    report(tables, [*notes, _played(speed)], json)


@app.command("truth")
def simulator_beside_live(
    trace: Trace,
    policy: Policy = DEFAULT,
    requests: Requests = 1000,
    speed: Speed = 8.0,
    engines: Annotated[
        bool,
        typer.Option("--engines", help="Real vLLM engines, one of each side, instead of mocks."),
    ] = False,
    json: Json = None,
) -> None:
    """The simulator beside our router: hit within 2 points, mean TTFT within 15 %.

    A request costs client, router and engines some milliseconds of real time, which count `speed` fold.
    Real engines have the trace's lengths divided by 16, at 0.6 of what they can do, whatever the `speed`.
    """
    stderr = Console(stderr=True)
    if engines:
        with exit_codes(stderr), terminate_as_interrupt():
            live, model = truth_engines.compare(trace, requests, policy, printing(stderr))
        report(
            [("allowed", truth.compared(f"1-{requests:,}", live, model))], _both(live, model), json
        )
        return
    with exit_codes(stderr), terminate_as_interrupt():
        recorded = _read(trace, requests)
        window = rotations.Window(0, len(recorded))
        ours, sent = Ours(OURS, policy=policy), scaled.sent(recorded)
        run = rotations.measure(ours, sent, [window], speed, printing(stderr))
        (live,) = rotations.seen([run], [window])
        (model,) = truth.simulated(recorded, policy, [range(len(recorded))])
    rows = truth.compared(window.name, live, model)
    report([("allowed", rows)], [*_both(live, model), _played(speed)], json)


@app.command("overload")
def twice_the_load(
    trace: Trace,
    requests: Requests = 2500,  # with fewer, admitted requests are served before queues are long
    rounds: Rounds = 3,
    speed: Speed = 3.0,
    json: Json = None,
) -> None:
    """Twice what the engines can do, with promises of TTFT and TPOT compared with admitting all."""
    stderr = Console(stderr=True)
    with exit_codes(stderr), terminate_as_interrupt():
        sent = scaled.sent(_read(trace, requests, rate=2 * CAPACITY))
        comparisons = overloaded.compare(sent, rounds, speed, printing(stderr))
    promise = (
        f"in time: {overloaded.TTFT_S:g} s to the first token, {overloaded.TPOT_S:g} s a token"
    )
    report([("lets all in", comparisons)], [promise, _played(speed)], json)


@app.command("two")
def two_routers(
    trace: Trace,
    policy: Policy = DEFAULT,
    requests: Requests = 1000,
    rounds: Rounds = 3,
    speed: Speed = 5.0,  # routers tell each other every 50 ms of real time
    json: Json = None,
) -> None:
    """Two routers in front of the same engines at 0.8 of what these can do, beside one."""
    stderr = Console(stderr=True)
    with exit_codes(stderr), terminate_as_interrupt():
        sent = scaled.sent(_read(trace, requests, rate=0.8 * CAPACITY))
        ours = Ours(OURS, policy=policy)
        comparisons = doubled.compare(ours, sent, rounds, speed, printing(stderr))
    report([("one router", comparisons)], [_played(speed)], json)


@app.command("workers")
def several_processes(
    trace: Trace,
    policy: Policy = DEFAULT,
    processes: Annotated[int, typer.Option(min=2, help="Processes of the router.")] = 4,
    baseline: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the packages of another version; otherwise one process.",
            show_default=False,
        ),
    ] = None,
    requests: Requests = 1000,
    rounds: Rounds = 3,
    speed: Speed = 5.0,
    json: Json = None,
) -> None:
    """A router in several processes beside another version, or one process: TTFT, CPU time of all processes, memory.

    CPU time counts what the router does beside requests, too. Exit code 1 when a bar is missed.
    """
    stderr = Console(stderr=True)
    with exit_codes(stderr), terminate_as_interrupt():
        sent = scaled.sent(_read(trace, requests, rate=0.8 * CAPACITY))
        rows = multiplied.compare(
            policy, processes, baseline, sent, rounds, speed, printing(stderr)
        )
    report([("baseline", rows)], [_played(speed)], json)


@app.command("deaths")
def killed_engines(
    trace: Trace,
    requests: Requests = 2000,
    every_s: Annotated[
        float, typer.Option(min=6.0, help="Real seconds from one death to the next.")
    ] = 10.0,
    speed: Speed = 2.0,
) -> None:
    """An engine is killed every 10 s, and started again 5 s later: nothing lost, no token twice or
    missing. Exit code 1 otherwise."""
    stderr = Console(stderr=True)
    with exit_codes(stderr), terminate_as_interrupt():
        sent = scaled.sent(_read(trace, requests, answers=1))
        deaths = dying.measure(Ours(OURS), sent, speed, every_s, printing(stderr))
    console = Console()
    for what, value in (
        ("requests", deaths.requests),
        ("engines killed", deaths.killed),
        ("streams that went on at another engine", f"{deaths.resumed:.0f}"),
        ("lost", len(deaths.lost)),
        ("answers with tokens twice or missing", deaths.miscounted),
        *(("lost", f"{outcome.status} {outcome.error}") for outcome in deaths.lost[:5]),
    ):
        console.print(f"{what}: {value}", markup=False, highlight=False)
    raise typer.Exit(BAR_MISSED if deaths.lost or deaths.miscounted else 0)


def _read(
    path: Path, requests: int, rate: float = 1.0, answers: int = scaled.SCALE
) -> list[Waiting]:
    try:
        return scaled.read(path, requests, rate, answers)
    except TraceError as error:
        raise BenchError(str(error)) from None


def _both(live: truth.Seen, model: truth.Seen) -> list[str]:
    return [
        f"{name}: mean TTFT {seen.ttft_s:.3f} s, hit {seen.hit:.3f}"
        for name, seen in (("live", live), ("simulated", model))
    ]


def _played(speed: float) -> str:
    return f"times are those of the trace, which was played {speed:g} times faster"
