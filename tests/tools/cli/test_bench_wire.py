# SPDX-License-Identifier: Apache-2.0
"""`pd-connector bench wire` as the wheel brings it: real agents in two processes, and KV that is looked at."""

import json

import pytest
from typer.testing import CliRunner

from pd_connector.tools.cli import bench
from pd_connector.tools.wire import MoveError, WireCache


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """The benchmarks of a clone are not installed."""
    monkeypatch.setattr("pd_connector.tools.cli.app.load_entry_points", lambda group: {})


def invoke(*arguments: str):
    return CliRunner().invoke(bench.app, ["wire", *arguments])


def test_kv_moves_in_each_way_that_is_named_and_is_verified(tmp_path):
    path = tmp_path / "rates.json"
    ways = ["--transport", "shm", "--transport", "tcp", "--codec", "raw", "--codec", "int8"]
    result = invoke("--mib", "8", "--runs", "2", *ways, "--json", str(path))
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())
    named = [(row["transport"], row["codec"]) for row in rows]
    assert named == [("shm", "raw"), ("shm", "int8"), ("tcp", "raw"), ("tcp", "int8")]
    for row in rows:
        assert 0 < row["slowest_gb_per_s"] <= row["gb_per_s"] <= row["fastest_gb_per_s"]
        assert row["chunks"] > 0
        assert row["runs"] == 2
        assert row["transport"] in result.output


def test_kv_that_is_wrong_is_an_error(monkeypatch):
    monkeypatch.setattr(WireCache, "check", lambda self, lossy: "layer 3 differs")
    result = invoke("--mib", "2", "--transport", "shm", "--codec", "raw")
    assert result.exit_code == 1
    assert "shm raw: wrong KV has arrived: layer 3 differs" in " ".join(result.output.split())


def test_a_producer_that_ends_is_an_error_and_not_a_wait(monkeypatch):
    monkeypatch.setattr(bench, "_produce", print)
    with pytest.raises(MoveError, match="has ended"):
        bench.measure("shm", "raw", 2, 1)


@pytest.mark.parametrize(
    ("arguments", "status", "named"),
    [
        (["--codec", "int"], 1, "int8"),
        (["--transport", "smh"], 1, "shm"),
        (["--mib", "3"], 2, "multiple of 2"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_what_can(arguments, status, named):
    result = invoke(*arguments)
    assert result.exit_code == status
    assert named in result.output


def test_the_benchmark_of_a_clone_replaces_it(monkeypatch):
    assert "--link-mbit" not in invoke("--help").output
    monkeypatch.undo()
    assert "--link-mbit" in invoke("--help").output
