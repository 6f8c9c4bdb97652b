# SPDX-License-Identifier: Apache-2.0
"""`ci/gpu`: a step that fails, hangs or cannot begin costs no other, and a second call goes on."""

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest
from support.waits import until

from gpu_run import command
from gpu_run.places import ROOT, describe_project, environment
from gpu_run.processes import members_of, run_limited
from gpu_run.record import LOG, REPORT, RESULTS, Record
from gpu_run.runner import Runner
from gpu_run.steps import JSON, KERNELS, PAYLOADS, ROUTED, STEPS, Step, chosen

SLEEP = "import time; time.sleep(600)"


def step(name: str, code: str, *, limit_s: float = 60.0, imports: Sequence[str] = ()) -> Step:
    program = (sys.executable, "-c", code, JSON)
    return Step(name, "a test", program, program, limit_s, imports)


def runner(folder: Path, out: Path | None = None) -> Runner:
    env = environment(folder, [])
    return Runner(folder, Record(folder, out), env, rehearse=False, say=lambda _: None)


def states(one: Runner) -> dict[str, str]:
    return {name: result.state for name, result in one.record.results.items()}


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


def test_a_second_call_goes_on_where_the_first_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_run.runner.LEAST_S", 0.5)
    told = tmp_path / "told"
    code = f"open({str(told)!r}, 'a').write('x')"
    steps = [step("first", code), step("second", code), step("slow", SLEEP, limit_s=100.0)]
    one = runner(tmp_path / "state")
    assert one.run(steps[:1], budget_s=60) == []
    again = runner(tmp_path / "state")
    assert again.run(steps[:2], budget_s=60) == []
    assert told.read_text() == "xx"
    # With less than its own time a step has had no fair chance: it is left for another call.
    assert again.run(steps, budget_s=1) == ["slow"]
    assert states(again)["slow"] == "cut"
    # No time at all: it is not begun.
    assert again.run(steps, budget_s=0) == ["slow"]


def test_a_step_is_run_again_without_losing_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrong is mended while the GPU is there."""
    told = tmp_path / "told"
    steps = [step(name, f"open({str(told)!r}, 'a').write({name!r})") for name in ("a", "b")]
    monkeypatch.setattr(
        command, "chosen", lambda only: [one for one in steps if not only or one.name in only]
    )
    state = ["--state", str(tmp_path / "state")]
    assert command.main(state) == 0
    assert command.main([*state, "--afresh", "--only", "b"]) == 0
    assert told.read_text() == "abb"
    assert set(Record(tmp_path / "state").results) == {"a", "b"}
    assert command.main([*state, "--afresh"]) == 0
    assert told.read_text() == "abbab"


def test_a_run_that_is_killed_has_kept_its_results(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; import test_gpu_run as t;"
        "t.runner(Path(sys.argv[1])).run([t.step('a', 'print(1)'), t.step('b', t.SLEEP)], 500)"
    )
    state = tmp_path / "state"
    env = environment(tmp_path / "other", [Path(__file__).parent, ROOT / "tests"])
    killed = subprocess.Popen(
        [sys.executable, "-c", program, str(state)], env=env, start_new_session=True
    )
    try:
        until((state / "b.out").exists, "the second step", 60)
    finally:
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
    for pid in descendants(state):
        os.kill(pid, signal.SIGKILL)
    assert {name: one.state for name, one in Record(state).results.items()} == {
        "a": "ok",
        "b": "cut",
    }
    assert not Record(state).done("b")


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


def test_the_command_names_unknown_steps_and_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="no step is called mlb: there are probe, decode-check"):
        command.main(["--only", "mlb"])
    assert command.main(["--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [one.name for one in STEPS]
    assert [one.name for one in chosen(["mla", "probe"])] == ["probe", "mla"]
    told = {part for one in STEPS for part in (*one.command, *one.rehearsal)}
    assert not [part for part in told if part.startswith("tests/") and not (ROOT / part).exists()]


@pytest.mark.parametrize(
    ("modules", "needed"),
    [
        (("decode", "decode_check"), KERNELS),
        (("decode", "decode_check", "transfer", "transfer_check"), PAYLOADS),
    ],
)
def test_benches_need_no_more_than_their_steps_say(
    modules: Sequence[str], needed: Sequence[str]
) -> None:
    """A borrowed GPU's host may have torch and Triton and little else."""
    known = {module for one in STEPS for module in one.imports}
    absent = sorted(known - set(needed) - {"numpy"})  # Triton itself takes numpy where it is
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent}));"
        f"import pd_kernels.bench.__main__; from pd_kernels.bench import {', '.join(modules)}"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_demo_s_steps_name_what_its_router_needs() -> None:
    """A step whose router cannot start would fail only when two engines have started."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    names = {re.split("[<>=]", one)[0] for one in extras["router"]} - {
        "aiohappyeyeballs"
    }  # aiohttp's
    wanted = {{"pyyaml": "yaml"}.get(name, name.replace("-", "_")) for name in names}
    routed = [one for one in STEPS if "demo" in one.command]
    assert routed
    assert all(set(one.imports) == set(ROUTED) >= wanted for one in routed)


def test_engines_do_not_wait_for_flashinfer_s_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    assert environment(tmp_path, [])["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "1")
    assert environment(tmp_path, [])["VLLM_USE_FLASHINFER_SAMPLER"] == "1"


def rehearse(only: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(ROOT / "ci" / "gpu", "--rehearse", "--only", only),
            *("--state", folder / "state", "--out", folder / "out"),
        ],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.timeout(600)
def test_it_is_rehearsed_without_a_gpu(tmp_path: Path) -> None:
    """The real command and real steps; those with engines are rehearsed by their own tests."""
    names = ["probe", "device-slots", "tests"]
    done = rehearse(",".join(names), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "out" / RESULTS).read_text())
    assert {name: one["state"] for name, one in results.items()} == dict.fromkeys(names, "ok")
    assert results["probe"]["figures"]["packages"]["torch"] != "missing"
    slots = {row["params"]["codec"] for row in results["device-slots"]["figures"]}
    assert slots == {"agent-device", "agent-host"}
    assert "has a result" in rehearse("probe", tmp_path).stdout
