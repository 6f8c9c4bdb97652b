# SPDX-License-Identifier: Apache-2.0
"""`bench audit` measures what an audited request costs, and what others do."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pd_connector.tools.bench import audit
from pd_connector.tools.bench.flow import BenchError
from pd_connector.tools.cli import bench as command


def test_it_tells_the_cost_of_comparing_and_that_of_other_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "_TOKENS", 128)
    monkeypatch.setattr(audit, "_ROUNDS", 1)
    file = tmp_path / "figures.json"
    result = CliRunner().invoke(command.app, ["audit", "--runs", "1", "--json", str(file)])
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())
    assert {row["unit"] for row in rows} == {"GB/s", "ms"}
    assert {row["params"]["chunks"] for row in rows} == {*audit._SETUPS}
    assert all(row["ours"] > 0 for row in rows)


def test_what_is_the_same_must_not_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "_TOKENS", 128)
    caches = iter([audit._cache(16), audit._cache(16)])
    first, second = caches
    next(iter(second._layers.by_number.values())).key.mul_(2)
    both = iter([first, second])
    monkeypatch.setattr(audit, "_cache", lambda page_size: next(both))
    compare, _, _ = audit._calls(16, "raw")
    with pytest.raises(BenchError, match="found to differ"):
        compare()
