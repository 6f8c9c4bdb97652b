# SPDX-License-Identifier: Apache-2.0
"""`pd-connector bench wire`: KV between two processes, without engines."""

from __future__ import annotations

import contextlib
import importlib.util
import secrets
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console

from pd_bench.command_output import exit_codes, noise_note, printing, report
from pd_bench.netns import Bed, available
from pd_bench.report import BenchError
from pd_bench.wire import measure as wires
from pd_bench.wire.pair import WirePair
from pd_connector.config import KEY_VARIABLE
from pd_connector.tools.cli.bench import STEP_MIB, TOKENS_PER_MIB
from pd_connector.tools.launch.family import terminate_as_interrupt
from pd_connector.tools.output import Json

LOCAL_TRANSPORTS = ("shm", "nixl")
LINK_TRANSPORTS = ("tcp",)

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
    and without. CPU time is of both processes together. Exit code 1 when a bar is missed, 2 when
    nothing was measured.
    """
    for name, volume in (("--mib", mib), ("--link-mib", link_mib)):
        if volume % STEP_MIB:
            problem = f"{volume}: must be a multiple of {STEP_MIB}, whole pages"
            raise typer.BadParameter(problem, param_hint=name)
    codecs = codec or list(wires.CODECS)
    for name in codecs:
        if name not in wires.CODECS:
            names = ", ".join(wires.CODECS)
            raise typer.BadParameter(f"{name!r}: must be one of {names}", param_hint="--codec")
    stderr = Console(stderr=True)
    findings: list[wires.WireFindings] = []
    with exit_codes(stderr), terminate_as_interrupt():
        _check_possible(local)
        findings.append(_on_machine(codecs, mib, runs, warm_ups, stderr))
        if not local:
            findings.append(_over_link(codecs, link_mib, link_mbit, runs, warm_ups, stderr))
    tables = [table for finding in findings for table in finding.tables]
    notes = [noise_note(max(finding.others_cores for finding in findings))]
    if not local:
        notes.append(f"link: {link_mbit:,.0f} Mbit/s each way, between two network namespaces")
    report(tables, notes, json)


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
        return wires.measure(pair, "local", contenders, tokens, runs, warm_ups, printing(console))


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
        return wires.measure(pair, "link", contenders, tokens, runs, warm_ups, printing(console))
