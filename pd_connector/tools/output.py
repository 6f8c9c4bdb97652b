# SPDX-License-Identifier: Apache-2.0
"""Checks before the work whether its results can be written."""

import os
from pathlib import Path
from typing import Annotated

import typer


def write_problem(path: Path) -> str:
    """Why this file cannot be written; empty if it can. Creates nothing."""
    if os.path.isdir(path):
        return f"{path}: is a folder; name a file"
    if os.path.exists(path):
        return "" if os.access(path, os.W_OK) else f"{path}: cannot be written"
    if not os.path.isdir(path.parent):
        return f"{path}: there is no folder {path.parent}"
    if not os.access(path.parent, os.W_OK | os.X_OK):
        return f"{path}: nothing can be written in {path.parent}"
    return ""


def checked(path: Path | None) -> Path | None:
    """The file of an option, checked. Raises typer.BadParameter."""
    if path is not None and (problem := write_problem(path)):
        raise typer.BadParameter(problem)
    return path


Json = Annotated[
    Path | None, typer.Option(help="Write the figures to this file.", callback=checked)
]
"""The option `--json` of benchmarks."""
