# SPDX-License-Identifier: Apache-2.0
"""`ci/gpu`: a step that fails, hangs or cannot begin costs no other, and a second call goes on."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from support.clocks import Clock
from support.gpu_steps import SLEEP, runner, states, step
from support.waits import until

from gpu_run import command
from gpu_run.places import ROOT, describe_project, environment
from gpu_run.processes import Ended, members_of, run_limited
from gpu_run.record import LOG, REPORT, RESULTS, Record, Result


def test_a_step_that_fails_or_hangs_costs_no_other(tmp_path: Path) -> None:
    steps = [
        step("raises", "raise SystemExit('no such kernel')"),
        step("hangs", SLEEP, limit_s=1.0),
        step("lacks", "", imports=["no_such_module"]),
        step("works", "import sys; open(sys.argv[1], 'w').write('[1, 2]'); print('done')"),
    ]
    one = runner(tmp_path / "state", tmp_path / "out")
    assert one.run(steps, budget_s=100) == []
    assert states(one) == {
        "raises": "failed",
        "hangs": "timeout",
        "lacks": "missing",
        "works": "ok",
    }
    results = one.record.results
    assert results["raises"].tail == ["no such kernel"]
    assert "no_such_module" in results["lacks"].why
    assert results["works"].figures == [1, 2]
    out = tmp_path / "out"
    assert set(json.loads((out / RESULTS).read_text())) == set(results)
    assert "no such kernel" in (out / REPORT).read_text()
    assert "done" in (out / LOG).read_text()


def test_what_a_step_has_started_ends_with_it(tmp_path: Path) -> None:
    """A descendant in a session of its own, whose parent is gone, as an engine's workers are."""
    pid_file = tmp_path / "pid"
    child = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True); open({str(pid_file)!r}, 'w').write(str(p.pid))"
    env = {**os.environ}
    ended = run_limited(
        [sys.executable, "-c", child], cwd=tmp_path, env=env, log=tmp_path / "log", limit_s=60
    )
    assert ended.returncode == 0
    assert not alive(int(pid_file.read_text()))
    assert members_of("no such step") == []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_steps_side_by_side_run_at_the_same_time(tmp_path: Path) -> None:
    """Each of these waits for the other one."""

    def meets(own: str, other: str) -> str:
        there = f"os.path.exists({str(tmp_path / other)!r})"
        return f"import os, time; open({str(tmp_path / own)!r}, 'w')\nwhile not {there}: time.sleep(0.01)"

    steps = [
        step("a", meets("a", "b"), beside="checks"),
        step("b", meets("b", "a"), beside="checks"),
        step("c", f"import os; assert os.path.exists({str(tmp_path / 'a')!r})"),
    ]
    one = runner(tmp_path / "state")
    assert one.run(steps, budget_s=100) == []
    assert states(one) == dict.fromkeys("abc", "ok")


def test_a_second_call_goes_on_where_the_first_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told"
    code = f"open({str(told)!r}, 'a').write('x')"
    steps = [step("first", code), step("second", code), step("slow", SLEEP, limit_s=1.5)]
    one = runner(tmp_path / "state")
    assert one.run(steps[:1], budget_s=60) == []
    again = runner(tmp_path / "state")
    assert again.run(steps[:2], budget_s=60) == []
    assert told.read_text() == "xx"
    # With less than its own time a step has had no fair chance: it is left for another call.
    monkeypatch.setattr(
        "gpu_run.runner.time", Clock()
    )  # nothing of the budget is gone when it begins
    assert again.run(steps, budget_s=1) == ["slow"]
    assert states(again)["slow"] == "cut"
    # With less than half of its time it is not begun.
    long = step("long", "", limit_s=100)
    assert again.run([long], budget_s=40) == ["long"]
    assert "long" not in states(again)


def test_results_are_taken_up_on_another_machine(tmp_path: Path) -> None:
    """What the call before brought back lies in the folder of `--out`."""
    told, out = tmp_path / "told", tmp_path / "out"
    steps = [step("a", f"open({str(told)!r}, 'a').write('x')")]
    assert runner(tmp_path / "one machine", out).run(steps, budget_s=60) == []
    again = runner(tmp_path / "another machine", out)
    assert again.run(steps, budget_s=60) == []
    assert told.read_text() == "x"
    assert states(again) == {"a": "ok"}


@pytest.mark.parametrize(("code", "state"), [("raise SystemExit(1)", "failed"), (SLEEP, "timeout")])
def test_a_failed_step_is_tried_again_when_its_sources_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, state: str
) -> None:
    """Errors are fixed between two calls. Without a fix there is no second try."""
    monkeypatch.setattr("gpu_run.step.ROOT", tmp_path)
    (tmp_path / "kernels").mkdir()
    source = tmp_path / "kernels" / "one.py"
    source.write_text("wrong = True")
    tries: list[Ended] = []

    def counted(*what: Any, **how: Any) -> Ended:
        tries.append(run_limited(*what, **how))
        return tries[-1]

    monkeypatch.setattr("gpu_run.runner.run_limited", counted)
    limit_s = 0.5 if state == "timeout" else 60.0
    broken = replace(step("a", code, limit_s=limit_s), sources=["kernels"])
    for _ in range(2):
        one = runner(tmp_path / "state")
        assert one.run([broken], budget_s=60) == []
        assert states(one) == {"a": state}
    assert len(tries) == 1
    source.write_text("wrong = False")
    runner(tmp_path / "state").run([broken], budget_s=60)
    assert len(tries) == 2
    works = replace(step("a", ""), sources=["kernels"])
    for _ in range(2):
        assert runner(tmp_path / "state").run([works], budget_s=60) == []
        source.write_text("of a step that succeeded")
    assert len(tries) == 3


