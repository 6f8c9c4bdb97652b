# SPDX-License-Identifier: Apache-2.0
"""`pd-connector bench`: `wire`, and the benchmarks that other distributions add."""

from __future__ import annotations

import multiprocessing
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from json import dumps
from multiprocessing.connection import Connection
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pd_connector.config import Config
from pd_connector.errors import PDConnectorError
from pd_connector.tools.cli.app import BENCHMARKS, EntryPoints, fail
from pd_connector.tools.launch.progress import working
from pd_connector.tools.output import Json

TRANSPORTS = ("shm", "tcp")
CODECS = ("raw", "fp8_e4m3", "int8")
TOKENS_PER_MIB = 8
STEP_MIB = 2
"""KV of a page of 16 tokens in all layers."""
START_S = 120.0


class Benchmarks(EntryPoints):
    """The command `wire`, and entry points of the group `pd_connector.benchmarks`; an entry point with the name `wire`
    replaces it."""

    points = BENCHMARKS

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name; None if it does not exist."""
        return self.imported(cmd_name) or super().get_command(ctx, cmd_name)


app = typer.Typer(
    cls=Benchmarks,
    no_args_is_help=True,
    add_completion=False,
    help="Measure PDConnector beside its alternatives, in one run.",
    epilog="`pip install ./ci/bench` in a clone adds handoff, states, serve, pool, router, roles, scheduler and core, and "
    "NIXL and a limited link to wire.",
)


@app.callback()
def group() -> None:
    """Measure PDConnector beside its alternatives, in one run."""


@dataclass(frozen=True)
class WireRate:
    """How KV moved in one way. Its fields are the keys of a row of the JSON file."""

    transport: str
    codec: str
    gb_per_s: float  # bytes of the cache, in bfloat16, from the load to verified pages; the median
    slowest_gb_per_s: float
    fastest_gb_per_s: float
    chunks: int  # or pieces, where pages are read in place
    runs: int


@app.command()
def wire(
    transport: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"May be repeated ({', '.join(TRANSPORTS)})."),
    ] = None,
    codec: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"May be repeated ({', '.join(CODECS)})."),
    ] = None,
    mib: Annotated[int, typer.Option(min=1, help="KV to move, in MiB.")] = 1024,
    runs: Annotated[int, typer.Option(min=1, help="Measured runs, after one that is not.")] = 5,
    json: Json = None,
) -> None:
    """Move KV between two processes of this machine without engines, and verify it.

    32 layers x 8 KV heads x 128 in bfloat16, in pages of 16 tokens that lie in random order. Exit
    code 1 if it does not arrive, not all of it is right, or a name is not known.
    """
    if mib % STEP_MIB:
        problem = f"{mib}: must be a multiple of {STEP_MIB}, whole pages"
        raise typer.BadParameter(problem, param_hint="--mib")
    rates = []
    try:
        with working(Console(stderr=True), "filling two caches") as progress:
            ways = [(t, c) for t in transport or TRANSPORTS for c in codec or CODECS]
            for t, c in ways:  # an unknown name ends the command before anything is measured
                Config.load({"transports": [t], "codec": c})
            for way in ways:
                progress(" ".join(way))
                rates.append(measure(*way, mib, runs))
    except (PDConnectorError, OSError) as error:
        fail(str(error))
    Console().print(table(rates))
    if json is not None:
        json.write_text(dumps([asdict(rate) for rate in rates], indent=1) + "\n")


def measure(transport: str, codec: str, mib: int, runs: int) -> WireRate:
    """Move the same prompt several times.

    Raises:
        PDConnectorError: it did not arrive, or is wrong.
    """
    from pd_connector.tools.wire import MoveError, WireAgent, WireCache

    settings = {"transports": [transport], "codec": codec}
    tokens = mib * TOKENS_PER_MIB
    seconds, chunks = list[float](), 0
    with _producer(settings, tokens) as calls:
        cache = WireCache("consumer", tokens)
        agent = WireAgent("consumer", cache, settings)
        try:
            if not calls.poll(START_S):
                raise MoveError(f"the producer has not started within {START_S:g} s")
            agent.meet(calls.recv())
            for number in range(runs + 1):
                cache.wipe()
                calls.send(number)
                calls.recv()
                began = time.perf_counter()
                chunks = agent.fetch(number)
                seconds.append(time.perf_counter() - began)
                if problem := cache.check(lossy=codec != "raw"):
                    raise MoveError(f"{transport} {codec}: wrong KV has arrived: {problem}")
        except EOFError:
            raise MoveError("the producer has ended; its error is above") from None
        finally:
            agent.close()
    rates = [cache.nbytes / each / 1e9 for each in seconds[1:]]
    middle = statistics.median(rates)
    return WireRate(transport, codec, middle, min(rates), max(rates), chunks, runs)


@contextmanager
def _producer(settings: dict[str, Any], tokens: int) -> Iterator[Connection]:
    """The other process, which ends with the block. It sends its address, then offers each number that it gets."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_produce, args=(there, settings, tokens), daemon=True)
    # Ctrl-C reaches both processes. This one ends the other, which would only print a traceback.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    process.start()
    signal.signal(signal.SIGINT, handler)
    there.close()
    try:
        yield here
    finally:
        process.kill()
        process.join()


def _produce(calls: Connection, settings: dict[str, Any], tokens: int) -> None:
    from pd_connector.tools.wire import WireAgent, WireCache

    agent = WireAgent("producer", WireCache("producer", tokens), settings)
    calls.send(agent.address())
    while True:
        agent.offer(calls.recv())
        calls.send(None)


def table(rates: Sequence[WireRate]) -> Table:
    """The rates as a table."""
    drawn = Table(caption="GB/s of bfloat16: median, slowest - fastest run", caption_justify="left")
    for heading in ("transport", "codec", "GB/s", "chunks"):
        drawn.add_column(heading, justify="left" if heading in ("transport", "codec") else "right")
    for rate in rates:
        spread = f"{rate.slowest_gb_per_s:.2f} - {rate.fastest_gb_per_s:.2f}"
        figures = f"{rate.gb_per_s:.2f}\n[dim]{spread}[/]", f"{rate.chunks:,}"
        drawn.add_row(rate.transport, rate.codec, *figures)
    return drawn
