# SPDX-License-Identifier: Apache-2.0
"""The files that a plan writes for a CPU machine start its engines and its router, as they are.

The machine is a network namespace, in which the plan's ports are free. Scripts run in the shell of a stranger: it has none of the
tests' variables.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import wait_until
from recipes import MODEL
from support.plan_cases import cpu_stock, written

from pd_connector.tools.cli.app import main
from pd_connector.tools.launch import Family
from pd_connector.tools.launch.engine import on_cpu
from pd_connector.tools.launch.proc import MARKER
from scheduler_plugins.planner.goodput import Promise
from scheduler_plugins.planner.mix import mix_of
from scheduler_plugins.router.policies.base import Role

OF_TESTS = re.compile(r"VLLM|PD_|OMP|HF_|TORCH|VIRTUAL_ENV|PYTHON")
METRIC = re.compile(r"\b(?:pd_router|pd_connector|vllm):\w+")
ASK = """
curl -s http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \
     -d '{{"model": "{model}", "prompt": "'"$(seq -s ' ' 400)"'", "max_tokens": 4}}'
curl -s http://127.0.0.1:8000/metrics | grep '^pd_router:flows_total'
for port in {ports}; do curl -s http://127.0.0.1:$port/metrics | grep '^pd_connector:handoffs_total' || true; done
"""
RUN = """
set -e
ip link set lo up
for script in plan/out/start-*.sh; do ($script > log-engines 2>&1; touch ended) & done
pd-router serve --config plan/out/router.yaml > log-router 2>&1 &
for port in {ports} 8000; do
    curl -sf -o health-$port --retry 600 --retry-delay 1 --retry-connrefused http://127.0.0.1:$port/health
done
until sh ./ask > answered 2>&1 && grep -q '{until}' answered; do sleep 1; done
for port in {ports} 8000; do curl -sf -o metrics-$port http://127.0.0.1:$port/metrics; done
touch done
sleep 600
"""
P, D, W = Role.PREFILL, Role.DECODE, Role.WHOLE
CASES = {
    # Mix, ports, what is seen in the end
    "planner": ({("CPU-tp1", P): 1, ("CPU-tp1", D): 1}, "8100 8101", 'cause="handed_over".* [1-9]'),
    "colocated": ({("CPU-tp2", W): 1}, "8100", 'flow="decode_alone".* [1-9]'),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    if not on_cpu():
        pytest.skip("this vLLM is for GPUs")
    if not shutil.which("ip"):
        pytest.skip("no iproute2")
    probe = ["unshare", "--net", "ip", "link", "set", "lo", "up"]
    if (tried := subprocess.run(probe, capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"no namespaces: {tried.stderr.strip()}")
    return tmp_path


@pytest.mark.netns
@pytest.mark.parametrize("case", CASES)
def test_the_files_of_a_plan_start_its_fleet(folder: Path, case: str) -> None:
    counts, ports, until = CASES[case]
    (plan := folder / "plan").mkdir()
    # A busy machine keeps it, too.
    promise = Promise(60.0, 10.0)
    out = written(plan, mix_of(counts), cpu_stock(plan), str(MODEL), promise)
    assert main(["check", str(out)]) == 0
    (folder / "ask").write_text(ASK.format(model=MODEL, ports=ports))
    kept = {
        name: value
        for name, value in os.environ.items()
        if name == MARKER or not OF_TESTS.match(name)
    }
    script = RUN.format(ports=ports, until=until)
    # As `. .venv/bin/activate` does; interfaces of the host come and go with other tests.
    kept |= {"PATH": f"{sys.prefix}/bin:{kept['PATH']}", "UCX_NET_DEVICES": "lo"}
    given = [f"{name}={value}" for name, value in kept.items()]
    command = ["env", f"--chdir={folder}", "-i", *given, "unshare", "--net", "bash", "-c", script]

    def logs() -> str:
        names = [*folder.glob("log*"), *folder.glob("answered")]
        return "\n".join(f"{log.name}:\n{log.read_text()[-3000:]}" for log in names)

    with Family(command, log=folder / "log") as family:
        done, ended = folder / "done", folder / "ended"
        wait_until(
            lambda: done.exists() or ended.exists() or family.returncode is not None,
            logs,
            deadline_s=300,
        )
        assert done.exists(), logs()
    named = {
        name
        for path in out.rglob("*")
        if path.is_file()
        for name in METRIC.findall(path.read_text())
    }
    live = "".join(path.read_text() for path in folder.glob("metrics-*"))
    assert named
    assert {name for name in named if f"# TYPE {name} " not in live} == set()