def test_all_output_together_fits_what_a_host_gives_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_run.record.STEP_BYTES", 50)
    monkeypatch.setattr("gpu_run.record.LOG_BYTES", 100)
    record, log = Record(tmp_path), tmp_path / "a.out"
    log.write_text("begin " + "." * 100 + " end")
    record.put("a", Result("ok"), log)
    record.put("b", Result("ok"), log)
    kept = (tmp_path / LOG).read_text()
    assert len(kept) == 100
    assert "begin" not in kept
    assert kept.endswith(" end")


def test_a_step_is_run_again_without_losing_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors are fixed while the GPU is there."""
    told = tmp_path / "told"
    steps = [step(name, f"open({str(told)!r}, 'a').write({name!r})") for name in ("a", "b")]
    monkeypatch.setattr(
        command, "chosen", lambda only: [one for one in steps if not only or one.name in only]
    )
    monkeypatch.setattr(command, "CARRIED", tmp_path / "none")
    state = ["--state", str(tmp_path / "state")]
    assert command.main(state) == 0
    assert command.main([*state, "--afresh", "--only", "b"]) == 0
    assert told.read_text() == "abb"
    assert set(Record(tmp_path / "state").results) == {"a", "b"}
    assert command.main([*state, "--afresh"]) == 0
    assert told.read_text() == "abbab"


def test_a_run_that_is_killed_has_kept_its_results(tmp_path: Path) -> None:
    """`ci/gpu` itself, in the middle of its second step: what it wrote after the first lies in its folder and in `--out`, from
    where a call on another machine goes on."""
    state, out, told = tmp_path / "state", tmp_path / "out", tmp_path / "told"
    first = f"import sys; open({str(told)!r}, 'a').write('a'); open(sys.argv[1], 'w').write('[7]'); print('done')"
    program = (
        "import sys; from gpu_run import command; import support.gpu_steps as t\n"
        f"steps = [t.step('a', {first!r}), t.step('b', t.SLEEP if sys.argv[1] == 'hangs' else '')]\n"
        "command.chosen = lambda only: steps\n"
        "sys.exit(command.main(['--state', sys.argv[2]]))"
    )
    env = environment(tmp_path / "other", [Path(__file__).parent, ROOT / "tests"])
    env |= {"OUT": str(out)}
    killed = subprocess.Popen(
        [sys.executable, "-c", program, "hangs", str(state)], env=env, start_new_session=True
    )
    try:
        until((state / "b.out").exists, "the second step", 60)
    finally:
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
    for pid in descendants(state):
        os.kill(pid, signal.SIGKILL)
    for folder in (state, out):
        results = Record(folder).results
        assert {name: one.state for name, one in results.items()} == {"a": "ok", "b": "cut"}
        assert results["a"].figures == [7]
        assert "done" in (folder / LOG).read_text()
        assert (folder / REPORT).read_text().startswith("a ")
    elsewhere = [sys.executable, "-c", program, "works", str(tmp_path / "another machine")]
    assert subprocess.run(elsewhere, env=env, check=False).returncode == 0
    assert told.read_text() == "a"
    assert {name: one.state for name, one in Record(out).results.items()} == {"a": "ok", "b": "ok"}


def descendants(state: Path) -> list[int]:
    """Pids of steps whose command names this folder."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and str(state).encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def test_this_clone_is_a_package_with_entry_points(tmp_path: Path) -> None:
    describe_project(tmp_path)
    (found,) = metadata.distributions(name="pd-connector", path=[str(tmp_path)])
    groups = {point.group for point in found.entry_points}
    assert {"vllm.general_plugins", "pd_connector.commands", "console_scripts"} <= groups
    installed = metadata.distribution("pd-connector").entry_points
    assert set(found.entry_points.names) == set(installed.names)


def test_engines_do_not_wait_for_flashinfer_s_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    assert environment(tmp_path, [])["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "1")
    assert environment(tmp_path, [])["VLLM_USE_FLASHINFER_SAMPLER"] == "1"


def test_a_home_that_cannot_be_written_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton, torch and engines keep what they compile there."""
    assert environment(tmp_path, [])["HOME"] == os.environ["HOME"]
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("gpu_run.places.LEAST_TEMPORARY", 1 << 60)
    told = environment(tmp_path, [])
    assert all(Path(told[name]).is_relative_to(tmp_path) for name in ("HOME", "TMPDIR"))
    assert Path(told["TMPDIR"]).is_dir()
