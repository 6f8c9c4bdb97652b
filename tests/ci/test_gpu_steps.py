# SPDX-License-Identifier: Apache-2.0
"""The steps of `ci/gpu`: what they need, how long they may take, and their rehearsal without a
GPU."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpu_run import command
from gpu_run.places import ROOT
from gpu_run.record import RESULTS
from gpu_run.step import CALL_S, KERNELS, Step, side_by_side
from gpu_run.steps import ENGINES, FIRST, PAYLOADS, ROUTED, STEPS, chosen


def test_the_command_names_unknown_steps_and_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="no step is called mlb: there are probe, paged-check"):
        command.main(["--only", "mlb"])
    assert command.main(["--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [one.name for one in STEPS]
    assert [one.name for one in chosen(["mla", "probe"])] == ["probe", "mla"]
    told = {part for one in STEPS for part in (*one.command, *one.rehearsal, *one.files)}
    assert not [part for part in told if part.startswith("tests/") and not (ROOT / part).exists()]
    named = {name for one in STEPS for name in (*one.files, *one.sources)}
    assert not [name for name in named if not (ROOT / name).exists()]


def test_the_first_call_s_limits_add_up_to_the_budget() -> None:
    """No step of it is left out because one before it took all the time that it may take."""
    limits = [max(step.limit_s for step in group) for group in side_by_side(FIRST)]
    assert 0.95 * CALL_S < sum(limits) <= CALL_S
    assert CALL_S <= 9.5 * 60, "hosts end a command after ten minutes"
    assert all(step.limit_s <= CALL_S for step in STEPS)
    assert sum(step.limit_s for step in ENGINES[:2]) <= CALL_S
    assert not any("vllm" in step.imports for step in FIRST)


def test_checks_run_side_by_side_and_nothing_that_is_timed_does() -> None:
    (group,) = [group for group in side_by_side(STEPS) if len(group) > 1]
    assert [step.name for step in group] == [
        *("paged-check", "mla-check", "mixed-check", "transfer-check")
    ]
    assert all("--check" in step.command for step in group)


def bench_commands(steps: Sequence[Step]) -> list[tuple[str, list[str]]]:
    """PD_KERNELS_TUNING and the arguments of each step that is a benchmark of the kernels."""
    found = []
    for step in steps:
        if "pd_bench.kernels" in step.command:
            settings = [part for part in step.command if part.startswith("PD_KERNELS_TUNING=")]
            place = step.command.index("pd_bench.kernels") + 1
            value = settings[0].partition("=")[2] if settings else ""
            found.append((value, list(step.command[place:])))
    return found


@pytest.mark.parametrize("needed", [KERNELS, PAYLOADS])
def test_benches_get_as_far_as_the_gpu_with_no_more_than_their_steps_say(
    needed: Sequence[str],
) -> None:
    """A borrowed GPU's host may have torch and Triton and little else. The commands themselves, in
    one process, since importing torch takes seconds."""
    commands = bench_commands([one for one in STEPS if set(one.imports) == set(needed)])
    assert commands
    known = {module for one in STEPS for module in one.imports}
    absent = sorted(known - set(needed) - {"numpy"})  # Triton itself takes numpy where it is
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent}));"
        "from pd_bench.kernels.__main__ import main; from pd_kernels.tuning import Tuning;"
        f"print([(Tuning.of(told).code > 0, main(given)) for told, given in {commands}])"
    )
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str([(True, 2)] * len(commands))


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


def test_the_tests_step_names_what_the_tests_configuration_imports() -> None:
    (tests,) = chosen(["tests"])
    source = (ROOT / "tests" / "conftest.py").read_text()
    imported = set(re.findall(r"^(?:from|import) (\w+)", source, re.M)) - sys.stdlib_module_names
    assert imported <= set(tests.imports)


def test_it_is_rehearsed_without_a_gpu(tmp_path: Path) -> None:
    """The real command and real steps, to the line that there is no GPU."""
    names = ["probe", "mla-triton", "transfer-quick"]
    done = subprocess.run(
        [
            *(ROOT / "ci" / "gpu", "--rehearse", "--only", ",".join(names)),
            *("--state", tmp_path / "state", "--out", tmp_path / "out"),
        ],
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "out" / "rehearsal" / RESULTS).read_text())
    assert {name: one["state"] for name, one in results.items()} == dict.fromkeys(names, "ok")
    assert all(results[name]["why"].startswith("no GPU") for name in names[1:])
    assert results["probe"]["figures"]["packages"]["torch"] != "missing"
    assert re.search(r"^mla-triton +ok +\d+ s", done.stdout, re.M)
    assert "to carry: " in done.stdout
    assert re.search(r"^to bring back: results.json \d+ KiB, report.txt", done.stdout, re.M)
    assert not (tmp_path / "state" / RESULTS).exists(), "a GPU's results are others"
