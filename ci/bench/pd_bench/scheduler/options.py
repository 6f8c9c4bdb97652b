# SPDX-License-Identifier: Apache-2.0
"""The options and the output that the commands of `pd-connector bench scheduler` share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pd_bench.report import Comparison, missed, table, write_json

Seeds = Annotated[int, typer.Option(min=1, help="Repetitions with other arrivals.")]
Minutes = Annotated[float, typer.Option(min=2.0, help="Simulated time.")]


class EngineKind(StrEnum):
    """Engines that can be measured."""

    VLLM = "vllm"
    SGLANG = "sglang"


Live = Annotated[
    EngineKind | None, typer.Option("--engine", help="In real engines, not in simulation.")
]
Quick = Annotated[
    bool, typer.Option("--quick", help="With --engine: so little that the figures mean nothing.")
]


def tell(title: str, comparisons: list[Comparison], json: Path | None) -> None:
    """Print a table. If a bar was missed, exit with 1."""
    console = Console()
    console.print(f"\n[bold]{title}[/]")
    console.print(table(comparisons, "baseline"))
    if json is not None:
        write_json(json, comparisons)
    raise typer.Exit(1 if missed(comparisons) else 0)
