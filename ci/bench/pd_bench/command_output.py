# SPDX-License-Identifier: Apache-2.0
"""Shared by all benchmark commands: the output of results, and the exit codes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import typer
from rich.console import Console

from pd_bench import machine
from pd_bench.report import Comparison, Say, missed, table, write_json
from pd_connector.errors import PDConnectorError

BAR_MISSED = 1
NOT_MEASURED = 2
INTERRUPTED = 130
"""Exit codes other than 0."""

QUIET_CORES = 0.1
"""Most cores that other programs may use before the figures are called provisional."""


def printing(console: Console) -> Say:
    """Prints each line on this console, as it is."""
    return partial(console.print, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def exit_codes(console: Console) -> Iterator[None]:
    """A context that turns an error into a line and an exit code."""
    try:
        yield
    except (PDConnectorError, OSError) as error:
        said = f"not measured: {error}"
        console.print(said, style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(NOT_MEASURED) from None
    except KeyboardInterrupt:
        console.print("interrupted; all processes have been ended")
        raise typer.Exit(INTERRUPTED) from None


def report(
    tables: Sequence[tuple[str, Sequence[Comparison]]], notes: Sequence[str], json: Path | None
) -> None:
    """Print tables, each with the name of its baseline, and notes for their reader.

    Raises typer.Exit if a bar was missed.
    """
    console = Console()
    for baseline, comparisons in tables:
        console.print(table(comparisons, baseline))
    for note in [*(f"{topic}: {words}" for topic, words in machine.describe().items()), *notes]:
        console.print(note, soft_wrap=True, highlight=False, markup=False)
    comparisons = [comparison for _, rows in tables for comparison in rows]
    if json is not None:
        try:
            write_json(json, comparisons)
        except OSError as error:
            Console(stderr=True).print(f"not written: {error}", style="red", markup=False)
            raise typer.Exit(NOT_MEASURED) from None
    if missed(comparisons):
        raise typer.Exit(BAR_MISSED)


def noise_note(others_cores: float) -> str:
    """A note on whether the machine was quiet."""
    verdict = "quiet" if others_cores <= QUIET_CORES else "not quiet: the figures are provisional"
    return f"cores used by other programs meanwhile: {others_cores:.2f} ({verdict})"
