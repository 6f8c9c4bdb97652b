# SPDX-License-Identifier: Apache-2.0
"""docs/simulator.md says when to disaggregate. Its commands give its figures."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from scheduler_plugins.commands import main as pd_router

PAGE = (Path(__file__).parents[3] / "docs" / "simulator.md").read_text()
SECTION = PAGE.partition("\n## When to disaggregate\n")[2].partition("\n## ")[0]
INPUTS, COMMANDS = re.findall(r"^```sh\n(.*?)^```$", SECTION, re.M | re.S)
KEPT = 0.9
"""Part of the requests that must be in time."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the page's traces and engines, made by its own commands."""
    folder = tmp_path_factory.mktemp("inputs")
    subprocess.run(["bash", "-ec", INPUTS], cwd=folder, check=True)
    return folder


def in_time(words: list[str]) -> float:
    assert pd_router(["simulate", *words, "--json", "result.json"]) == 0
    (found,) = json.loads(Path("result.json").read_text())
    return float(found["attained"] * found["served"] / found["requests"])


def test_every_figure_of_the_table_has_a_command() -> None:
    figures = [cell for row in SECTION.splitlines() for cell in row.split(" | ")[3:5]]
    rates = {found[0] for cell in figures if (found := re.match(r"\d+(\.\d)?", cell))}
    assert rates == set(re.findall(r"--per-s (\S+) ", COMMANDS))


@pytest.mark.parametrize("line", COMMANDS.splitlines())
def test_a_command_gives_its_figure(
    line: str, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its rate nine of ten requests are in time, and at a quarter more they are not."""
    monkeypatch.chdir(inputs)
    program, command, *words = shlex.split(line)
    assert (program, command) == ("pd-router", "simulate")
    assert in_time(words) >= KEPT
    at = words.index("--per-s") + 1
    assert in_time([*words[:at], str(1.25 * float(words[at])), *words[at + 1 :]]) < KEPT
