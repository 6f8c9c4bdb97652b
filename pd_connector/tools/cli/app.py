# SPDX-License-Identifier: Apache-2.0
"""The command line. Every installed package adds its own commands; each is imported only when it is called.

A command is an entry point of the group `pd_connector.commands`: a function with typer's annotations, or a whole
`typer.Typer` if the command has subcommands. A command may import an engine, which takes seconds.
`pd-connector doctor` must work even on a machine on which such an import fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NoReturn

import typer
from rich.markup import escape
from typer.main import get_command

from pd_connector.errors import ConfigError
from pd_connector.extensions import Extension, load_entry_points
from pd_connector.tools.command_line import SETTINGS, LateGroup, Version, run
from pd_connector.tools.missing import brought_by_an_extra

COMMANDS = "pd_connector.commands"
"""The group of entry points."""
BENCHMARKS = "pd_connector.benchmarks"
"""The group of entry points for `pd-connector bench`."""
FAILED = 1


class EntryPoints(LateGroup):
    """A group with its own commands, and the entry points of `points`."""

    points = COMMANDS

    def names(self) -> Iterable[str]:
        """Names of all commands: those of `lines` first, then added commands by name. Imports none of them."""
        points = load_entry_points(self.points)
        return [*(name for name in self.lines if name in points), *points]

    def imported(self, name: str) -> Any:
        """The command of this name; None if it does not exist."""
        added = load_entry_points(self.points)
        if name not in added:
            return None
        command = load(added[name])
        command.name = name
        return command


class Commands(EntryPoints):
    """All commands of `pd-connector`. Each is an entry point."""

    lines: ClassVar[dict[str, str]] = {
        "demo": "Start prefill, decode and router on this machine, send prompts, and check every answer.",
        "check": "Check what --kv-transfer-config says, without an engine.",
        "doctor": "Check versions, transports, network, GPU, limits and models, and say what to do.",
        "pool": "Show, check or empty the KV pool of this user on this host.",
        "audit": "Have every pair of these engines compare one prompt, and print the verdict.",
        "bench": "Measure PDConnector beside its alternatives, in one run.",
        "profile": "Time prefills, decode steps and steps with both on a running vLLM from outside, and fit the cost model.",
        "key": "Print a fresh key, for the variable PD_CONNECTOR_KEY of every engine.",
    }

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of all commands, in the order of the help. Imports none of them."""
        names = super().list_commands(ctx)
        if not names:
            fail(
                f"no command is installed (entry points of group {COMMANDS}): this copy of pd-connector "
                "runs without its installed metadata, or with that of an older one; pip install it"
            )
        return names


def load(extension: Extension) -> Any:
    """Import one command, and return it as click's. If the import fails, the returned command reports why."""
    try:
        target = extension.load()
    except ConfigError as error:
        missing = error.__cause__.name if isinstance(error.__cause__, ImportError) else None
        extra = brought_by_an_extra(missing or "")
        return _unavailable(f"{missing} is not installed: {extra}" if extra else str(error))
    if isinstance(target, typer.Typer):
        return get_command(target)
    single = typer.Typer(add_completion=False)
    single.command()(target)
    return get_command(single)


def _unavailable(reason: str) -> Any:
    """A command that takes any arguments, and fails with this reason."""
    single = typer.Typer(add_completion=False)
    anything = {"ignore_unknown_options": True, "allow_extra_args": True}

    @single.command(help=f"Not available: {escape(reason)}", context_settings=anything)
    def unavailable() -> None:
        fail(reason)

    return get_command(single)


def fail(reason: str) -> NoReturn:
    """Print the reason, and end the command with status 1."""
    from rich.console import Console

    stderr = Console(stderr=True, soft_wrap=True)
    stderr.print(f"failed: {reason}", style="red", markup=False, highlight=False)
    raise typer.Exit(FAILED)


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    context_settings=SETTINGS,
    pretty_exceptions_show_locals=False,  # keys may be among them
    help="Prefill/decode disaggregation for vLLM and SGLang.",
)


@app.callback()
def group(version: Version = False) -> None:
    """Only options; the help is the group's."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script. Returns the exit status."""
    return run(app, "pd-connector", arguments)
