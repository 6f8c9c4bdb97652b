# SPDX-License-Identifier: Apache-2.0
"""The command line. Every installed package adds its own commands; each is imported only when it is called.

A command is an entry point of the group `pd_connector.commands`: a function with typer's annotations, or a whole
`typer.Typer` if the command has subcommands. A command may import an engine, which takes seconds.
`pd-connector doctor` must work even on a machine on which such an import fails.
"""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup
from typer.main import get_command

from pd_connector.errors import ConfigError
from pd_connector.extensions import Extension, load_entry_points
from pd_connector.tools.missing import brought_by_the_router, named_if_missing

COMMANDS = "pd_connector.commands"
"""The group of entry points."""
BENCHMARKS = "pd_connector.benchmarks"
"""The group of entry points for `pd-connector bench`."""
FIRST = ("demo", "check", "doctor", "pool", "audit", "bench", "profile", "key")
"""Order of the commands in the help. Commands of other packages follow, by name."""
FAILED = 1

# Newer typer has its own click, older typer uses the installed one. So their types are not named here.


class LazyGroup(TyperGroup):
    """A group with its own commands, and the entry points of `points`."""

    points = COMMANDS

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of all commands: its own first, then added commands by name. Imports none of them."""
        own = super().list_commands(ctx)
        return [*own, *(name for name in load_entry_points(self.points) if name not in own)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name, imported; None if it does not exist."""
        added = load_entry_points(self.points)
        if cmd_name in self.commands or cmd_name not in added:
            return super().get_command(ctx, cmd_name)
        command = load(added[cmd_name])
        command.name = cmd_name
        return command


class Commands(LazyGroup):
    """All commands of `pd-connector`. Each is an entry point."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of all commands, in the order of the help. Imports none of them."""
        found = super().list_commands(ctx)
        if not found:
            fail(
                f"no command is installed (entry points of group {COMMANDS}): this copy of pd-connector "
                "runs without its installed metadata, or with that of an older one; pip install it"
            )
        return [*(name for name in FIRST if name in found), *(n for n in found if n not in FIRST)]


class Benchmarks(LazyGroup):
    """All commands of `pd-connector bench`."""

    points = BENCHMARKS


def load(extension: Extension) -> Any:
    """Import one command, and return it as click's. If the import fails, the returned command reports why."""
    try:
        found = extension.load()
    except ConfigError as error:
        missing = error.__cause__.name if isinstance(error.__cause__, ImportError) else None
        extra = brought_by_the_router(missing or "")
        return _unavailable(f"{missing} is not installed: {extra}" if extra else str(error))
    if isinstance(found, typer.Typer):
        return get_command(found)
    single = typer.Typer(add_completion=False)
    single.command()(found)
    return get_command(single)


def _unavailable(reason: str) -> Any:
    """A command that takes any arguments, and fails with this reason."""
    single = typer.Typer(add_completion=False)
    anything = {"ignore_unknown_options": True, "allow_extra_args": True}

    @single.command(help=f"Not available: {reason}", context_settings=anything)
    def unavailable() -> None:
        fail(reason)

    return get_command(single)


def fail(reason: str) -> None:
    """Print the reason, and end the command with status 1."""
    stderr = Console(stderr=True, soft_wrap=True)
    stderr.print(f"failed: {reason}", style="red", markup=False, highlight=False)
    raise typer.Exit(FAILED)


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,  # keys may be among them
    help="Prefill/decode disaggregation for vLLM and SGLang.",
)


@app.callback()
def group() -> None:
    """Prefill/decode disaggregation for vLLM and SGLang."""


def main() -> None:
    """Entry point of the console script."""
    with named_if_missing():
        app()
