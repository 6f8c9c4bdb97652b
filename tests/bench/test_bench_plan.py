# SPDX-License-Identifier: Apache-2.0
"""`pd-connector bench plan` at a small size: every mix is counted once, and both sides are from one run."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from pd_bench.plan import command, links_command, stock
from pd_bench.plan.links_command import HIGH, LOW
from pd_bench.plan.searches import every_mix, searched
from scheduler_plugins.planner.command import _generated
from scheduler_plugins.planner.goodput import Promise
from scheduler_plugins.planner.mix import gpus_of
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.sim import trace


def test_every_mix_is_counted_once_and_uses_all_gpus() -> None:
    inventory = stock.nodes("H100", gpus=4)
    mixes = every_mix(inventory)
    assert len(set(mixes)) == len(mixes)
    assert all(gpus_of(mix, inventory) == 4 for mix in mixes)
    sizes = {
        (kind, role): (inventory.kinds[kind].gpus, role)
        for kind in inventory.kinds
        for role in Role
    }
    split = {tuple(sorted((*sizes[kind, role], n) for kind, role, n in mix)) for mix in mixes}
    # 1 + 3: 4 ways to fill 3 GPUs... with sizes 1 and 2: (1,1,1), (1,2); 2 + 2: 2 x 2; and 3 + 1.
    assert len(split) == len(mixes) == 1 * 2 + 2 * 2 + 2 * 1


def test_the_search_has_what_the_exhaustive_one_has(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("\n".join([*_generated(4000, 60)][:401]) + "\n")
    inventory, requests = stock.nodes("H100", gpus=3), trace.load(path)
    ours, theirs = (
        searched(inventory, requests, 60, Promise(0.5, 0.05), name)
        for name in ("planner", "exhaustive")
    )
    assert ours.per_s >= 0.97 * theirs.per_s > 0
    assert ours.simulated == 60 * ours.runs
    monkeypatch.setattr(command, "alike", lambda: stock.nodes("H100", gpus=2))
    out = tmp_path / "out.json"
    ended = CliRunner().invoke(command.app, ["search", str(path), "--json", str(out)])
    assert ended.exit_code in (0, 1), ended.output
    names = {row["name"] for row in json.loads(out.read_text())}
    assert {"rate", "rate, other half", "simulated requests"} <= names


def test_links_compare_both_affinities(tmp_path: Path, monkeypatch) -> None:
    """A slow link binds: the fleet over all nodes is worse there."""
    path = tmp_path / "trace.csv"
    path.write_text("\n".join([*_generated(4000, 60)][:401]) + "\n")
    monkeypatch.setattr(links_command, "GBIT_PER_S", (400.0, 2.0))
    monkeypatch.setattr(links_command, "EACH", 100)
    out = tmp_path / "out.json"
    ended = CliRunner().invoke(command.app, ["links", str(path), "--gpus", "2", "--json", str(out)])
    assert ended.exit_code in (0, 1), ended.output
    rows = [row for row in json.loads(out.read_text()) if row["name"] == "rate"]
    rates = {(row["params"]["Gbit/s"], row["params"]["affinity"]): row["baseline"] for row in rows}
    assert rates[400.0, HIGH] > 1 > rates[2.0, HIGH]
    assert rates[2.0, LOW] > 1
    assert all(row["ok"] for row in rows)
