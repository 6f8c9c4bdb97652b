# SPDX-License-Identifier: Apache-2.0
"""`python ci/measure`: `core` for the connector's parts, `scheduler` for its policies."""

import typer

from measure.core import app as core
from measure.scheduler import app as scheduler

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_show_locals=False)
app.add_typer(core.app, name="core")
app.add_typer(scheduler.app, name="scheduler")


@app.callback()
def group() -> None:
    """Benchmarks that watch this project's own bars."""
