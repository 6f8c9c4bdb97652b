# SPDX-License-Identifier: Apache-2.0
"""What `python -m pd_bench.kernels` says of what it measures, and how it measures small things."""

import json
from collections.abc import Collection, Iterator
from pathlib import Path

import decode_interpreted  # noqa: F401 - before what it imports
import pytest
import torch

from pd_bench.kernels import __main__ as command
from pd_bench.kernels import decode, decode_cases, decode_check, timing
from pd_bench.kernels.decode_goals import geometric_means
from pd_bench.kernels.report import Comparison, duration, rows_or_failure


def test_rows_are_printed_and_written_as_they_come(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"

    def measured() -> Iterator[Comparison]:
        yield duration("first", {"page": 16}, 2e-6, 1e-6, 1.0)
        assert "first: page=16: 2.0 beside 1.0 us, ratio 2.000, bar 1.00 MISSED" in (
            capsys.readouterr().out
        )
        assert [row["name"] for row in json.loads(path.read_text())] == ["first"]
        yield from rows_or_failure(
            "second", {"page": 16}, iter([duration("half", {}, 1e-6, 1e-6, None)])
        )

    assert [row.name for row in command.report(measured(), path)] == ["first", "half"]
    assert [row["ok"] for row in json.loads(path.read_text())] == [False, True]


def test_figures_have_hardware_versions_date_and_command_beside_them() -> None:
    line = command.header("NVIDIA H200", ["decode", "--json", "a file"])
    assert line.startswith(f"NVIDIA H200, torch {torch.__version__}, CUDA ")
    assert ", triton 3." in line
    assert "+00:00; python -m pd_bench.kernels decode --json 'a file'" in line


def test_goals_are_geometric_means_of_what_was_measured() -> None:
    flex, flashinfer = "paged_decode / FlexAttention", "paged_decode / FlashInfer"
    uniform, ragged = {"lengths": "uniform 64 x 4k"}, [{"lengths": n} for n in ("Zipf", "ragged 4")]
    rows = [
        duration(flex, ragged[0], 1e-6, 4e-6, None),
        duration(flex, ragged[1], 4e-6, 4e-6, None),
        duration(flashinfer, uniform, 3e-6, 2e-6, 1.0),
        *rows_or_failure(flex, ragged[1], _raising()),
    ]
    means = list(geometric_means(rows, decode_cases.LENGTHS))
    assert [(row.name, row.params["lengths"], row.params["goal"]) for row in means] == [
        (f"mean of {flex}", "ragged, 2 batches", "1.3x geometric mean"),
        (f"mean of {flashinfer}", "uniform, 1 batches", "1.0x"),
    ]
    assert [row.ratio for row in means] == pytest.approx([0.5, 1.5])
    assert all(row.bar is None and row.ok for row in means)


def _raising() -> Iterator[Comparison]:
    raise RuntimeError
    yield


def test_a_graph_has_many_calls_and_the_caches_of_small_ones_exceed_the_l2() -> None:
    assert [timing.rounds(calls) for calls in (1, 3, 16, 40)] == [16, 6, 1, 1]
    assert timing.copies(1 << 40) == 1
    assert timing.copies(1 << 20) << 20 >= timing.PAST_L2_BYTES


@pytest.mark.parametrize(
    ("wrong", "us", "code"),
    [({}, 1.0, 0), ({}, 3.0, 1), ({"mla_decode": ["mla_decode, case 0: error"]}, 1.0, 1)],
)
def test_its_exit_code_says_what_became_of_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wrong: dict[str, list[str]],
    us: float,
    code: int,
) -> None:
    """Measuring goes on after a wrong case, without the kernel that was wrong."""

    def measured(quick: bool, only: list[str], skipped: Collection[str]) -> Iterator[Comparison]:
        assert list(skipped) == list(wrong)
        yield duration("paged_decode / FlexAttention", {"page": 16}, us / 1e6, 2e-6, 1.0)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(decode_check, "check_decode", lambda *_: wrong)
    monkeypatch.setattr(decode, "measure_decode", measured)
    assert command.main(["decode"]) == code
    printed = capsys.readouterr().out
    assert printed.startswith("a GPU, torch ")
    assert f"checked random cases: {len(wrong)} wrong" in printed
    assert "FlexAttention" in printed


def test_a_kernel_that_is_wrong_is_not_measured_and_all_others_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [
        "paged_decode",
        "paged_decode, mask_mod",
        "merge_partials / paged_decode",
        "mla_decode",
    ]
    cases = [decode.Case(name, {}, iter([duration(name, {}, 1e-6, 1e-6, 1.0)])) for name in names]
    monkeypatch.setattr(decode, "copy_bandwidth", lambda: 1e12)
    monkeypatch.setattr(decode, "cases", lambda *_: iter(cases))
    rows = list(decode.measure_decode(quick=True, wrong={"paged_decode": ["case 3: error"]}))
    assert [row.name for row in rows] == names
    assert [row.ok for row in rows] == [False, False, True, True]
    assert rows[0].params["failed"] == "ValueError: not measured, its check failed"


@pytest.mark.parametrize(
    ("only", "kernels"),
    [
        (["mla_decode"], {"mla_decode"}),
        (["paged_decode", "FlexAttention"], {"paged_decode"}),
        ([], {"paged_decode", "mla_decode", "merge_partials", "mixed_attention", "host"}),
    ],
)
def test_only_kernels_that_would_be_measured_are_checked(
    monkeypatch: pytest.MonkeyPatch, only: list[str], kernels: set[str]
) -> None:
    """MLA's Gluon kernel is held to MLA's cases alone."""
    found: list[set[str]] = []

    def check(cases: int, seed: int, asked: set[str]) -> dict[str, list[str]]:
        found.append(asked)
        return {}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(decode_check, "check_decode", check)
    told = [part for text in only for part in ("--only", text)]
    assert command.main(["decode", "--quick", "--check", *told]) == 0
    assert found == [kernels]
