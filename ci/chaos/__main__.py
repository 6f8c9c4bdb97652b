# SPDX-License-Identifier: Apache-2.0
"""`python -m chaos`: faults, counted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pd_bench.command_output import exit_codes
from pd_connector.tools.launch.family import terminate_as_interrupt
from pd_connector.tools.output import checked

app = typer.Typer(add_completion=False)

BROKEN = 1
"""Exit code if a promise was broken."""


@app.command()
def chaos(
    faults: Annotated[int, typer.Option(min=1, help="Faults of each kind and transport.")] = 10_000,
    kinds: Annotated[
        list[str] | None,
        typer.Option("--fault", metavar="KIND", help="May be repeated.  [default: all]"),
    ] = None,
    transports: Annotated[
        list[str] | None,
        typer.Option("--transport", metavar="NAME", help="May be repeated.  [default: all]"),
    ] = None,
    limit_s: Annotated[
        float, typer.Option(min=1.0, help="End each kind and transport after so long.")
    ] = float("inf"),
    pairs: Annotated[
        int, typer.Option(min=1, help="Pairs of engines at a time, which share the faults.")
    ] = 4,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 1,
    engines: Annotated[
        bool, typer.Option("--engines", help="On real engines behind the router, under load.")
    ] = False,
    minutes: Annotated[float, typer.Option(min=0.1, help="How long, with --engines.")] = 10.0,
    json: Annotated[
        Path | None, typer.Option(help="Write the counts to this file.", callback=checked)
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Write the tables to this file.", callback=checked)
    ] = None,
) -> None:
    """Do faults to agents, or to engines, and compare every page, or every answer.

    Wrong, lost and held must be 0; exit code 1 if they are not. Controls run first: with guards taken off, wrong pages
    must be found.
    """
    # torch takes seconds to import.
    from chaos import report
    from chaos.bench import ChaosBench
    from chaos.campaign import Limits
    from chaos.engines import EngineFault, EnginesBench
    from chaos.faults import Fault
    from chaos.ledger import Ledger
    from chaos.ranks import SETUPS

    stdout, stderr = Console(), Console(stderr=True)
    chosen = _known(kinds, [*EngineFault] if engines else [*Fault], "--fault")
    names = _known(transports, [*SETUPS], "--transport")

    def say(line: str) -> None:
        stderr.print(line, markup=False, highlight=False)

    ledgers: list[Ledger] = []
    with exit_codes(stderr), terminate_as_interrupt():
        try:
            if engines:
                ledgers += EnginesBench([*map(EngineFault, chosen)], minutes * 60, seed).run(say)
            else:
                found = [*map(Fault, chosen)]
                bench = ChaosBench(names, found, Limits(faults, limit_s), seed, pairs)
                for ledger in bench.run(say):
                    ledgers.append(ledger)
        finally:  # the results so far of an interrupted run
            stdout.print(report.table(ledgers))
            if json:
                report.write_json(json, ledgers)
            if markdown:
                markdown.write_text(f"{report.coverage(ledgers)}\n{report.markdown(ledgers)}")
    for ledger in ledgers:
        if ledger.note:
            say(f"{ledger.fault} over {ledger.transport}: {ledger.note}")
    if not all(ledger.good for ledger in ledgers):
        raise typer.Exit(BROKEN)


def _known(given: list[str] | None, known: list[str], option: str) -> list[str]:
    for name in given or ():
        if name not in known:
            problem = f"{name!r}: must be one of {', '.join(known)}"
            raise typer.BadParameter(problem, param_hint=option)
    return list(dict.fromkeys(given or known))


if __name__ == "__main__":
    app()
