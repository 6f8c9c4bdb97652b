# SPDX-License-Identifier: Apache-2.0
"""`make` in a folder where what it runs are scripts, which fail where they are told to."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BESIDE = {"ci/beside": 'for line; do sh -c "$line"; done\n'}
PARTS = {"computing": "-n 2", "waiting": "-n 4", "quiet": "-m quiet"}


def parts_run(folder: Path, *flags: str, failing: str) -> tuple[list[str], int]:
    """The parts that ran, in order, and make's exit status."""
    (folder / "ci").mkdir()
    shutil.copy(ROOT / "Makefile", folder)
    shutil.copy(ROOT / "ci/beside", folder / "ci")
    for name, script in {
        "ci/setup": "exit 0",
        "ci/setup-tests": "exit 0",
        "pytest": f'echo "$*" >> ran; case "$*" in *"{PARTS[failing]}"*) exit 1;; esac',
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    done = subprocess.run(
        ["make", *flags, "fast", "PYTEST=./pytest"],
        cwd=folder,
        check=False,
        env={
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("MAKE", "MFLAGS"))
        },
        capture_output=True,
        timeout=60,
    )
    ran = (folder / "ran").read_text().splitlines()
    return [next(p for p, mark in PARTS.items() if mark in line) for line in ran], done.returncode


@pytest.mark.parametrize("failing", PARTS)
def test_with_k_all_parts_run_whatever_fails_and_make_fails(tmp_path: Path, failing: str):
    ran, status = parts_run(tmp_path, "-k", failing=failing)
    assert ran == list(PARTS)
    assert status != 0


def test_without_k_the_first_failure_ends_the_run(tmp_path: Path):
    assert parts_run(tmp_path, failing="computing") == (["computing"], 2)


def test_with_j_parts_still_run_one_after_the_other(tmp_path: Path):
    assert parts_run(tmp_path, "-k", "-j4", failing="computing")[0] == list(PARTS)


def test_lint_builds_the_site(tmp_path: Path):
    """A link in it led nowhere for weeks: nothing ran `make docs`."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("ci/setup", "ci/docs", ".venv/bin/lint-imports"):
        script = tmp_path / name
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text("#!/bin/sh\ncase $0 in *docs) exit 7;; esac\n")
        script.chmod(0o755)
    shutil.copy(ROOT / "ci/beside", tmp_path / "ci")
    done = subprocess.run(
        ["make", "lint", "PY=true"],
        cwd=tmp_path,
        env={**os.environ, "LC_ALL": "C"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "Error 7" in done.stderr


@pytest.mark.parametrize(
    ("target", "sets_up"),
    [
        ("demo", ["ci/setup"]),
        ("doctor", ["ci/setup"]),
        ("setup", ["ci/setup"]),
        ("computing", ["ci/setup", "ci/setup-tests"]),
        ("engine", ["ci/setup", "ci/setup-tests"]),
        ("ray", ["ci/setup", "ci/setup-tests"]),
        ("test", ["ci/setup", "ci/setup-tests"]),
    ],
)
def test_only_targets_with_tests_set_up_what_only_tests_need(
    tmp_path: Path, target: str, sets_up: list[str]
):
    """`make demo` and `make doctor` installed vLLM 0.31, SGLang and Ray, and waited for them."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("ci/setup", "ci/setup-tests", ".venv/bin/pd-connector", "ci/beside", "pytest"):
        script = tmp_path / name
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(f'#!/bin/sh\necho "{name}" >> "{tmp_path}/ran"\n{BESIDE.get(name, "")}')
        script.chmod(0o755)
    variables = ("PYTEST=./pytest", "SGLANG=true", "RAY=true", "PY=true")
    outside = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    subprocess.run(
        ["make", "-k", target, *variables],
        cwd=tmp_path,
        env=outside,
        check=False,
        capture_output=True,
        timeout=60,
    )
    ran = (tmp_path / "ran").read_text().splitlines()
    assert list(dict.fromkeys(name for name in ran if name.startswith("ci/setup"))) == sets_up
    if target == "demo":
        assert ran[-1] == ".venv/bin/pd-connector"
