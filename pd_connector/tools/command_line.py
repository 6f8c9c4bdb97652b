# SPDX-License-Identifier: Apache-2.0
"""Common parts of all our commands: errors in two lines, "did you mean", `--version`, and commands that are imported
late.

Newer typer has its own click, older typer uses the installed one. So click's types are not named here.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import Parameter, Signature, cleandoc
from io import TextIOWrapper
from itertools import pairwise
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from pd_connector.errors import PDConnectorError, did_you_mean
from pd_connector.tools.missing import named_if_missing

FAILED = 1
WRONG_USE = 2
INTERRUPTED = 130
_Refusal: Any = typer.BadParameter.__mro__[2]
"""click's base class of all errors that a user sees."""
_HELP = ("-h", "--help")
SETTINGS = {"help_option_names": list(_HELP)}
"""The context settings of all our commands."""


def run(app: Any, name: str, arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit status. An error of use takes two lines on standard error.

    Args:
        app: a typer application, or a command made from one.
        name: the name that the user typed.
        arguments: the arguments without the name; None: this process's arguments.
    """
    given = None if arguments is None else list(arguments)
    if isinstance(
        sys.stdout, TextIOWrapper
    ):  # a terminal that is not UTF-8 has no arrows, and a name can be bytes
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with named_if_missing():
            status = app(args=given, prog_name=name, standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()  # at Python's own exit it is too late to say what is wrong
    except _Refusal as error:
        return _refused(error, name, sys.argv[1:] if given is None else given)
    except (typer.Abort, KeyboardInterrupt):
        status = INTERRUPTED
    except PDConnectorError as error:  # its text is for users
        print(f"failed: {error}", file=sys.stderr)
        return FAILED
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT):
            raise
        return _not_written(error)
    if status == INTERRUPTED:
        print("interrupted", file=sys.stderr)
    return status if type(status) is int else 0


def _not_written(error: OSError) -> int:
    """End after a full disk, or quietly if the reader of standard output, such as `head`, has had enough. Returns the exit
    status."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # Python flushes standard output once more at its exit
    os.close(nowhere)
    if error.errno != errno.EPIPE:
        where = error.filename or "standard output, or a file that this command writes"
        print(f"failed: {where}: {error.strerror}; make room there", file=sys.stderr)
    return FAILED


def not_known(kind: str, name: str, names: Iterable[str]) -> str:
    """What is wrong with a word that is none of the known ones."""
    near = did_you_mean(name, names)
    return f"{kind} {name!r} is not known{'; ' + near if near else ''}"


def _refused(error: Any, name: str, arguments: Sequence[str]) -> int:
    """Print an error, and where to read more. Returns the exit status."""
    path = error.ctx.command_path if getattr(error, "ctx", None) else name
    if type(error).__name__ == "NoArgsIsHelpError":  # typer has printed the help
        return WRONG_USE
    if hasattr(error, "possibilities"):
        said = not_known("option", error.option_name, error.possibilities or ())
    else:
        said = " ".join(error.format_message().split()).replace("Value error, ", "")
        value = _value_of(error, arguments)
        if value is not None:  # "Input" does not say what it is
            said = said.replace("Input should", f"{value!r}: should")
    print(f"{path}: {said}\n{path} --help tells more", file=sys.stderr)
    return int(error.exit_code)


def _value_of(error: Any, arguments: Sequence[str]) -> str | None:
    """What the user gave for the option of an error, the last time; None if that is not known."""
    names = getattr(getattr(error, "param", None), "opts", ())
    given = None
    for argument, following in pairwise([*arguments, ""]):
        option, equals, value = argument.partition("=")
        if option in names:
            given = value if equals else following
    return given


def _show_version(given: bool) -> None:
    if given:
        from pd_connector import __version__

        print(f"pd-connector {__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option(
        "--version", callback=_show_version, is_eager=True, help="Print the version, and end."
    ),
]
"""The option `--version` of a group. pd-connector and pd-router are one package, and have one version."""


class LateGroup(TyperGroup):
    """A group whose commands are imported when they are called. The help knows `lines`, and imports no command
    that has one."""

    lines: ClassVar[Mapping[str, str]] = {}
    """The line of the help for each command, in the order of the help."""
    _summarizes = False

    def names(self) -> Iterable[str]:
        """Names of all commands. Imports none."""
        return self.lines

    def imported(self, name: str) -> Any:
        """The command of this name; None if it does not exist."""
        raise NotImplementedError

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of all commands, in the order of the help."""
        return list(dict.fromkeys([*super().list_commands(ctx), *self.names()]))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name; None if it does not exist."""
        if self._summarizes and cmd_name in self.lines:
            return TyperCommand(cmd_name, help=self.lines[cmd_name])
        return super().get_command(ctx, cmd_name) or self.imported(cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        self._summarizes = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._summarizes = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the group's own options. Without arguments, the help is shown."""
        return super().parse_args(ctx, args or ["--help"])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the arguments name, and the arguments for it."""
        name = args[0]
        if not name.startswith("-") and name not in self.list_commands(ctx):
            ctx.fail(not_known("command", name, self.list_commands(ctx)))
        own_name, command, rest = super().resolve_command(ctx, args)
        _reflow(command)
        return own_name, command, rest


def _reflow(command: Any) -> None:
    """Join the lines of each paragraph of a command's help. typer keeps a docstring's line breaks, and terminals are
    narrower than our source."""
    if getattr(command, "help", None):
        paragraphs = cleandoc(command.help).split("\n\n")
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    for inner in getattr(command, "commands", {}).values():
        _reflow(inner)


class SpreadCommand(TyperCommand):
    """A command whose options that may be repeated take several values at once, too: `--prefill A B`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments."""
        repeated = {
            name
            for param in self.params
            if getattr(param, "multiple", False)
            for name in param.opts
        }
        for given, following in pairwise([*args, "-"]):
            if given in repeated and following.startswith("-"):
                ctx.fail(f"option {given} needs a value")
        return super().parse_args(ctx, list(_spread(args, repeated)))


def _spread(args: Sequence[str], repeated: set[str]) -> Iterator[str]:
    """The arguments with the option before each of its values."""
    option, values = "", 0
    for arg in args:
        if arg.startswith("-"):
            option, values = arg if arg in repeated else "", 0
        elif option:
            values += 1
            if values > 1:
                yield option
        yield arg


def option(name: str, kind: Any, default: Any, meaning: str, **more: Any) -> Parameter:
    """One option of a command whose options come from a table.

    Args:
        name: without dashes at its beginning.
        kind: the type of its value.
        more: as for `typer.Option`.
    """
    shown = default not in (None, "", [])
    info = typer.Option(f"--{name}", help=meaning, show_default=shown, **more)
    annotation = Annotated[kind, info]
    return Parameter(
        name.replace("-", "_"), Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def single(function: Callable[..., None], parameters: Iterable[Parameter]) -> typer.Typer:
    """A command of its own, with these parameters.

    Args:
        function: gets the parameters by name.
    """

    def called(**given: Any) -> None:
        function(**given)

    called.__doc__ = function.__doc__
    called.__annotations__ = {}
    called.__signature__ = Signature(list(parameters))  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(cls=SpreadCommand, context_settings=SETTINGS)(called)
    return app
