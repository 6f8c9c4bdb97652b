# SPDX-License-Identifier: Apache-2.0
"""The user's commands that start and stop an engine, as the settings give them. No shell reads them."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import PurePath

START, STOP = "start_command", "stop_command"
PLACES = {START: ("group", "role"), STOP: ("group", "role", "url")}
"""Names in braces that each command may have."""
_PLACE = re.compile(r"\{([A-Za-z_]*)\}")
_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "ash")


def checked_command(setting: str, text: str) -> None:
    """Raises ValueError: the setting, what is wrong with its text, and what to do."""
    try:
        arguments = shlex.split(text)
    except ValueError as error:
        raise ValueError(
            f"{setting} {text!r}: {str(error).lower()}; close the quotation mark, or write a list in the file"
        ) from None
    if not arguments:
        raise ValueError(f"{setting} {text!r}: must name a program")
    places = PLACES[setting]
    for argument in arguments:
        for name in _PLACE.findall(argument):
            if name not in places:
                names = ", ".join(f"{{{place}}}" for place in places)
                raise ValueError(f"{setting}: {{{name}}} has no value; known are {names}")
    if _PLACE.search(arguments[0]):
        raise ValueError(f"{setting} {arguments[0]!r}: the program must have a fixed name")
    if PurePath(arguments[0]).name in _SHELLS and any(map(_PLACE.search, arguments[1:])):
        names = ", ".join(f'"${_variable(place)}"' for place in places)
        raise ValueError(
            f"{setting}: a shell would read {{...}} as part of its program; write {names} there instead"
        )


def check_program(setting: str, text: str) -> None:
    """Raises ValueError: the program of a checked command cannot be run here now."""
    if shutil.which(program := shlex.split(text)[0]) is None:
        raise ValueError(
            f"{setting} {program!r}: no such program, or it may not be executed; give its whole path, and chmod +x"
        )


def filled(text: str, values: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The arguments of a checked command, and the variables that have the same values.

    A value is one argument or a part of one, whatever characters it has.
    """
    arguments = [
        _PLACE.sub(lambda match: values[match[1]], argument) for argument in shlex.split(text)
    ]
    return arguments, {_variable(name): value for name, value in values.items()}


def _variable(name: str) -> str:
    return f"PD_{name.upper()}"
