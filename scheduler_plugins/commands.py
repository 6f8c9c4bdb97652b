# SPDX-License-Identifier: Apache-2.0
"""`pd-router`: the router, the simulator of a cluster, the planner, and an engine to try them with."""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.main import get_command

from pd_connector.tools.command_line import SETTINGS, LateGroup, Version, run

_MODULES = {
    "serve": "scheduler_plugins.router.__main__",
    "simulate": "scheduler_plugins.sim.command",
    "plan": "scheduler_plugins.planner.command",
    "mock": "scheduler_plugins.sim.mock.command",
}


class Commands(LateGroup):
    """All commands of `pd-router`. Options without a command are those of `serve`."""

    lines: ClassVar[dict[str, str]] = {
        "serve": "The router: one OpenAI API in front of prefill and decode engines.",
        "simulate": "Play a recorded trace through a simulated cluster.",
        "plan": "Find which engines to start on which GPUs.",
        "mock": "An engine that speaks vLLM's HTTP, and takes its times from a cost model.",
    }

    def imported(self, name: str) -> Any:
        """The command of this name; None if it does not exist."""
        if name not in _MODULES:
            return None
        command = get_command(import_module(_MODULES[name]).app)
        command.name = name
        return command

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the group's own options."""
        own = {option for param in self.get_params(ctx) for option in param.opts}
        if args and args[0].startswith("-") and args[0] not in own:
            args = ["serve", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    context_settings=SETTINGS,
    pretty_exceptions_show_locals=False,  # keys may be among them; older typer's default shows them
    help="The router, the simulator of a cluster, a planner, and an engine to try them with. "
    "Options without a command are those of serve.",
)


@app.callback()
def group(version: Version = False) -> None:
    """Only options; the help is the group's."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status."""
    return run(app, "pd-router", arguments)


if __name__ == "__main__":
    sys.exit(main())
