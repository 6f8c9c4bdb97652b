# SPDX-License-Identifier: Apache-2.0
"""`bench handoff` as a command."""

from __future__ import annotations

import json

import pytest
from support.bench import ROW_KEYS, comparison
from typer.testing import CliRunner

from pd_bench import harness
from pd_bench.handoff import bench as bench_module
from pd_bench.handoff import command, cross, sglang, vllm
from pd_bench.handoff.bench import HandoffBench
from pd_bench.handoff.findings import HandoffFindings, Series
from pd_bench.handoff.vllm import BASELINE
from pd_bench.report import BenchError, Comparison
from pd_connector.tools.cli.bench import app as bench


def outcome(*comparisons: Comparison, **failures: str) -> HandoffFindings:
    found = [Series(BASELINE, {}, 1.9, True), Series(vllm.LOCAL.ours["shm"], {}, 0.01, False)]
    return HandoffFindings(
        [(BASELINE.name, list(comparisons))], found, 0, 0.02, 0, {512: 1.01}, failures
    )


@pytest.fixture
def invoke(monkeypatch):
    """Runs `bench handoff` with these findings, or this error, in place of a measurement."""
    asked: list[HandoffBench] = []

    def run(found, *arguments: str):
        def measure(self, console):
            asked.append(self)
            if isinstance(found, BaseException):
                raise found
            return found

        monkeypatch.setattr(bench_module.HandoffBench, "measure", measure)
        monkeypatch.setattr(command, "_check_possible", lambda plan: None)
        return CliRunner().invoke(bench, ["handoff", *arguments])

    run.asked = asked
    return run


def test_the_command_prints_the_table_and_writes_the_rows(invoke, tmp_path):
    path = tmp_path / "figures.json"
    result = invoke(outcome(comparison(9.0, 10.0)), "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "NixlConnector" in result.output
    assert "frozen" in result.output
    assert [set(row) for row in json.loads(path.read_text())] == [ROW_KEYS] * 3


def test_the_exit_code_tells_a_missed_bar_from_no_measurement(invoke):
    assert invoke(outcome(comparison(11.0, 10.0))).exit_code == 1
    assert invoke(BenchError("nothing came")).exit_code == 2
    assert invoke(KeyboardInterrupt()).exit_code == 130


def test_a_contender_that_failed_is_named_beside_the_figures_of_the_others(invoke, tmp_path):
    path = tmp_path / "figures.json"
    result = invoke(outcome(comparison(9.0, 10.0), int8="no such codec"), "--json", str(path))
    assert result.exit_code == 2
    assert "NOT MEASURED: int8: no such codec" in result.output
    assert json.loads(path.read_text())


def test_a_missed_bar_is_no_reason_not_to_write_the_rows(invoke, tmp_path):
    path = tmp_path / "figures.json"
    invoke(outcome(comparison(11.0, 10.0)), "--json", str(path))
    assert json.loads(path.read_text())[0]["ok"] is False


def test_without_arguments_all_four_are_compared_over_the_link(invoke):
    invoke(outcome(comparison(9.0, 10.0)))
    (plan,) = invoke.asked
    assert [c.name for c in plan.ours] == list(vllm.LINK.default)
    assert (plan.link_mbit, list(plan.prompt_tokens)) == (1000.0, [512, 2048, 3500])


@pytest.mark.parametrize(
    ("mbit", "raw", "int8", "streamed"),
    [("1000", 0.97, 0.55, 0.30), ("9999", 0.97, 0.55, 0.30), ("10000", 0.60, 0.50, 0.10)],
)
def test_a_fast_link_has_bars_of_its_own(invoke, mbit, raw, int8, streamed):
    names = ("raw", "int8", "int8+overlap")
    invoke(outcome(), "--link-mbit", mbit, *(word for name in names for word in ("--ours", name)))
    (plan,) = invoke.asked
    bars = [one.bar(vllm.BASELINE.name, 3500) for one in plan.ours]
    assert bars == [raw, int8, streamed]


def test_on_one_machine_each_transport_gets_a_pair_of_its_own(invoke):
    invoke(outcome(comparison(9.0, 10.0)), "--local", "--ours", "tcp", "--ours", "nixl")
    (plan,) = invoke.asked
    assert [c.config for c in plan.ours] == [{"transports": ["tcp"]}, {"transports": ["nixl"]}]
    assert plan.link_mbit is None


def test_sglang_has_a_line_up_of_its_own(invoke):
    invoke(outcome(comparison(9.0, 10.0)), "--engine", "sglang", "--ours", "int8")
    (plan,) = invoke.asked
    assert plan.line_up is sglang.LINK
    assert [c.name for c in plan.ours] == ["int8"]
    assert invoke(outcome(), "--engine", "sglang", "--gpu").exit_code == 2


def test_engines_of_two_kinds_are_measured_over_the_link_only(invoke):
    invoke(outcome(comparison(9.0, 10.0)), "--engine", "cross")
    (plan,) = invoke.asked
    assert plan.line_up is cross.LINK
    refused = invoke(outcome(), "--engine", "cross", "--local")
    assert refused.exit_code == 2
    assert "link only" in refused.output
    assert len(invoke.asked) == 1


@pytest.mark.parametrize("arguments", [["--ours", "rwa"], ["--local", "--ours", "raw"]])
def test_an_unknown_contender_is_refused_with_those_there_are(invoke, arguments):
    result = invoke(outcome(), *arguments)
    assert result.exit_code == 2
    assert ("shm" if "--local" in arguments else "raw+overlap") in result.output
    assert not invoke.asked


def test_without_namespaces_the_way_out_is_named(monkeypatch):
    monkeypatch.setattr(command, "available", lambda: "`ip` is missing")
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda name: name)
    result = CliRunner().invoke(bench, ["handoff"])
    assert result.exit_code == 2
    assert "ip` is missing" in result.output
    assert "--local" in result.output
