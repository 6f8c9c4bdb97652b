# SPDX-License-Identifier: Apache-2.0
"""`pd-connector demo` as a user runs it: it ends by itself, and nothing is left however it ends."""

import os
import shutil
import signal
import sys

import pytest
from harness import (
    wait_until,
)
from support.leftovers import survivors
from support.wheels import build, copy_source, installed

from pd_connector.tools.launch import Family

COMMAND = [sys.executable, "-m", "pd_connector", "demo"]


@pytest.fixture
def demo(tmp_path):
    """The command, running, with its output in a file."""
    log = tmp_path / "output"
    with Family(COMMAND, env={"COLUMNS": "120"}, log=log) as family:
        yield family, log


@pytest.fixture
def wheel_s_demo(tmp_path, monkeypatch):
    """The command of a wheel that is installed beside vLLM. The clone is out of reach."""
    commands = installed(build(copy_source(tmp_path)), tmp_path / "environment")
    shutil.rmtree(tmp_path / "source")
    log = tmp_path / "output"
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    with Family([str(commands / "pd-connector"), "demo"], env={"COLUMNS": "120"}, log=log) as it:
        yield it, log


def test_two_engines_and_a_router_of_a_wheel_answer_as_one_engine(wheel_s_demo):
    """Also: no process is left."""
    family, log = wheel_s_demo
    wait_until(lambda: family.returncode is not None, log.read_text, deadline_s=600)
    said = log.read_text()
    assert family.returncode == 0, said
    # With AMX, vLLM's attention sums a prompt of 3,000 tokens in another order than its last token alone.
    exact = said.count("bit for bit")
    words = " ".join(said.split())
    assert exact == 5 or (exact == 4 and "within" in words and "One engine differs" in words), said
    assert "two GPU hosts" in said.splitlines()[-1], said
    assert survivors(family) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_is_left_when_it_is_ended_while_engines_start(demo, number):
    family, log = demo
    # Its reaper, two engines and a router.
    wait_until(lambda: len(survivors(family)) >= 4, log.read_text)
    # As a terminal does it for Ctrl-C: to the whole foreground group.
    os.killpg(family.pid, number)
    wait_until(lambda: family.returncode is not None, log.read_text)
    wait_until(lambda: not survivors(family), lambda: f"no survivors: {family.members()}")
    if number != signal.SIGKILL:
        assert family.returncode == 130
        assert "interrupted" in log.read_text()
