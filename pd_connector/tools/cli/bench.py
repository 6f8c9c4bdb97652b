# SPDX-License-Identifier: Apache-2.0
"""`pd-connector bench`: `wire`, and the benchmarks that other distributions add."""

from __future__ import annotations

import typer

from pd_connector.tools.cli.app import BENCHMARKS, EntryPoints
from pd_connector.tools.cli.bench_wire import wire


class Benchmarks(EntryPoints):
    """`wire`, and entry points of the group `pd_connector.benchmarks`."""

    points = BENCHMARKS


app = typer.Typer(
    cls=Benchmarks,
    no_args_is_help=True,
    add_completion=False,
    help="Measure PDConnector beside its alternatives, in one run.",
    epilog="`pip install ./ci/bench` in a clone adds handoff, serve, pool, router, roles, scheduler and core.",
)


@app.callback()
def group() -> None:
    """Measure PDConnector beside its alternatives, in one run."""


app.command()(wire)
