# SPDX-License-Identifier: Apache-2.0
"""`ci/gpu`: what goes wrong on the day loses no result, and is explained in a line."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.gpu_steps import SLEEP, runner, states, step

from gpu_run import command
from gpu_run.record import RESULTS, Result


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import ctypes; ctypes.string_at(0)", r"ended by Segmentation fault \(signal 11\)"),
        ("raise SystemExit('CUDA error: out of memory')", "exit code 1: CUDA error: out of memory"),
    ],
)
def test_a_failure_says_what_it_was(tmp_path: Path, code: str, why: str) -> None:
    one = runner(tmp_path / "state")
    one.run([step("a", f"def inner():\n    {code}\ninner()")], budget_s=100)
    result = one.record.results["a"]
    assert (result.state, re.fullmatch(why, result.why) is not None) == ("failed", True), result.why
    if "signal" in why:
        assert "in inner" in "\n".join(result.tail), "where in Python the crash was"


def test_a_hung_step_says_where_it_hung(tmp_path: Path) -> None:
    hangs = step("a", f"def inner():\n    {SLEEP}\ninner()", limit_s=1.5)
    one = runner(tmp_path / "state")
    one.run([hangs], budget_s=100)
    assert states(one) == {"a": "timeout"}
    assert "in inner" in "\n".join(one.record.results["a"].tail)


def test_a_step_that_prints_without_end_fills_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_run.processes.LOOK_S", 0.05)
    monkeypatch.setattr("gpu_run.processes.MOST_BYTES", 1 << 20)
    monkeypatch.setattr("gpu_run.processes.KEPT_BYTES", 1 << 10)
    prints = "import time\nfor n in range(300):\n    print('x' * 100_000, n, flush=True); time.sleep(0.002)\nprint('end')"
    one = runner(tmp_path / "state")
    one.run([step("a", prints)], budget_s=100)
    assert states(one) == {"a": "ok"}
    assert (tmp_path / "state" / "a.out").stat().st_size < 20 << 20
    assert one.record.results["a"].tail[-1] == "end"


def test_what_a_running_step_has_measured_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine may be taken away while the step runs."""
    monkeypatch.setattr("gpu_run.processes.LOOK_S", 0.1)
    out = tmp_path / "out"
    kept = f"json.load(open({str(out / RESULTS)!r}))['a']"
    sees = (
        "import json, sys, time\nprint('begun', flush=True)\nopen(sys.argv[1], 'w').write('[1]')\n"
        f"while {kept}['figures'] != [1] or {kept}['tail'] != ['begun']: time.sleep(0.05)"
    )
    one = runner(tmp_path / "state", out)
    one.run([step("a", sees, limit_s=30)], budget_s=100)
    assert states(one) == {"a": "ok"}


def test_a_step_that_brought_a_machine_down_comes_last(tmp_path: Path) -> None:
    told = tmp_path / "told"
    steps = [step(name, f"open({str(told)!r}, 'a').write({name!r})") for name in "abc"]
    one = runner(tmp_path / "state")
    one.record.put("a", Result("cut"))  # that call ended during it
    one.record.put("b", Result("cut", "ended after 3 s"))  # its time was over
    one.run(steps, budget_s=100)
    assert told.read_text() == "bca"


@pytest.mark.parametrize("broken", ['{"a": {"state": "o', '{"a": {"unknown": 1}}', "[1]", ""])
def test_results_that_broke_off_cost_no_call(tmp_path: Path, broken: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / RESULTS).write_text(broken)
    one = runner(tmp_path / "state", out)
    one.run([step("a", "")], budget_s=100)
    assert set(json.loads((out / RESULTS).read_text())) == {"a"}
    assert (tmp_path / "state" / "results.broken").read_text() == broken


def test_a_folder_of_out_that_takes_nothing_costs_no_step(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    one = runner(tmp_path / "state", tmp_path / "out")
    absent = replace(step("a", ""), command=("no-such-program",))
    one.run([absent, step("b", "")], budget_s=100)
    assert states(one) == {"a": "failed", "b": "ok"}
    assert "no-such-program" in one.record.results["a"].why


def test_without_a_gpu_nothing_else_begins_and_all_is_tried_again(tmp_path: Path) -> None:
    """A driver that is too old, say. The next machine may be right."""
    blind = "print('no GPU: the driver is too old'); raise SystemExit(2)"
    steps = [step("a", blind), step("b", "")]
    one = runner(tmp_path / "state")
    assert one.run(steps, budget_s=100) == ["a", "b"]
    assert one.record.results["a"].line.endswith("no GPU: the driver is too old")
    assert runner(tmp_path / "state").run([step("a", ""), steps[1]], budget_s=100) == []


@pytest.mark.parametrize("files", [[], ["nvidiactl", "nvidia0"]])
@pytest.mark.parametrize("rehearse", [True, False])
def test_an_engine_that_finds_no_device_has_failed_only_where_a_gpu_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], rehearse: bool
) -> None:
    """vLLM says the same without a GPU, and beside a driver that does not fit it. Its log's end follows."""
    monkeypatch.setattr("gpu_run.runner.DEVICES", tmp_path / "dev")
    (tmp_path / "dev").mkdir()
    for name in files:
        (tmp_path / "dev" / name).touch()
    ends = "print('RuntimeError: Failed to infer device type, please set'); print('more\\n' * 60); raise SystemExit('logs: there')"
    one = replace(runner(tmp_path / "state"), rehearse=rehearse)
    left = one.run([step("engines", ends), step("next", "")], budget_s=100)
    told = one.record.results["engines"]
    if files:
        assert (told.state, told.why) == ("failed", "exit code 1: logs: there")
    else:
        assert told.why.startswith("no GPU: vLLM: Failed to infer device type")
        assert told.state == ("ok" if rehearse else "missing")
    assert left == (["engines", "next"] if not files and not rehearse else [])


@pytest.mark.parametrize("manifest", ["", "{}", '{"python": "2.7", "parts": []}'])
def test_packages_that_cannot_be_used_cost_no_step_without_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    manifest: str,
) -> None:
    """Damaged on the way, or for another Python."""
    (tmp_path / "carry").mkdir()
    (tmp_path / "carry" / "manifest.json").write_text(manifest)
    monkeypatch.setattr(command, "chosen", lambda _: [step("a", "")])
    told = ["--parts", str(tmp_path / "carry"), "--state", str(tmp_path / "state")]
    assert command.main(told) == 0
    assert "not used: " in capsys.readouterr().out
