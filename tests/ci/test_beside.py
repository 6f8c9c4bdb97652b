# SPDX-License-Identifier: Apache-2.0
"""`ci/beside`: commands run at the same time, and are read one after the other."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from support.waits import until

from gpu_run.places import ROOT

BESIDE = str(ROOT / "ci/beside")


def run(*commands: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BESIDE, *commands], capture_output=True, text=True, timeout=60, check=False
    )


def test_commands_run_at_the_same_time_and_outputs_do_not_mix(tmp_path: Path) -> None:
    """Each writes, waits until the others have written, and writes again."""
    waits = " && ".join(f"until [ -e {tmp_path}/{name} ]; do sleep 0.02; done" for name in "abc")
    commands = [f"echo {name}1; touch {tmp_path}/{name}; {waits}; echo {name}2" for name in "abc"]
    done = run(*commands)
    assert done.returncode == 0, done.stderr
    written = [line for line in done.stdout.split("\n") if line and "beside it" not in line]
    assert written == ["a1", "a2", "b1", "b2", "c1", "c2"]


@pytest.mark.parametrize(
    ("codes", "wanted"), [((0, 3), 3), ((2, 0), 2), ((2, 3), 2), ((0, 0, 4), 4), ((0, 0), 0)]
)
def test_a_failure_is_told_and_all_others_run_to_their_end(
    codes: tuple[int, ...], wanted: int
) -> None:
    done = run(*(f"sleep 0.1; echo end; exit {code}" for code in codes))
    assert done.returncode == wanted
    assert done.stdout.count("end\n") >= len(codes)
    assert done.stderr.count("FAILED: ") == sum(map(bool, codes))


def test_a_command_that_is_stopped_for_a_while_is_waited_for(tmp_path: Path) -> None:
    """It was told as failed, and nobody waited for its end."""
    pid = tmp_path / "pid"
    stops = f"echo $$ > {pid}.new; mv {pid}.new {pid}; kill -STOP $$; echo end; exit 4"
    stopped = f"grep -q '^State:.T' /proc/$(cat {pid})/status"
    goes_on = (
        f"until [ -e {pid} ] && {stopped}; do sleep 0.02; done; sleep 0.3; kill -CONT $(cat {pid})"
    )
    done = run(stops, goes_on)
    assert (done.returncode, done.stdout.splitlines()[0]) == (4, "end"), done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_of_them(tmp_path: Path, number: int) -> None:
    ready = [tmp_path / name for name in "ab"]
    commands = [f"echo $$ > {file}.new; mv {file}.new {file}; sleep 600; :" for file in ready]
    process = subprocess.Popen([BESIDE, *commands], stdout=subprocess.DEVNULL)
    try:
        until(lambda: all(file.exists() for file in ready))
        process.send_signal(number)
        assert process.wait(30) == 128 + number
        groups = [int(file.read_text()) for file in ready]
        until(lambda: not any(map(alive, groups)))
    finally:
        process.kill()


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
