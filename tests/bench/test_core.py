# SPDX-License-Identifier: Apache-2.0
"""`pd-connector bench core`: what is timed really happens, and bars are applied."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from pd_bench.core import app, audit, reshard
from pd_bench.core import codec as codec_bench
from pd_bench.core import overhead as overhead_module
from pd_bench.core.reshard import Engines
from pd_bench.report import BenchError
from pd_connector.codec import COMPILER, Elements
from pd_connector.codec.compiled import loops_for


@pytest.mark.parametrize("tps", [(1, 1), (1, 4), (8, 2)])
@pytest.mark.parametrize("pages", [(16, 16), (16, 128)])
def test_resharding_by_both_sides_gives_the_model_back(tps, pages):
    model = torch.randn(8, 128, 8, 256).to(torch.bfloat16)
    found = reshard._compare(model, Engines(*tps, *pages), 1)
    alike = tps[0] == tps[1] and pages[0] == pages[1]
    assert found.params["pages"] == ("whole" if alike else "resharded")
    assert found.ours.median > 0 < found.baseline.median


def test_resharding_that_goes_wrong_is_no_figure(monkeypatch):
    monkeypatch.setattr(reshard, "_ours", lambda pieces, slot: None)
    model = torch.randn(8, 128, 8, 256).to(torch.bfloat16)
    with pytest.raises(BenchError, match="ours: wrong KV"):
        reshard._compare(model, Engines(1, 2, 16, 16), 1)


def test_codecs_are_timed_both_ways_and_left_as_they_were():
    pytest.importorskip("numba")
    x = torch.zeros(1, 2, 8, dtype=torch.bfloat16)
    found = codec_bench.measure(2, (2, 130, 64))
    assert len(found) == 2 * 2 * 2
    assert all(one.ours.median > 0 < one.baseline.median for one in found)
    assert loops_for(x, Elements("bfloat16")) is not None
    with COMPILER.off():
        assert loops_for(x, Elements("bfloat16")) is None


def test_a_side_over_its_budget_misses_the_bar(monkeypatch, tmp_path):
    monkeypatch.setattr(overhead_module, "planning_overhead", lambda: (0.4, 1.2))
    file = tmp_path / "figures.json"
    result = CliRunner().invoke(app.app, ["overhead", "--json", str(file)])
    assert result.exit_code == 1
    rows = {row["params"]["side"]: row for row in json.loads(file.read_text())[::3]}
    assert (rows["producer"]["ok"], rows["consumer"]["ok"]) == (True, False)
    assert rows["consumer"]["ratio"] == 1.2


def test_a_prompt_of_parts_of_pages_is_refused():
    result = CliRunner().invoke(app.app, ["reshard", "--tokens", "200"])
    assert result.exit_code == 2
    assert "multiple of 128" in result.output


def test_it_tells_the_cost_of_comparing_and_that_of_other_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "_TOKENS", 128)
    monkeypatch.setattr(audit, "_ROUNDS", 1)
    file = tmp_path / "figures.json"
    result = CliRunner().invoke(app.app, ["audit", "--runs", "1", "--json", str(file)])
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())
    assert {row["unit"] for row in rows} == {"GB/s", "ms"}
    assert {row["params"]["chunks"] for row in rows} == {*audit._SETUPS}
    assert all(row["ours"] > 0 for row in rows)


def test_what_is_the_same_must_not_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "_TOKENS", 128)
    caches = iter([audit._cache(16), audit._cache(16)])
    first, second = caches
    second.layer(0).key.mul_(2)
    both = iter([first, second])
    monkeypatch.setattr(audit, "_cache", lambda page_size: next(both))
    compare, _, _ = audit._calls(16, "raw")
    with pytest.raises(BenchError, match="found to differ"):
        compare()
