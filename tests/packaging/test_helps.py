# SPDX-License-Identifier: Apache-2.0
"""Helps are whole in a terminal of 80 columns: no name or default is cut, and no list ends in dots."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from pd_connector.tools.cli.app import app as pd_connector
from scheduler_plugins.commands import app as pd_router
from scheduler_plugins.router.roles.registry import ROLES

APPS = {"pd-connector": pd_connector, "pd-router": pd_router}
CUT = re.compile(r"\u2026|(?<![\w\],])\.\.\.")
"""An ellipsis. Dots behind a word are a word for several values, such as `CONFIG...`."""


def help_of(app: typer.Typer, words: list[str]) -> str:
    environment = {"COLUMNS": "80", "TERMINAL_WIDTH": "80"}
    return CliRunner().invoke(app, [*words, "--help"], env=environment).output


def commands(command: Any, words: list[str]) -> Iterator[list[str]]:
    """The words of a command, and of all commands below it."""
    yield words
    if hasattr(command, "list_commands"):
        context = command.make_context("x", [], resilient_parsing=True)
        for name in command.list_commands(context):
            yield from commands(command.get_command(context, name), [*words, name])


@pytest.mark.parametrize("name", APPS)
def test_no_help_is_cut(name: str) -> None:
    helps = {
        " ".join(words): help_of(APPS[name], words)
        for words in commands(get_command(APPS[name]), [])
    }
    assert len(helps) > 3
    cut = [
        f"{words}: {line}"
        for words, text in helps.items()
        for line in text.splitlines()
        if CUT.search(line.partition("Usage:")[0])
    ]
    assert not cut


def test_a_cut_help_is_noticed() -> None:
    assert CUT.search("one of pressure, ..., off")
    assert CUT.search("http://127.0.0.1:4318/v1\u2026")
    assert not CUT.search("CONFIG...  The JSON")


def test_the_help_of_roles_names_every_policy() -> None:
    text = help_of(pd_router, ["serve"])
    assert [name for name in ROLES if name not in text] == []
