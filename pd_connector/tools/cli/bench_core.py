# SPDX-License-Identifier: Apache-2.0
"""The benchmarks that need no engine: `wire`, `beside`, `reshard`, `codec`, `overhead`, `audit` and `peers`."""

from __future__ import annotations

import contextlib
import importlib.util
import secrets
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console

from pd_connector.config import KEY_VARIABLE
from pd_connector.tools.bench.flow import BenchError
from pd_connector.tools.bench.machine import Noise
from pd_connector.tools.bench.report import Comparison
from pd_connector.tools.bench.sample import Sample
from pd_connector.tools.bench.wire import measure as wires
from pd_connector.tools.bench.wire.pair import WirePair
from pd_connector.tools.bench.wire.size import TOKEN_BYTES
from pd_connector.tools.cli.bench_report import exit_codes, noise_note, report
from pd_connector.tools.launch.netns import Bed, available
from pd_connector.tools.launch.signals import terminate_as_interrupt
from pd_connector.tools.output import Json

LOCAL_TRANSPORTS = ("shm", "nixl")
LINK_TRANSPORTS = ("tcp",)
BUDGET_MS = 1.0
"""What planning and bookkeeping of one request may cost each side, in CPU time."""

TOKENS_PER_MIB = (1 << 20) // TOKEN_BYTES
STEP_MIB = 2
"""A page of 16 tokens in all layers."""
_LONGEST_PAGE = 128

Codecs = Annotated[
    list[str] | None,
    typer.Option("--codec", metavar="NAME", help=f"May be repeated ({', '.join(wires.CODECS)})."),
]


def wire(
    codec: Codecs = None,
    mib: Annotated[int, typer.Option(min=1, help="KV to move on one machine, in MiB.")] = 1024,
    link_mib: Annotated[int, typer.Option(min=1, help="The same over the link.")] = 128,
    link_mbit: Annotated[
        float, typer.Option(min=1.0, help="Rate of the link each way, in Mbit/s.")
    ] = 1000.0,
    local: Annotated[bool, typer.Option("--local", help="On one machine only.")] = False,
    runs: Annotated[int, typer.Option(min=1, help="Measured runs of each contender.")] = 5,
    warm_ups: Annotated[int, typer.Option(min=0, help="Runs before them, not counted.")] = 2,
    json: Json = None,
) -> None:
    """Move KV between two processes without engines, beside NIXL with one descriptor per page.

    32 layers x 8 KV heads x 128 in bfloat16, in pages of 16 tokens that lie in random order; on one
    machine, and between two network namespaces joined by a limited link (needs root), with a key
    and without. CPU is that of both processes together. Exit code 1 when a bar is missed, 2 when
    nothing was measured.
    """
    for name, volume in (("--mib", mib), ("--link-mib", link_mib)):
        if volume % STEP_MIB:
            problem = f"{volume}: must be a multiple of {STEP_MIB}, whole pages"
            raise typer.BadParameter(problem, param_hint=name)
    codecs = codec or list(wires.CODECS)
    for name in codecs:
        if name not in wires.CODECS:
            known = ", ".join(wires.CODECS)
            raise typer.BadParameter(f"{name!r}: must be one of {known}", param_hint="--codec")
    stderr = Console(stderr=True)
    found: list[wires.WireFindings] = []
    with exit_codes(stderr), terminate_as_interrupt():
        _check_possible(local)
        found.append(_on_machine(codecs, mib, runs, warm_ups, stderr))
        if not local:
            found.append(_over_link(codecs, link_mib, link_mbit, runs, warm_ups, stderr))
    tables = [table for one in found for table in one.tables]
    notes = [noise_note(max(one.others_cores for one in found))]
    if not local:
        notes.append(f"link: {link_mbit:,.0f} Mbit/s each way, between two network namespaces")
    report(tables, notes, json)


def beside(
    mib: Annotated[int, typer.Option(min=1, help="KV to move, in MiB.")] = 128,
    runs: Annotated[int, typer.Option(min=1, help="Measured runs of each.")] = 7,
    warm_ups: Annotated[int, typer.Option(min=0, help="Runs before them, not counted.")] = 1,
    json: Json = None,
) -> None:
    """Move KV between two processes that compute in Python, beside Python's own switch interval.

    What `switch_interval_ms` does for transfers and costs the threads that compute, on one machine,
    by shared memory and by TCP without a key.
    """
    from pd_connector.tools.bench.wire.beside import measure

    if mib % STEP_MIB:
        problem = f"{mib}: must be a multiple of {STEP_MIB}, whole pages"
        raise typer.BadParameter(problem, param_hint="--mib")
    stderr = Console(stderr=True)
    with exit_codes(stderr), terminate_as_interrupt(), WirePair(mib * TOKENS_PER_MIB) as pair:
        found = measure(pair, ("shm", "tcp"), runs, warm_ups, _say(stderr))
    report([("Python's 5 ms", found.comparisons)], [noise_note(found.others_cores)], json)


