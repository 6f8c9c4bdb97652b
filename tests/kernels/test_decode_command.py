# SPDX-License-Identifier: Apache-2.0
"""`python -m pd_kernels.bench decode`: its parts on this machine, small and interpreted."""

import functools
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import decode_interpreted
import pytest
import torch
from decode_batches import error

from pd_kernels.bench import decode, decode_baselines, decode_cases, decode_check
from pd_kernels.decode.mla_kernel import launch_mla
from pd_kernels.decode.paged_kernel import launch_paged

pytestmark = [
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log2"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]
TINY = decode_cases.Heads(4, 2, 64)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few tokens, interpreted kernels, times that say nothing."""

    def once(calls: Sequence[Callable[[], object]], _: int = 1) -> float:
        for call in calls:
            call()
        return 1e-3

    monkeypatch.setattr(decode_cases, "DEVICE", "cpu")
    monkeypatch.setattr(decode_check, "LONGEST", 90)
    monkeypatch.setattr(decode_check, "LAUNCHES", 1)
    monkeypatch.setattr(decode_check, "HEADS", (TINY,))
    monkeypatch.setattr(decode, "LLAMA", TINY)
    monkeypatch.setattr(decode, "QUICK", ("uniform", "ragged"))
    lengths = {"uniform": lambda _: [40] * 3, "ragged": lambda _: [100, 3]}
    monkeypatch.setattr(decode, "LENGTHS", lengths)
    monkeypatch.setattr(decode, "SHARDED", [60, 40])
    monkeypatch.setattr(decode, "MLA_CASES", {"ragged": ([70, 3], 16, 2)})
    monkeypatch.setattr(decode, "copies", lambda _: 2)
    monkeypatch.setattr(decode, "copy_bandwidth", lambda: 1e12)
    monkeypatch.setattr(decode, "seconds", once)
    with decode_interpreted.dots_mended():
        yield


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_agree_with_their_references_on_random_batches() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "pd_kernels.bench", "decode", "--check", "--cases", "20"],
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        cwd=root / "kernels",
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_its_check_passes_in_the_interpreter() -> None:
    assert decode_check.check_decode(3, seed=3) == []


def test_its_check_sees_a_kernel_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_paged(batch, out, lse, scratch):  # type: ignore[no-untyped-def]
        launch_paged(batch, out, lse, scratch)
        out[0, 0, 0] += 1

    def wrong_mla(batch, out, lse, scratch):  # type: ignore[no-untyped-def]
        launch_mla(batch, out, lse, scratch)
        lse[0, 0, 0] = 0.5

    monkeypatch.setattr(decode_check, "launch_paged", wrong_paged)
    monkeypatch.setattr(decode_check, "launch_mla", wrong_mla)
    problems = decode_check.check_decode(3, seed=3)
    assert len(problems) == 3
    assert "error" in problems[0]
    assert "lse differs" in problems[2]


def test_it_measures_every_batch_and_says_which_baselines_are_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = functools.partial(decode_baselines.flex_attention_calls, compiled=False)
    monkeypatch.setattr(decode_baselines, "flex_attention_calls", eager)
    rows = decode.measure_decode(quick=True)
    counts = {name: sum(row.name == name for row in rows) for name in {row.name for row in rows}}
    assert counts == {
        "paged_decode": 2 * 2 * 2,
        "planning / paged_decode": 2,
        "fp8 / bfloat16": 2 * 2,
        "paged_decode / FlexAttention": 2,
        "merge_partials / paged_decode": 2,
        "mla_decode": 2,
        "planning / mla_decode": 1,
    }
    printed = capsys.readouterr().out
    assert printed.count("not run: FlashInfer (ModuleNotFoundError") == 1
    assert printed.count("not run: sgl-flash-mla (ModuleNotFoundError") == 1


def test_flex_attention_is_asked_for_the_same() -> None:
    """So that the comparison is one: as it is called here, it gives what the kernel gives."""
    given = decode_cases.paged_set([200, 3, 129], TINY, 128, torch.bfloat16)
    (ours,), _ = decode.paged_calls([given])
    (theirs,) = decode_baselines.flex_attention_calls([given], compiled=False)
    assert error(theirs().transpose(1, 2).float(), ours().float()) < 0.01


@pytest.mark.parametrize("name", decode_cases.LENGTHS)
def test_lengths_are_the_same_each_time(name: str) -> None:
    make = decode_cases.LENGTHS[name]
    lengths = make(random.Random(1))
    assert lengths == make(random.Random(1))
    assert 0 < min(lengths) <= max(lengths) <= 131_072
