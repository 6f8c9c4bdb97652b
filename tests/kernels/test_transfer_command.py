# SPDX-License-Identifier: Apache-2.0
"""The one command for a GPU: what it does without one, and its check with one."""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from pd_bench.kernels import transfer, transfer_check
from pd_bench.kernels.caches import PAGED, RESHARD, Model
from pd_bench.kernels.report import Comparison, duration, print_rows, throughput, write_json
from pd_kernels.transfer.chunk_launch import ChunkLaunch
from pd_kernels.transfer.gather import launch_gather

COMMAND = [sys.executable, "-m", "pd_bench.kernels", "transfer"]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    paths = [str(root), str(root / "kernels")]
    environment["PYTHONPATH"] = os.pathsep.join([*paths, environment.get("PYTHONPATH", "")])
    return subprocess.run(
        [*COMMAND, *options], capture_output=True, text=True, env=environment, check=False
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = run()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == "no GPU: nothing was checked or measured"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_agree_with_their_references_on_random_shapes() -> None:
    done = run("--check", "--cases", "60")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_rows_say_whether_a_bar_was_reached(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[Comparison] = [
        throughput("gather", {"page": 16}, 90.0, 100.0, 0.8),
        throughput("gather", {"page": 64}, 70.0, 100.0, 0.8),
        duration("gather / torch", {"page": 16}, 1e-6, 3e-6, 0.5),
        duration("gather / torch", {"page": 64}, 2e-6, 3e-6, 0.5),
        duration("sums", {}, 2e-6, 1e-6, None),
    ]
    assert [row.ok for row in rows] == [True, False, True, False, True]
    print_rows(rows)
    printed = capsys.readouterr().out.splitlines()
    assert [("MISSED" in line) for line in printed] == [False, False, True, False, True, False]
    write_json(tmp_path / "rows.json", rows)
    assert '"ratio": 0.7' in (tmp_path / "rows.json").read_text()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's parts on this machine: few tokens, interpreted kernels, times that say
    nothing."""

    def once(calls: Sequence[Callable[[], None]]) -> float:
        for call in calls:
            call()
        return 1e-3

    monkeypatch.setattr(transfer_check, "DEVICE", "cpu")
    monkeypatch.setattr(transfer_check, "TOKENS", (1, 17, 70))
    monkeypatch.setattr(transfer, "DEVICE", "cpu")
    monkeypatch.setattr(
        transfer, "MODELS", (Model("tiny", 2, 8, 32, 32), Model("latent", 1, 1, 48, 0))
    )
    monkeypatch.setattr(transfer, "LLAMA_8B", Model("tiny", 1, 8, 16, 16))
    monkeypatch.setattr(transfer, "TOKENS", (70,))
    monkeypatch.setattr(transfer, "LAYOUTS", ((16, "LBHNC"), (64, "LBNHC")))
    monkeypatch.setattr(transfer, "copies", lambda _: 2)
    monkeypatch.setattr(transfer, "copy_bandwidth", lambda: 1e12)
    monkeypatch.setattr(transfer, "seconds", once)


@pytest.mark.usefixtures("small")
def test_its_check_passes_in_the_interpreter() -> None:
    assert transfer_check.check_transfer(6, seed=3) == {}


@pytest.mark.usefixtures("small")
def test_its_check_sees_a_kernel_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(chunk: ChunkLaunch) -> None:
        launch_gather(chunk)
        chunk.slot[-65] ^= 1  # the payload's last byte; others lie behind it

    monkeypatch.setattr(transfer_check, "launch_gather", late)
    problems = transfer_check.check_transfer(2, seed=3)
    assert [line.split(" of ")[0] for line in problems.pop(PAGED)][:2] == [
        f"{PAGED}, case {case}" for case in range(2)
    ]
    assert not problems


@pytest.mark.usefixtures("small")
def test_what_is_wrong_is_not_measured_and_all_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "RANKS", (1, 2))
    rows = list(transfer.measure_transfer(False, wrong=[PAGED]))
    bad = [row for row in rows if "failed" in row.params]
    assert {row.name for row in bad} == {PAGED}
    assert bad[0].params["failed"] == "ValueError: not measured, its check failed"
    assert [row.name for row in rows if row not in bad] == [RESHARD] * 4


@pytest.mark.usefixtures("small")
def test_it_measures_every_codec_both_ways_and_every_reshard() -> None:
    rows = list(transfer.measure_transfer(False))
    names = {row.name for row in rows}
    assert names == {
        "gather",
        "gather with sums / without",
        "gather / torch",
        "gather / raw",
        "scatter",
        "scatter / raw",
        "reshard",
    }
    gathers = [row.params for row in rows if row.name == "gather"]
    assert len({tuple(params.values()) for params in gathers}) == len(gathers) == 2 * 2 * 3
    assert len([row for row in rows if row.name == "reshard"]) == 16


@pytest.mark.usefixtures("small")
def test_in_a_hurry_it_measures_one_model_in_pages_of_16_and_64(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer, "TOKENS", (20, 30, 40))
    rows = list(transfer.measure_transfer(quick=True))
    assert {(row.params["model"], row.params["tokens"]) for row in rows} == {
        ("tiny", 20),
        ("tiny", 30),
    }
    assert {row.params["page"] for row in rows} == {16, 64}
    assert "gather with sums / without" in {row.name for row in rows}


@pytest.mark.usefixtures("small")
def test_a_fused_codec_is_held_to_raw_and_raw_to_a_copy() -> None:
    rows = list(itertools.islice(transfer.measure_transfer(False), 16))  # of one layout
    assert len({(row.name, row.params["codec"]) for row in rows}) == 16
    held = [(row.name, row.params["codec"], row.bar) for row in rows if row.bar]
    assert [each for each in held if each[0] != "gather / torch"] == [
        ("gather", "raw", transfer.BAR),
        ("scatter", "raw", transfer.BAR),
        *(
            (f"{name} / raw", codec, 1.0)
            for codec in ("fp8_e4m3", "int8")
            for name in ("gather", "scatter")
        ),
    ]
    speeds = {(row.name, row.params["codec"]): row.ours for row in rows}
    for row in rows:
        if row.name == "gather / raw":
            wanted = speeds["gather", row.params["codec"]] / speeds["gather", "raw"]
            assert row.ratio == pytest.approx(wanted)
            assert row.ok == (wanted >= 1)


@pytest.mark.usefixtures("small")
def test_a_row_comes_when_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that ends early keeps the rows before; a case that fails ends no other."""
    rows = transfer.measure_transfer(False)
    first = next(rows)
    monkeypatch.setattr(transfer, "seconds", lambda _: 1 / 0)
    rest = list(rows)
    assert first.name == "gather"
    assert "failed" not in first.params
    assert {row.name for row in rest} == {"gather and scatter", "reshard"}
    assert all(row.params["failed"] == "ZeroDivisionError: division by zero" for row in rest)
    assert not any(row.ok for row in rest)


def test_in_this_process_tests_that_launch_kernels_on_a_gpu_are_skipped(
    request: pytest.FixtureRequest,
) -> None:
    """They would hand a GPU's addresses to the interpreter, which reads them as the host's."""
    with pytest.raises(pytest.skip.Exception, match="run this file alone"):
        request.getfixturevalue("compiled_kernels")
