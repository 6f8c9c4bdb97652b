# SPDX-License-Identifier: Apache-2.0
"""A plan's scripts and its router's file start a fleet as they are. In the place of vLLM stands a mock engine.

The machine is a network namespace, in which the plan's ports are free.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.leftovers import survivors
from support.namespaces import skip_without_namespaces
from support.plan_cases import cpu_stock, written

from pd_connector.tools.launch import Family
from scheduler_plugins.planner.goodput import Promise
from scheduler_plugins.planner.mix import mix_of
from scheduler_plugins.router.policies.base import Role

METRIC = re.compile(r"\bpd_router:\w+")
DEADLINE_S = 180
"""The test ends on a condition: this is for a busy machine."""
PYTHON = """#!/bin/sh
while [ $# -gt 0 ]; do
    case $1 in --port) port=$2;; --model) model=$2;; esac
    shift
done
exec pd-router mock --port $port --model "$model"
"""
ASK = """
curl --noproxy '*' -s http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \
     -d '{"model": "MODEL", "prompt": "'"$(seq -s ' ' 400)"'", "max_tokens": 4}'
curl --noproxy '*' -s http://127.0.0.1:8000/metrics | grep '^pd_router:flows_total'
"""
RUN = """
set -e
ip link set lo up
for script in out/start-*.sh; do (PATH=$PWD/bin:$PATH $script > log-engines 2>&1; touch ended) & done
pd-router serve --config out/router.yaml > log-router 2>&1 &
for port in {ports} 8000; do
    curl --noproxy '*' -sf -o health-$port --retry 600 --retry-delay 1 --retry-connrefused http://127.0.0.1:$port/health
done
until sh ./ask > answered 2>&1 && grep -q '{until}' answered; do sleep 1; done
curl --noproxy '*' -sf -o metrics http://127.0.0.1:8000/metrics
touch done
sleep 600
"""
P, D, W = Role.PREFILL, Role.DECODE, Role.WHOLE
CASES = {
    # Mix, ports, what is seen in the end. A mock that is asked says that it can prefill.
    "planner": ({("CPU-tp1", P): 1, ("CPU-tp1", D): 1}, "8100 8101", 'flow="disaggregated".* [1-9]'),
    "colocated": ({("CPU-tp2", W): 1}, "8100", '_alone".* [1-9]'),
}  # fmt: skip


@pytest.mark.netns
@pytest.mark.parametrize("case", CASES)
def test_the_files_of_a_plan_start_its_fleet(tmp_path: Path, case: str) -> None:
    skip_without_namespaces()
    counts, ports, until = CASES[case]
    # A busy machine keeps it, too.
    promise = Promise(60.0, 10.0)
    out = written(tmp_path, mix_of(counts), cpu_stock(tmp_path), "MODEL", promise)
    (tmp_path / "ask").write_text(ASK)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(PYTHON)
    (tmp_path / "bin" / "python").chmod(0o755)
    path = f"PATH={Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    script = RUN.format(ports=ports, until=until)
    command = ["env", f"--chdir={tmp_path}", path, "unshare", "--net", "bash", "-c", script]

    def logs() -> str:
        names = [*tmp_path.glob("log*"), *tmp_path.glob("answered")]
        return "\n".join(f"{log.name}:\n{log.read_text()[-3000:]}" for log in names)

    done, ended = tmp_path / "done", tmp_path / "ended"
    with Family(command, log=tmp_path / "log") as family:
        end_s = time.monotonic() + DEADLINE_S
        while not done.exists():
            assert family.returncode is None, logs()
            assert not ended.exists(), logs()
            assert time.monotonic() < end_s, logs()
            time.sleep(0.1)
    named = {name for file in out.rglob("*.*") for name in METRIC.findall(file.read_text())}
    live = (tmp_path / "metrics").read_text()
    assert named
    assert {name for name in named if f"# TYPE {name} " not in live} == set()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_engines_end_with_their_script(tmp_path: Path, number: int) -> None:
    """A shell starts what is in the background with Ctrl-C ignored, and ends alone when it is killed."""
    counts = {("CPU-tp1", P): 1, ("CPU-tp1", D): 1}
    out = written(tmp_path, mix_of(counts), cpu_stock(tmp_path), "MODEL")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "bin" / "python").chmod(0o755)
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    with Family([str(out / "start-host.sh")], env={"PATH": path}) as family:
        wait_for(lambda: len(running(family)) == 2)
        os.kill(family.pid, number)
        wait_for(lambda: family.returncode is not None)
        assert survivors(family) == []


def running(family: Family) -> list[int]:
    """Engines of `family`: processes that are no longer shells."""
    return [pid for pid in survivors(family) if "sleep" in Path(f"/proc/{pid}/cmdline").read_text()]


def wait_for(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)
