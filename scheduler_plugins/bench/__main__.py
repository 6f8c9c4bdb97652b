# SPDX-License-Identifier: Apache-2.0
"""`python -m scheduler_plugins.bench`: benchmarks of scheduling."""

import typer

from scheduler_plugins.bench.command import app as router
from scheduler_plugins.bench.roles.command import app as roles

app = typer.Typer(no_args_is_help=True, add_completion=False)
app.add_typer(router, name="router")
app.add_typer(roles, name="roles")

if __name__ == "__main__":
    app()
