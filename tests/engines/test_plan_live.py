# SPDX-License-Identifier: Apache-2.0
"""The files of a plan for two cores, as they are, start a pair that answers as one engine does, and end.

The machine is a network namespace, in which the plan's ports are free. The shell has nothing but the environment's
programs.
"""

import itertools
import json
import os
import sys
from pathlib import Path

import pytest
from harness import answer_of, assert_same_logprobs, fresh_salt, wait_until
from recipes import MODEL
from support.leftovers import survivors
from support.namespaces import skip_without_namespaces
from support.printed import OF_TESTS

from pd_connector.tools.cli.app import main as pd_connector
from pd_connector.tools.launch import Family
from pd_connector.tools.launch.engine import on_cpu
from pd_connector.tools.launch.proc import MARKER
from scheduler_plugins.commands import main as pd_router
from scheduler_plugins.planner.command import _generated
from scheduler_plugins.planner.files import CORES

INVENTORY = """
nodes: [{name: host, device: CPU, gpus: 2}]
devices: {CPU: {profiles: [one.yaml]}}
"""
PROFILE = """
costs: {a: 0.02, c: 0.8, d0: 1.0, d1: 0.01, chunk_tokens: 512, mixed: {m0: 20, m1: 0.2, m2: 0}}
kv_tokens: 100000
kv_bytes_per_token: 4096
"""
"""So slow that a busy machine keeps the promise, and slower in mixed steps: the plan is a pair."""
PROMISE = ("--ttft-ms", "60000", "--tpot-ms", "4000")
MOST_DIFFERENT = 0.02
"""Difference of two logprobs. In bfloat16 an engine differs from itself by a hundredth if it computes a prompt in other portions."""
DECODE = 8100
RUN = """
set -e
ip link set lo up
out/start-host.sh > log-engines 2>&1 &
engines=$!
pd-router serve --config out/router.yaml > log-router 2>&1 &
router=$!
for port in 8100 8101 8000; do
    curl --noproxy "*" -sf -o health-$port --retry 600 --retry-delay 1 --retry-connrefused http://127.0.0.1:$port/health
done
ask() {
    curl --noproxy "*" -sf -o $2 http://127.0.0.1:$1/v1/completions -H 'Content-Type: application/json' -d @asked-$2
}
handed_over() {
    curl --noproxy "*" -sf http://127.0.0.1:{DECODE}/metrics | grep '^pd_connector:handoffs_total.*cause="handed_over"' || :
}
ask {DECODE} alone
for pair in asked-pair-*; do
    before=$(handed_over)
    ask 8000 ${pair#asked-}
    [ "$(handed_over)" = "$before" ] || { cp ${pair#asked-} pair; break; }
    sleep 1
done
[ -e pair ]
kill $engines $router
wait $engines || :
wait $router || :
touch done
"""


def plan(folder: Path) -> Path:
    """The folder that `pd-router plan` writes."""
    (folder / "inventory.yaml").write_text(INVENTORY)
    (folder / "one.yaml").write_text(PROFILE)
    (folder / "trace.csv").write_text("\n".join(itertools.islice(_generated(400, 30), 401)))
    given = ("--inventory", "inventory.yaml", "--model", MODEL, *PROMISE, "--requests", "400")
    assert pd_router(["plan", "trace.csv", *map(str, given), "--out", "out"]) == 0
    return folder / "out"


@pytest.mark.netns
def test_the_files_of_a_plan_start_a_pair_that_answers_as_one_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not on_cpu():
        pytest.skip("this vLLM is for GPUs")
    skip_without_namespaces()
    monkeypatch.chdir(tmp_path)
    out = plan(tmp_path)
    capsys.readouterr()
    assert pd_connector(["check", str(out)]) == 0
    assert capsys.readouterr() == ("", "")
    lines = (out / "start-host.sh").read_text().splitlines()
    (decode,) = (line for line in lines if "kv_consumer" in line)
    assert f"--port {DECODE} " in decode
    assert decode.startswith(f"{CORES}=0 ")

    prompt = " ".join(map(str, range(250)))
    for name in ("alone", *(f"pair-{n:03}" for n in range(100))):
        asked = {
            "model": str(MODEL), "prompt": prompt, "max_tokens": 16, "temperature": 0, "logprobs": 3,
            "return_tokens_as_token_ids": True, "ignore_eos": True, "cache_salt": fresh_salt(),
        }  # fmt: skip
        (tmp_path / f"asked-{name}").write_text(json.dumps(asked))

    unset = [f"--unset={name}" for name in filter(OF_TESTS.match, os.environ) if name != MARKER]
    path = f"PATH={Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    shell = ["unshare", "--net", "bash", "-c", RUN.replace("{DECODE}", str(DECODE))]

    def said() -> str:
        return "\n".join(f"{log.name}:\n{log.read_text()[-3000:]}" for log in tmp_path.glob("log*"))

    with Family(["env", *unset, path, *shell], log=tmp_path / "log") as family:
        wait_until(lambda: family.returncode is not None, said, deadline_s=600)
        assert (tmp_path / "done").exists(), said()
        wait_until(lambda: not survivors(family), lambda: f"left: {family.members()}\n{said()}")
    alone, pair = (
        answer_of(json.loads((tmp_path / name).read_text())) for name in ("alone", "pair")
    )
    assert len(set(alone.tokens)) > 1
    assert_same_logprobs(pair, alone, MOST_DIFFERENT)
