# SPDX-License-Identifier: Apache-2.0
"""The first block of the quick start, executed literally, brings a live stack."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "quickstart.md").read_text()
OWN_NETWORK = ["unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child"]
"""Ports of the page may be in use on this machine. Whatever is left is killed with the first process."""
FIRST = "A live stack in 15 seconds"
LIMIT_S = 280


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def stack() -> str:
    """The block that a reader pastes."""
    install, pasted = re.findall(r"^```sh\n(.*?)^```$", section(FIRST), re.M | re.S)
    assert "pip install" in install
    return str(pasted)


def test_the_quick_start_begins_with_it() -> None:
    assert re.findall(r"^## (.*)$", PAGE, re.M)[0] == FIRST


def test_the_stack_answers_and_its_page_shows_both_engines() -> None:
    if subprocess.run([*OWN_NETWORK, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine makes no network namespaces for this user")
    if missing := [program for program in ("curl", "ip") if not shutil.which(program)]:
        pytest.skip(f"needs {' and '.join(missing)}")
    (page,) = re.findall(r"<(http://127\.0\.0\.1:\d+/)>", section(FIRST))
    end = re.search(r"`(kill [^`]+)` ends all three", section(FIRST))
    assert end
    script = "\n".join(
        [
            "ip link set lo up || exit 1",
            stack(),
            "echo",
            f"until curl -sS {page}health | grep -q 'disaggregates.: true'; do sleep 0.1; done",
            f"curl -sS {page}health; echo",
            f"curl -sS {page} | head -c 15; echo",
            f"{end[1]}; wait; echo all have ended",
        ]
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [*OWN_NETWORK, "bash", "-c", script],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "PATH": path},
        check=False,
    )
    lines = done.stdout.splitlines()
    answers = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(answers) == 2, done.stdout + done.stderr
    answer, health = answers
    assert answer["usage"]["completion_tokens"] == 16
    states = [(one["role"], one["state"]) for one in health["engines"]]
    assert states == [("prefill", "up"), ("decode", "up")]
    assert health["disaggregates"] is True
    assert lines[-2:] == ["<!doctype html>", "all have ended"]
