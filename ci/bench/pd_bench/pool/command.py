# SPDX-License-Identifier: Apache-2.0
"""`pd-connector bench pool`: the KV pool beside what it replaces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pd_bench.command_output import exit_codes, noise_note, printing, report
from pd_bench.machine import Noise
from pd_bench.pool import cross as both_kinds
from pd_bench.pool import disk as disk_reads
from pd_bench.pool import far as far_store
from pd_bench.pool import far_engines, far_hits, lookups, rivals
from pd_bench.pool import sglang as sglang_engines
from pd_bench.pool import slow as slow_stores
from pd_bench.pool import trace as hit_rates
from pd_bench.pool.engines import need_vllm, running
from pd_bench.pool.folders import own_folder
from pd_bench.pool.measure import PROMPT_TOKENS, EngineMeasurement
from pd_bench.pool.raw import RawBench
from pd_bench.report import BenchError, Compared
from pd_connector.tools.launch.family import terminate_as_interrupt
from pd_connector.tools.output import Json


def pool(
    raw: Annotated[
        bool, typer.Option("--raw", help="Objects of another process, without engines.")
    ] = False,
    lookup: Annotated[
        bool, typer.Option("--lookup", help="Look-ups, and starts of the store, without engines.")
    ] = False,
    engines: Annotated[
        bool, typer.Option("--engines", help="Four vLLM engines, one of them without a pool.")
    ] = False,
    slow: Annotated[
        bool,
        typer.Option(
            "--slow", help="Five vLLM engines, three of them with a store that is slow or silent."
        ),
    ] = False,
    sglang: Annotated[
        bool,
        typer.Option("--sglang", help="Three SGLang engines, one of them without a linker."),
    ] = False,
    row: Annotated[
        list[sglang_engines.Row] | None,
        typer.Option(help="With --sglang: measure this row alone. Can be repeated."),
    ] = None,
    cross: Annotated[
        Path | None,
        typer.Option(
            help="A vLLM and an SGLang engine behind our router play this trace (Mooncake's JSON lines); each is killed once."
        ),
    ] = None,
    requests: Annotated[int, typer.Option(min=4, help="With --cross: requests of the trace.")] = 40,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Hit rates of this trace (Mooncake's JSON lines), with four processes that save. With --far hits or hits-mooncake: the trace that four hosts play."
        ),
    ] = None,
    disk: Annotated[
        Path | None,
        typer.Option(
            help="Folder on the disk whose reads are measured; the pool's files go into one below it."
        ),
    ] = None,
    far: Annotated[
        str,
        typer.Option(
            help=f"The pool across hosts, with stores of its own: all, or some of {', '.join((*far_store.ROWS, *far_engines.ROWS, *far_store.HITS))} with commas. {far_engines.ROWS[0]} to {far_engines.ROWS[-1]} start engines on two hosts (namespaces, as root)."
        ),
    ] = "",
    peer_env: Annotated[Path, typer.Option(help="Virtual environment that has Mooncake.")] = Path(
        "mooncake-env"
    ),
    stores: Annotated[
        Path | None,
        typer.Option(
            help="Virtual environment that has LMCache, Mooncake's store and your vLLM: six engines, two for each store."
        ),
    ] = None,
    objects: Annotated[int, typer.Option(min=1, help="Objects of 8 MiB put and got at once.")] = 32,
    prompt_tokens: Annotated[
        int, typer.Option(min=256, max=4000, help="Prompt length for the time to the first token.")
    ] = PROMPT_TOKENS,
    chunks: Annotated[
        int, typer.Option(min=1, help="Chunks that are there when a store starts.")
    ] = 100_000,
    runs: Annotated[int, typer.Option(min=1, help="Measured runs of each side.")] = 5,
    warm_ups: Annotated[int, typer.Option(min=0, help="Runs before them, not counted.")] = 1,
    json: Json = None,
) -> None:
    """The KV pool of a host, beside Mooncake's store, computing, and the engine's own prefix cache.

    Everything but slow stores, a trace, a disk, a far store, SGLang's engines and other stores' engines, or the parts that are named. Both sides take turns in one run. Exit code 1 when a bar is missed, 2 when nothing was measured.
    """
    stderr = Console(stderr=True)

    say = printing(stderr)
    everything = not (
        raw or lookup or engines or trace or disk or slow or stores or far or sglang or cross
    )
    tables: list[Compared] = []
    notes: list[str] = []
    noise = Noise()
    with exit_codes(stderr), terminate_as_interrupt():
        if engines or slow or everything:
            need_vllm()  # before minutes are spent on the other parts
        if raw or everything:
            objects_found = RawBench(peer_env, objects, runs, warm_ups).measure(say)
            tables += objects_found.tables
            notes += objects_found.notes
        if lookup or everything:
            tables.append(("limit", lookups.measure(chunks, runs, warm_ups, say)))
        if trace and not far:
            tables.append(("exact LRU", hit_rates.measure(trace, say)))
        if disk:
            with own_folder(disk) as folder:
                rates = disk_reads.measure(folder, objects, runs, warm_ups, say)
            tables.append(("raw reads", rates))
        if far:
            tables += _across_hosts(far, trace, objects, prompt_tokens, runs, warm_ups, stderr, say)
        if slow:
            with slow_stores.running(stderr) as with_faults:
                tables.append(("no pool", with_faults.measure(prompt_tokens, say)))
        if stores:
            with rivals.running(stores, stderr) as beside:
                tables += beside.measure(prompt_tokens, runs, warm_ups, say)
        if sglang:
            rows = row or list(sglang_engines.Row)
            with sglang_engines.running(rows, stderr) as of_sglang:
                tables += sglang_engines.measure(of_sglang, rows, runs, warm_ups, say)
            notes.append(sglang_engines.NOT_COMPARED)
        if cross:
            with both_kinds.running(stderr) as host:
                right, answered = both_kinds.measure(host, cross, requests, say)
                tables.append(("all", right))
                notes += answered
        if engines or everything:
            with running(stderr) as started:
                measurement = EngineMeasurement(started, prompt_tokens, runs, warm_ups, say)
                measured = measurement.measure()
            tables += measured.tables
            notes += measured.notes
    report(tables, [*notes, noise_note(noise.cores())], json)


def _across_hosts(
    far: str,
    trace: Path | None,
    objects: int,
    prompt_tokens: int,
    runs: int,
    warm_ups: int,
    console: Console,
    say: Callable[[str], None],
) -> list[Compared]:
    """The rows of `--far`. All that they need is looked for before one takes minutes."""
    rows = far_store.chosen(far, far_engines.ROWS)
    played = [name for name in rows if name in far_store.HITS]
    with_engines = [name for name in rows if name in far_engines.ROWS]
    if played and trace is None:
        raise BenchError(f"--far {played[0]}: needs --trace FILE, Mooncake's JSON lines")
    for name in with_engines:
        far_engines.check_possible(name)
    tables: list[Compared] = []
    if own := [name for name in rows if name in far_store.ROWS]:
        tables += far_store.measure(own, objects, runs, warm_ups, say)
    if trace is not None:
        tables += [far_hits.measure(name, trace, say) for name in played]
    for name in with_engines:
        tables += far_engines.measure(name, prompt_tokens, runs, warm_ups, console, say)
    return tables
