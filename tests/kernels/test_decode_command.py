# SPDX-License-Identifier: Apache-2.0
"""`python -m pd_bench.kernels decode`: its parts on this machine, small and interpreted."""

import functools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import decode_interpreted
import pytest
import torch

from pd_bench.kernels import __main__ as command
from pd_bench.kernels import (
    decode,
    decode_baselines,
    decode_cases,
    decode_check,
    host,
    merging,
    mixed,
)
from pd_bench.kernels.report import Comparison
from pd_kernels.attention import decode_call
from pd_kernels.attention.merge import launch_merge
from pd_kernels.attention.mla import launch_mla
from pd_kernels.attention.paged_kernel import launch_paged

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
    monkeypatch.setattr(decode, "STEPS", {"tiny": mixed.Step([40, 3], 90, 20)})
    monkeypatch.setattr(decode, "DOCUMENTS", ([300, 200], 100))
    monkeypatch.setattr(decode, "SHARDED", [60, 40])
    monkeypatch.setattr(decode, "MLA_CASES", {"ragged": ([70, 3], 16, 2)})
    monkeypatch.setattr(host, "LENGTHS", [40, 3])
    monkeypatch.setattr(host, "host_seconds", once)
    monkeypatch.setattr(host, "BAR_S", 1.0)
    for module in (decode, merging):
        monkeypatch.setattr(module, "copies", lambda _: 2)
    monkeypatch.setattr(decode, "copy_bandwidth", lambda: 1e12)
    monkeypatch.setattr(decode, "seconds", once)
    with decode_interpreted.dots_mended():
        yield


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_agree_with_their_references_on_random_batches() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "pd_bench.kernels", "decode", "--check", "--cases", "20"],
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        cwd=root / "kernels",
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_its_check_passes_in_the_interpreter() -> None:
    assert decode_check.check_decode(3, seed=3) == {}


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
    assert {name: len(lines) for name, lines in problems.items()} == {
        "paged_decode": 2,
        "mla_decode": 1,
    }
    assert "error" in problems["paged_decode"][0]
    assert "lse differs" in problems["mla_decode"][0]


def test_its_check_sees_shards_that_are_merged_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(outs, lses, out):  # type: ignore[no-untyped-def]
        lse = launch_merge(outs, lses, out)
        out *= 1 + 2e-6
        return lse

    monkeypatch.setattr(decode_check, "launch_merge", wrong)
    monkeypatch.setattr(decode_check, "_paged", lambda _: "")
    ((problem,),) = decode_check.check_decode(1, seed=3).values()
    assert problem.startswith("merge_partials, case 0 of seed 3: 2 shards of")
    assert "at most 1e-06" in problem


