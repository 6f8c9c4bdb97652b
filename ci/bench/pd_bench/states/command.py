# SPDX-License-Identifier: Apache-2.0
"""`pd-connector bench states`: recurrent states, drafts and context parallelism, each against its bar."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from pd_bench.command_output import exit_codes, noise_note, report
from pd_bench.handoff import vllm
from pd_bench.harness import VLLM, require
from pd_bench.machine import Noise
from pd_bench.netns import available
from pd_bench.report import BenchError, Compared
from pd_bench.states.rows import OVER_LINK, Row, drafts, over_link
from pd_connector.tools.launch.family import terminate_as_interrupt
from pd_connector.tools.launch.service import log_folder
from pd_connector.tools.output import Json


def states(
    row: Annotated[
        list[Row] | None,
        typer.Option(help="What to measure; may be repeated (all).", show_default=False),
    ] = None,
    link_mbit: Annotated[
        float, typer.Option(min=1.0, help="Rate of the link each way, in Mbit/s.")
    ] = 1000.0,
    runs: Annotated[int, typer.Option(min=1, help="Measured runs of each side.")] = 5,
    warm_ups: Annotated[int, typer.Option(min=0, help="Runs before them, not counted.")] = 1,
    json: Json = None,
) -> None:
    """Handoffs of Qwen3-Next over a link, of a draft model, and of ranks that share tokens.

    `link`: beside NixlConnector. `bytes`: beside what is wanted. `layouts`: TP 2 to TP 1 and another
    order of convolutions, beside engines alike. `step`: from a landed state to the next step.
    `stripes`: DCP 4 to 1, without engines. `drafts`: accepted, beside one engine. Rows with a link
    need root. Exit code 1 when a bar is missed, 2 when nothing was measured.
    """
    rows = list(dict.fromkeys(row or Row))
    stderr = Console(stderr=True)
    tables: list[Compared] = []
    notes: list[str] = []
    with exit_codes(stderr), terminate_as_interrupt():
        _check_possible(rows)
        logs = log_folder()
        stderr.print(f"engines' logs in {logs}", highlight=False)
        if linked := [each for each in rows if each in OVER_LINK]:
            linked_tables, notes = over_link(linked, link_mbit, runs, warm_ups, logs, stderr)
            tables += linked_tables
            notes.append(f"link: {link_mbit:,.0f} Mbit/s each way, between network namespaces")
        if Row.STRIPES in rows:
            from pd_bench.states import stripes  # torch takes seconds to import

            noise = Noise()
            tables.append(("of a page", [stripes.measure(runs, warm_ups)]))
            notes.append(f"{Row.STRIPES}: {noise_note(noise.cores())}")
        if Row.DRAFTS in rows:
            tables.append(("one engine", [drafts(logs, stderr)]))
    report(tables, notes, json)


def _check_possible(rows: list[Row]) -> None:
    """Raises BenchError that names what is missing."""
    require(VLLM)
    if Row.LINK in rows and (problem := vllm.LINK.problem()):
        raise BenchError(problem)
    if OVER_LINK & {*rows} and (reason := available()):
        others = ", ".join(each for each in Row if each not in OVER_LINK)
        raise BenchError(
            f"no network namespaces here ({reason}): run it as root with iproute2 installed, or "
            f"measure other rows ({others})"
        )
