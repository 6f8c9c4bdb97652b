# SPDX-License-Identifier: Apache-2.0
"""`bench handoff --on ray`: what is asked of Ray, and what figures tell; without Ray."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from pd_bench.handoff.ray import (
    BASELINE,
    CONTENDERS,
    RayBench,
    RayMeasured,
    TimedAnswer,
    compared,
)
from pd_bench.netns import Namespace
from pd_bench.serve.sending import Answer
from pd_connector.config import KEY_VARIABLE
from pd_connector.tools.cli import bench as command

SIDES = (
    Namespace("pd-a", "198.19.0.1", "198.18.0.2"),
    Namespace("pd-b", "198.19.0.2", "198.18.0.6"),
)


def measured(contender, after_s, capacity):
    runs = {tokens: [TimedAnswer(1.0 + after_s, 1.0)] * 3 for tokens in (512, 2048)}
    return RayMeasured(contender, runs, capacity, [Answer(2.0 + after_s)], 0.0)


def test_bars_are_for_the_part_after_the_prefill_and_for_requests_a_second():
    rows = compared([measured(BASELINE, 0.6, 1.0), measured(CONTENDERS["int8"], 0.2, 1.1)])
    judged = {(row.name, row.params.get("prompt_tokens")): row for row in rows if row.bar}
    assert set(judged) == {("after the prefill", 2048), ("requests", None)}
    assert not judged["after the prefill", 2048].ok  # 0.33
    assert not judged["requests", None].ok
    after = next(row for row in rows if row.name == "after the prefill")
    assert after.ours.median == pytest.approx(200.0)


@pytest.mark.parametrize("contender", [BASELINE, *CONTENDERS.values()], ids=lambda one: one.name)
def test_both_sides_run_the_same_engines_and_differ_in_the_connector(
    contender, tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    bench = RayBench([], 1000.0, [512], 1, 0)
    stack = bench._stack(contender, "folder", SIDES, tmp_path)
    config = json.loads((tmp_path / contender.name / "serve.yaml").read_text())
    (application,) = config["applications"]
    for side in ("prefill", "decode"):
        engine = application["args"][f"{side}_config"]["engine_kwargs"]
        transfer = engine.pop("kv_transfer_config")
        assert transfer["kv_connector"] == contender.connector
        extra = transfer.get("kv_connector_extra_config", {"transports": ["tcp"]})
        assert extra["transports"] == ["tcp"]  # shared memory would pass by the link
        assert engine == {
            "dtype": "bfloat16",
            "block_size": 32,
            "enforce_eager": engine["enforce_eager"],
            "max_model_len": 4096,
            "load_format": "dummy",
        }
    assert stack.prefill.namespace is SIDES[0]
    assert stack.head.address.startswith(SIDES[1].address)
    for service in stack.services:  # the key is not an argument: every user can read those
        assert service.environment()[KEY_VARIABLE] not in " ".join(service.command())
        assert service.environment()["UCX_TLS"] == "tcp"


def test_a_prefill_is_timed_by_what_serve_logs(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    stack = RayBench([], 1000.0, [512], 1, 0)._stack(BASELINE, "folder", SIDES, tmp_path)
    logs = stack.head.folder / "session_2026" / "logs"
    logs.mkdir(parents=True)
    lines = [
        "INFO 2026-11-23 15:21:33,679 bench_Prefill:bench 3c202z1f accbe947 -- CALL completions OK 704.5ms",
        "INFO 2026-11-23 15:21:33,900 bench_Decode:bench 84sskste accbe947 -- CALL completions OK 981.0ms",
    ]
    (logs / "worker-1.err").write_text("\n".join(lines))
    assert stack.prefills_s() == [0.7045]


def test_what_does_not_go_with_ray_is_refused():
    for other in (["--local"], ["--gpu"], ["--engine", "sglang"], ["--ours", "shm"]):
        result = CliRunner().invoke(command.app, ["handoff", "--on", "ray", *other])
        assert result.exit_code == 2
        assert "--on" in result.output or "--ours" in result.output
