# SPDX-License-Identifier: Apache-2.0
"""`pd-connector bench pool`: the KV pool beside what it replaces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pd_connector.tools.bench.pool.raw import RawBench
from pd_connector.tools.cli.bench_report import exit_codes, noise_note, report
from pd_connector.tools.launch.signals import terminate_as_interrupt
from pd_connector.tools.output import Json


def pool(
    raw: Annotated[
        bool, typer.Option("--raw", help="Only objects of another process, without engines.")
    ] = False,
    peer_env: Annotated[Path, typer.Option(help="Virtual environment that has Mooncake.")] = Path(
        "mooncake-env"
    ),
    objects: Annotated[
        int, typer.Option(min=1, help="With --raw: objects of 8 MiB put and got at once.")
    ] = 32,
    runs: Annotated[int, typer.Option(min=1, help="Measured runs of each side.")] = 5,
    warm_ups: Annotated[int, typer.Option(min=0, help="Runs before them, not counted.")] = 1,
    json: Json = None,
) -> None:
    """The KV pool of a host, beside Mooncake's store, computing, and the engine's own prefix cache.

    Both sides take turns in one run. Exit code 1 when a bar is missed, 2 when nothing was measured.
    """
    stderr = Console(stderr=True)

    def say(line: str) -> None:
        stderr.print(line, markup=False, highlight=False, soft_wrap=True)

    with exit_codes(stderr), terminate_as_interrupt():
        found = RawBench(peer_env, objects, runs, warm_ups).measure(say)
    report(found.tables, [*found.notes, noise_note(found.others_cores)], json)
