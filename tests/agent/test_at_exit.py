# SPDX-License-Identifier: Apache-2.0
"""An agent that nobody has closed ends before the interpreter does."""

import os
import subprocess
import sys
from pathlib import Path

LEAVES_ONE_OPEN = """
import atexit
threads = []
atexit.register(lambda: print([thread.is_alive() for thread in threads]))  # called last
from support.agents import SHORT, Rank
rank = Rank(SHORT)
threads.append(rank.agent._thread._thread)
print([thread.is_alive() for thread in threads], flush=True)
"""

FORKS = (
    LEAVES_ONE_OPEN
    + """
import os, sys
child = os.fork()
if not child:
    threads.clear()
    sys.exit()
os.waitpid(child, 0)
print(threads[0].is_alive(), rank.agent._thread._closing.is_set(), flush=True)
"""
)


def lines_of(script: str) -> list[str]:
    tests = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", script]
    environ = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.splitlines()


def test_an_agent_that_was_left_open_has_ended_when_the_interpreter_does() -> None:
    assert lines_of(LEAVES_ONE_OPEN) == ["[True]", "[False]"]


def test_a_child_that_was_forked_closes_nothing_of_its_parent() -> None:
    assert lines_of(FORKS) == ["[True]", "[]", "True False", "[False]"]
