# SPDX-License-Identifier: Apache-2.0
"""The command line: a table of commands, each imported only when it is asked for.

A command may import an engine, which takes seconds; `pd-connector doctor` must work on a machine
where such an import dies.
"""

from __future__ import annotations

import importlib
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

# Name on the command line -> "module:attribute", either a function with typer's annotations or a
# whole `typer.Typer` for a command with subcommands. The order is that of the help.
COMMANDS = {
    "demo": "pd_connector.tools.cli.demo:demo",
    "doctor": "pd_connector.tools.cli.doctor:doctor",
    "bench": "pd_connector.tools.cli.bench:app",
    "profile": "scheduler_plugins.profile.command:profile",
    "key": "pd_connector.tools.cli.key:key",
}


# Newer typer carries its own click, older typer uses the installed one: their types are not named here.


def load(target: str) -> Any:
    """Import one "module:attribute" and return it as a click command."""
    module, _, attribute = target.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    if isinstance(found, typer.Typer):
        return get_command(found)
    single = typer.Typer(add_completion=False)
    single.command()(found)
    return get_command(single)


class LazyGroup(TyperGroup):
    """A group whose commands come from `COMMANDS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        command = load(COMMANDS[cmd_name])
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=LazyGroup,
    add_completion=False,
    no_args_is_help=True,
    help="Prefill/decode disaggregation for vLLM and SGLang.",
)


@app.callback()
def group() -> None:
    """Prefill/decode disaggregation for vLLM and SGLang."""


def main() -> None:
    """Entry point of the console script."""
    app()
