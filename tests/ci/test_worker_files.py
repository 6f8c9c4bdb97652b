# SPDX-License-Identifier: Apache-2.0
"""Workers of the engine tests: a file that two of them share starts its engines twice."""

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

pytest.importorskip("xdist")
TESTS = Path(__file__).parents[1]
CONFTEST = """
import pytest
from support.worker_files import files_together

@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return files_together(config, log, ("test_b", "test_d"))
"""
FILE = """
import os, pathlib, time

import pytest

@pytest.mark.parametrize("number", range(4))
def test_it(number):
    time.sleep(0.02)
    with open({log!r}, "a") as log:
        log.write(f"{{pathlib.Path(__file__).stem}} {{os.environ['PYTEST_XDIST_WORKER']}}\\n")
"""


def test_a_file_stays_with_one_worker_and_some_files_with_the_same(tmp_path: Path) -> None:
    log, names = tmp_path / "log", ("test_a", "test_b", "test_c", "test_d")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name in names:
        (tmp_path / f"{name}.py").write_text(FILE.format(log=str(log)))
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--no-loadscope-reorder", "."]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(TESTS)
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:]
    workers = defaultdict(set)
    for line in log.read_text().splitlines():
        name, worker = line.split()
        workers[name].add(worker)
    assert {name: len(workers[name]) for name in names} == dict.fromkeys(names, 1)
    assert workers["test_b"] == workers["test_d"]
    assert len(set.union(*workers.values())) == 2
