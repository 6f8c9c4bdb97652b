# SPDX-License-Identifier: Apache-2.0
"""The commands with `--engine`: they use real engines instead of simulated engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from rich.console import Console

from pd_bench.command_output import exit_codes, noise_note, printing, report
from pd_bench.report import Say
from pd_bench.scheduler.live import Findings, check_possible
from pd_connector.tools.launch.family import terminate_as_interrupt
from pd_connector.tools.launch.service import log_folder

Measure = Callable[[Path, Say], Awaitable[Findings]]


def run(
    baseline: str,
    measure: Measure,
    json: Path | None,
    check: Callable[[], object] = check_possible,
) -> None:
    """Carry a comparison out and report it.

    Args:
        baseline: name of the baseline's column.
        measure: gets a folder for logs, and a function that takes progress messages.
        check: raises PDConnectorError if no such engine can be started.

    Raises:
        typer.Exit: with 1 when a bar was missed, with 2 when nothing was measured.
    """
    stderr = Console(stderr=True)

    say = printing(stderr)

    async def measured() -> Findings:
        return await measure(log_folder(), say)

    with exit_codes(stderr), terminate_as_interrupt():
        check()
        findings = asyncio.run(measured())
    notes = [*findings.notes, noise_note(findings.others_cores)]
    report([(baseline, findings.comparisons)], notes, json)
