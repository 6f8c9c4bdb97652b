# SPDX-License-Identifier: Apache-2.0
"""Samples, comparisons, and what is said of the machine."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time

import pytest
from rich.console import Console
from support.bench import ROW_KEYS, comparison, text_of
from support.waits import until

from pd_bench import machine
from pd_bench.machine import Noise, cpu_seconds, describe
from pd_bench.report import Comparison, missed, table, write_json
from pd_bench.sample import Sample


def test_a_sample_has_its_median_and_its_outer_deciles():
    sample = Sample(tuple(float(value) for value in (11, 1, 3, 2, 5, 4, 7, 6, 9, 8, 10)))
    assert (sample.p10, sample.median, sample.p90) == (2.0, 6.0, 10.0)


def test_deciles_between_two_values_are_interpolated():
    sample = Sample((10.0, 20.0))
    assert (sample.p10, sample.median, sample.p90) == (11.0, 15.0, 19.0)


def test_a_sample_of_one_value_is_that_value():
    sample = Sample((7.0,))
    assert (sample.p10, sample.median, sample.p90) == (7.0, 7.0, 7.0)


def test_a_sample_of_no_values_is_refused():
    with pytest.raises(ValueError, match="at least one run"):
        Sample(())


def test_scaling_changes_the_unit_and_nothing_else():
    assert Sample((0.5, 0.25)).scaled(1e3) == Sample((500.0, 250.0))


@pytest.mark.parametrize(
    ("ours", "bar", "ok"), [(9.0, 1.0, True), (10.0, 1.0, True), (10.1, 1.0, False)]
)
def test_a_bar_is_the_most_that_the_ratio_may_be(ours, bar, ok):
    found = comparison(ours, 10.0, bar)
    assert found.ok is ok
    assert missed([found]) == ([] if ok else [found])


@pytest.mark.parametrize(("ours", "ok"), [(9.8, True), (9.7, True), (9.6, False)])
def test_where_more_is_better_the_bar_is_the_least_that_the_ratio_may_be(ours, ok):
    rate = Comparison("wire", {}, Sample((ours,)), Sample((10.0,)), "GB/s", 0.97, True)
    assert rate.ok is ok
    assert rate.rows()[0].ok is ok
    assert "≥ 0.97" in text_of(table([rate], "line rate"))


def test_without_a_bar_nothing_is_missed():
    assert missed([comparison(99.0, 1.0, None)]) == []


def test_only_the_median_is_held_to_the_bar():
    found = Comparison("x", {}, Sample((1.0, 1.0, 99.0)), Sample((2.0, 2.0, 2.0)), "ms", 1.0)
    median, p10, p90 = found.rows()
    assert (median.params["statistic"], median.ratio, median.bar, median.ok) == (
        "median",
        0.5,
        1.0,
        True,
    )
    assert (p10.bar, p10.ok) == (None, True)
    assert p90.ratio > 1
    assert (p90.bar, p90.ok) == (None, True)


def test_the_json_file_is_an_array_of_rows_of_one_form(tmp_path):
    path = tmp_path / "figures.json"
    write_json(path, [comparison(9.0, 10.0), comparison(3.0, 2.0, None, prompt_tokens=512)])
    rows = json.loads(path.read_text())
    assert [set(row) for row in rows] == [ROW_KEYS] * 6
    assert rows[0] == {
        "name": "handoff",
        "params": {"prompt_tokens": 3500, "transport": "shm", "statistic": "median", "runs": 1},
        "ours": 9.0,
        "baseline": 10.0,
        "unit": "ms",
        "ratio": 0.9,
        "bar": 1.0,
        "ok": True,
    }
    names = [json.dumps([row["name"], row["params"]], sort_keys=True) for row in rows]
    assert len(set(names)) == len(rows), "name and params say which figure a row is"


def test_the_table_shows_both_sides_of_every_comparison():
    shown = text_of(table([comparison(8.0, 16.0), comparison(1234.0, 617.0)], "TheOther"))
    assert "TheOther" in shown
    assert "8.00 - 8.00" in shown
    assert "16.0 - 16.0" in shown
    assert "1,234 ms" in shown
    assert "0.50" in shown
    assert "yes" in shown
    assert "2.00" in shown
    assert "no" in shown
    assert "≤ 1.00" in shown


def test_a_terminal_of_80_columns_holds_the_table():
    out = io.StringIO()
    params = {"prompt_tokens": 3500, "codec": "fp8_e4m3", "overlap": "auto"}
    sides = Sample((9876.0,)), Sample((9877.0,))
    wide = Comparison("handoff", params, *sides, "ms", 1.0)
    Console(file=out, width=80, color_system=None).print(table([wide], "NixlConnector"))
    assert "9,876 - 9,876" in out.getvalue()
    assert "9,877 - 9,877" in out.getvalue()
    assert "≤ 1.00" in out.getvalue()
    assert "fp8_e4m3" in out.getvalue()
    assert "…" not in out.getvalue()


def test_the_description_of_a_machine_has_no_empty_lines():
    found = describe()
    assert {"processor", "memory", "versions", "date"} <= found.keys()
    assert all(found.values())


def test_cpu_time_of_a_process_grows_while_it_works_and_an_ended_one_has_none():
    code = "while True: pass"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            deadline = time.monotonic() + 60
            while cpu_seconds([process.pid]) < 0.1:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        finally:
            process.kill()
    assert cpu_seconds([process.pid]) == 0


@pytest.mark.parametrize("ours", [False, True])
def test_noise_is_what_others_did_also_if_they_have_ended(
    monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    monkeypatch.setattr(machine, "_LOOKS_EVERY_S", 0.01)
    if not ours:
        monkeypatch.setattr(machine.proc, "descendants", lambda *_: {os.getpid()})
    noise = Noise()
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])

    def used_s() -> float:
        return sum(used for (pid, _), used in list(noise._used_s.items()) if pid == process.pid)

    try:
        until(lambda: cpu_seconds([process.pid]) > 0.1, "the process works")
        if ours:
            until(lambda: process.pid in {pid for pid, _ in list(noise._ours)}, "it is seen")
        else:
            until(lambda: used_s() > 0.1, "its time is seen")
    finally:
        process.kill()
        process.wait()
    assert bool(used_s()) is not ours
    if not ours:
        assert noise.cores() > 0, "it has ended"
