# SPDX-License-Identifier: Apache-2.0
"""Engines that are forked for tests behave as started ones: they are found, ended and asked how they ended."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest
from harness import wait_until
from pairs import Setup
from support.engine_forks import MARKER_BYTES
from support.engine_nursery import fork_engine, nursery

from pd_connector.tools.launch import StartError, VllmEngine, proc


@pytest.fixture
def engine(tmp_path) -> Iterator[VllmEngine]:
    """An engine with a worker of its own: three processes and Python's resource tracker. It is started here
    because it is killed."""
    recipe = Setup.of(worker_apart=True).recipe("decode")
    with recipe.engine("forked", tmp_path / "engine.log") as engine:
        yield engine.wait_ready()


def test_a_forked_engine_is_no_new_interpreter(engine: VllmEngine) -> None:
    assert engine.family is not None
    with open(f"/proc/{engine.family.pid}/cmdline") as file:
        assert "engine_forks.py" in file.read()


def test_its_processes_are_found_without_their_parent(engine: VllmEngine) -> None:
    family = engine.family
    assert family is not None
    before = {process.pid for process in family.members()}
    assert len(before) >= 3
    assert {pid for pid in before if family.id in proc.families(pid)} == before
    os.kill(family.pid, signal.SIGKILL)
    wait_until(lambda: not engine.running, "its first process has ended")
    assert family.returncode == -signal.SIGKILL
    left = {process.pid for process in family.members()}
    assert left <= before
    engine.kill()
    assert not proc.marked(family.id)


def test_an_engine_that_cannot_start_says_why(tmp_path) -> None:
    recipe = Setup.of(surely_no_key=1).recipe("decode")
    engine = recipe.engine("wrong", tmp_path / "engine.log")
    with pytest.raises(StartError, match="config is refused"):
        engine.start().wait_ready()


def test_a_variable_that_imports_read_is_a_reason_not_to_fork() -> None:
    forks = nursery("vllm", sys.executable)
    usual = {**forks.environment, proc.MARKER: "1" * MARKER_BYTES}
    assert not forks.unlike(usual | {"VLLM_SERVER_DEV_MODE": "1"})
    for name, value in (("OMP_NUM_THREADS", "2"), ("LD_PRELOAD", "libm.so.6"), ("LANG", "")):
        assert forks.unlike(usual | {name: value}) == {name}
    del usual["HF_HUB_OFFLINE"]
    assert forks.unlike(usual) == {"HF_HUB_OFFLINE"}


def test_an_engine_with_such_a_variable_is_refused(tmp_path) -> None:
    """Forked it would not have the variable; started, it would take ten times as long, and nobody would see why."""
    recipe = Setup().recipe("decode")
    recipe = recipe._replace(env=(*recipe.env, ("OMP_NUM_THREADS", "2")))
    with pytest.raises(ValueError, match="OMP_NUM_THREADS"):
        recipe.engine("unlike", tmp_path / "engine.log").start()


def test_what_is_no_engine_of_this_environment_is_started_as_ever(tmp_path) -> None:
    with open(tmp_path / "out", "wb") as out:
        started = fork_engine([sys.executable, "-c", "print(1)"], env=dict(os.environ), stdout=out)
        assert started.wait() == 0
    assert (tmp_path / "out").read_text() == "1\n"