def reshard(
    tokens: Annotated[
        int, typer.Option(min=_LONGEST_PAGE, help=f"Prompt, a multiple of {_LONGEST_PAGE}.")
    ] = 2048,
    runs: Annotated[int, typer.Option(min=1, help="Measured runs of each pair.")] = 5,
    json: Json = None,
) -> None:
    """Gather and scatter between TP 1, 2, 4, 8 and pages of 16 and 128 tokens, beside torch.

    Exit code 1 when, of one pair of page sizes, the slowest pair of TP sizes has less than half
    the rate of the fastest.
    """
    # torch takes seconds to import.
    from pd_connector.tools.bench.reshard import PAGE_SIZES, TP_SIZES, measure

    if tokens % _LONGEST_PAGE:
        raise typer.BadParameter(f"{tokens}: must be a multiple of {_LONGEST_PAGE}")
    stderr = Console(stderr=True)
    with exit_codes(stderr):
        noise = Noise([])
        comparisons = measure(tokens, runs, TP_SIZES, PAGE_SIZES)
        note = noise_note(noise.cores())
    flat = [one for one in comparisons if one.bar is not None]
    pairs = [one for one in comparisons if one.bar is None]
    report([("torch", pairs), ("fastest", flat)], [note], json)


def codec(
    runs: Annotated[int, typer.Option(min=1, help="Measured runs of each.")] = 9, json: Json = None
) -> None:
    """Code bfloat16 on one core with the loops that numba compiles, beside torch's operations."""
    from pd_connector.tools.bench.codec import measure

    with exit_codes(Console(stderr=True)):
        noise = Noise([])
        comparisons = measure(runs)
        note = noise_note(noise.cores())
    report([("torch", comparisons)], [note], json)


def overhead(json: Json = None) -> None:
    """CPU time of planning and bookkeeping for a 32-layer request of 8,192 tokens, each side.

    Exit code 1 when a side needs more than a millisecond.
    """
    from pd_connector.tools.bench.overhead import planning_overhead

    with exit_codes(Console(stderr=True)):
        noise = Noise([])
        spent = dict(zip(("producer", "consumer"), planning_overhead(), strict=True))
        note = noise_note(noise.cores())
    comparisons = [
        Comparison(
            "overhead", {"side": side}, Sample((spent_ms,)), Sample((BUDGET_MS,)), "ms", bar=1.0
        )
        for side, spent_ms in spent.items()
    ]
    report([("budget", comparisons)], [note], json)


def audit(
    runs: Annotated[int, typer.Option(min=1, help="Measured runs of each.")] = 9, json: Json = None
) -> None:
    """What comparing KV costs beside writing it, and what audits cost a request that is not audited."""
    from pd_connector.tools.bench.audit import measure

    with exit_codes(Console(stderr=True)):
        noise = Noise([])
        comparisons = measure(runs)
        note = noise_note(noise.cores())
    report([("without", comparisons)], [note], json)


def peers(json: Json = None) -> None:
    """CPU time of an agent with sessions with 256 producers, over which 8,000 requests wait.

    Exit code 1 when its thread needs more than 1 ms a second at rest, or 0.2 ms a message.
    """
    from pd_connector.tools.bench.peers import MESSAGE_BUDGET_MS, REST_BUDGET_MS, measure

    with exit_codes(Console(stderr=True)):
        noise = Noise([])
        found = measure()
        note = noise_note(noise.cores())
    spent = (
        ("a second at rest", found.rest_ms, REST_BUDGET_MS),
        ("a message", found.message_ms, MESSAGE_BUDGET_MS),
    )
    comparisons = [
        Comparison("peers", {"cost of": what}, Sample((ms,)), Sample((budget_ms,)), "ms", bar=1.0)
        for what, ms, budget_ms in spent
    ]
    report([("budget", comparisons)], [note], json)


def _check_possible(local: bool) -> None:
    if importlib.util.find_spec("nixl") is None:
        raise BenchError(
            "nixl is not installed: the baseline needs it: pip install 'pd-connector[nixl]'"
        )
    if not local and (reason := available()):
        raise BenchError(
            f"no network namespaces here ({reason}): run it as root with iproute2 installed, or "
            "leave the link out with --local"
        )


def _on_machine(
    codecs: Sequence[str], mib: int, runs: int, warm_ups: int, console: Console
) -> wires.WireFindings:
    contenders = [
        wires.local_contender(transport, codec)
        for transport in LOCAL_TRANSPORTS
        for codec in codecs
    ]
    tokens = mib * TOKENS_PER_MIB
    with WirePair(tokens) as pair:
        return wires.measure(pair, "local", contenders, tokens, runs, warm_ups, _say(console))


def _over_link(
    codecs: Sequence[str], mib: int, mbit: float, runs: int, warm_ups: int, console: Console
) -> wires.WireFindings:
    contenders = [
        make(transport, codec)
        for transport in LINK_TRANSPORTS
        for codec in codecs
        for make in (wires.link_contender, wires.insecure_contender)
    ]
    tokens = mib * TOKENS_PER_MIB
    env = {KEY_VARIABLE: secrets.token_hex(32)}
    with contextlib.ExitStack() as stack:
        bed = stack.enter_context(Bed(mbit))
        pair = stack.enter_context(WirePair(tokens, env, bed.namespaces))
        return wires.measure(pair, "link", contenders, tokens, runs, warm_ups, _say(console))


def _say(console: Console) -> wires.Say:
    return lambda line: console.print(line, markup=False, highlight=False)