def test_its_check_sees_a_plan_that_is_not_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a CUDA graph had kept the lengths it was captured with."""

    def kept(step: Callable[[], None]) -> Callable[[], None]:
        step()
        return lambda: None

    monkeypatch.setattr(
        decode_call, "multiprocessors", lambda _: 8
    )  # one would have all in any plan
    monkeypatch.setattr(decode_check, "captured", kept)
    ((problem,),) = decode_check.check_decode(1, seed=3).values()
    assert "replayed with lengths" in problem
    assert problem.endswith("the plan differs from its definition")


def test_its_check_sees_what_only_a_replay_does_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(step: Callable[[], None]) -> Callable[[], None]:
        """The second replay writes nothing."""
        left = [step]
        return lambda: left.pop()() if left else None

    monkeypatch.setattr(decode_check, "captured", forgetful)
    ((problem,),) = decode_check.check_decode(1, seed=3).values()
    assert "replayed with lengths" in problem
    assert ": error " in problem


def test_a_case_that_raises_is_a_line_of_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("out of resource\nat some place")

    monkeypatch.setattr(decode_check, "launch_paged", broken)
    problems = decode_check.check_decode(2, seed=3)
    assert problems["paged_decode"] == [
        f"paged_decode, case {case} of seed 3: RuntimeError: out of resource" for case in range(2)
    ]


@pytest.fixture
def eager_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only baseline that is there: nothing is compiled, and vLLM cannot be imported."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    for name in [name for name in sys.modules if name.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    eager = functools.partial(decode_baselines.flex_attention_calls, compiled=False)
    monkeypatch.setattr(decode_baselines, "flex_attention_calls", eager)


@pytest.mark.usefixtures("eager_flex")
def test_it_measures_every_batch_and_says_which_baselines_are_not_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = list(decode.measure_decode(quick=True))
    counts = {name: sum(row.name == name for row in rows) for name in {row.name for row in rows}}
    assert counts == {
        "paged_decode": 2 * 2 * 2,
        "planning / paged_decode": 2,
        "fp8 / bfloat16": 2 * 2,
        "paged_decode / FlexAttention": 2,
        "mask_mod: tiles skipped / read": 1,
        "planning / mask_mod": 1,
        "mask_mod / FlexAttention": 1,
        "mixed_attention / two launches": 1,
        "mixed_attention: SM-aware / by number": 1,
        "merge_partials / paged_decode": 2,
        "mla_decode": 2,
        "planning / mla_decode": 1,
        "mean of paged_decode / FlexAttention": 1,
        "column_merge: on / off": 2,
        "swapped: on / off": 2,
        "direct_launch: on / off": 2,
        "host of a call / bar": 2,
    }
    timed = [row for row in rows if row.unit == "us" and not row.name.endswith("bar")]
    assert all(row.ratio == 1 for row in timed)
    printed = capsys.readouterr().out
    for name in ("FlashInfer", "XQA", "FA3", "TRITON_ATTN"):
        assert printed.count(f"not run: {name} (ModuleNotFoundError") == 1
        assert printed.count(f"not run: {name}, FP8 (ModuleNotFoundError") == 1
    assert printed.count("not run: sgl-flash-mla (ModuleNotFoundError") == 1


@pytest.mark.usefixtures("eager_flex")
def test_only_the_cases_that_are_asked_for_are_measured() -> None:
    rows = list(decode.measure_decode(quick=True, only=["mla_decode", "fp8"]))
    assert {(row.name, row.params["cache"]) for row in rows} == {
        ("mla_decode", "fp8"),
    }
    assert list(decode.measure_decode(quick=True, only=["no such case"])) == []


@pytest.mark.parametrize("name", decode_cases.LENGTHS)
def test_lengths_are_the_same_each_time(name: str) -> None:
    make = decode_cases.LENGTHS[name]
    lengths = make(random.Random(1))
    assert lengths == make(random.Random(1))
    assert 0 < min(lengths) <= max(lengths) <= 131_072


@pytest.mark.usefixtures("eager_flex")
def test_a_case_of_ours_that_raises_is_a_row_and_not_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("out of resource")

    monkeypatch.setattr(decode, "paged_decode", broken)
    rows = command.report(decode.measure_decode(quick=True), tmp_path / "rows.json")
    bad = [row for row in rows if not row.ok]
    assert {row.name for row in bad} == {
        "paged_decode",
        "paged_decode / FlexAttention",
        "paged_decode, mask_mod",
        "merge_partials / paged_decode",
    }
    assert [row.name for row in rows if row.ok] == [
        *("mixed_attention / two launches", "mixed_attention: SM-aware / by number"),
        *("direct_launch: on / off", "host of a call / bar") * 2,
        *("mla_decode", "planning / mla_decode", "mla_decode"),
    ]
    written = json.loads((tmp_path / "rows.json").read_text())
    assert [set(row) for row in written] == [set(Comparison.__annotations__)] * len(rows)
    assert written[0]["params"]["failed"] == "RuntimeError: out of resource"
    assert (written[0]["ours"], written[0]["ok"]) == (None, False)
    assert "paged_decode: heads=4/2 x 64 lengths=uniform page=16: FAILED: " in (
        capsys.readouterr().out
    )
