# SPDX-License-Identifier: Apache-2.0
"""Files for results are looked at before there are any."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from pd_connector.tools.cli.app import app
from pd_connector.tools.output import write_problem


def test_a_file_that_can_be_written_has_no_problem_and_is_not_made(tmp_path: Path) -> None:
    assert write_problem(tmp_path / "new.json") == ""
    assert not (tmp_path / "new.json").exists()
    (tmp_path / "old.json").touch()
    assert write_problem(tmp_path / "old.json") == ""
    assert write_problem(Path("relative.json")) == ""


def test_what_is_in_the_way_is_named(tmp_path: Path) -> None:
    assert "is a folder" in write_problem(tmp_path)
    assert f"no folder {tmp_path / 'none'}" in write_problem(tmp_path / "none" / "x.json")
    (tmp_path / "file").touch()
    assert "there is no folder" in write_problem(tmp_path / "file" / "x.json")


@pytest.mark.parametrize(
    "command",
    [
        ("bench", "wire", "--json"),
        ("bench", "handoff", "--json"),
        ("bench", "serve", "trace.jsonl", "--json"),
        ("profile", "--url", "http://127.0.0.1:1", "--out"),
    ],
)
def test_nothing_is_measured_for_a_file_that_cannot_be_written(command: tuple[str, ...]) -> None:
    ended = CliRunner().invoke(app, [*command, "/nowhere/x"], env={"COLUMNS": "200"})
    assert ended.exit_code == 2
    assert "there is no folder /nowhere" in ended.output
