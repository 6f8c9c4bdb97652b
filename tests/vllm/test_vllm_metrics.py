# SPDX-License-Identifier: Apache-2.0
"""The connector's metrics, from the ranks to `/metrics`, also with several API servers."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from pd_connector.telemetry import Telemetry
from pd_connector.vllm.messages import WorkerActivity
from pd_connector.vllm.metrics import PDStats, RankGauges

OBSERVE = """
import sys
from types import SimpleNamespace
from prometheus_client import Counter, Gauge, Histogram
from pd_connector.vllm.metrics import PDPromMetrics

metrics = PDPromMetrics(SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={})),
    {kind: kind for kind in (Counter, Gauge, Histogram)}, ["model_name", "engine"], {0: ["m", "0"]})
gauges = {"leased_pages": float(sys.argv[1])}
counts = [["received_transfers", "", 2]]
metrics.observe({"counts": counts, "observations": {}, "gauges": gauges})
"""
COLLECT = """
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

registry = CollectorRegistry()
MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_of_several_api_servers_the_one_that_heard_last_tells_the_gauges(tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", *arguments],
            env={"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    for value in ("5", "0"):
        run(OBSERVE, value)
    lines = run(COLLECT).splitlines()
    labels = '{engine="0",model_name="m"}'
    assert [line for line in lines if line.startswith("pd_connector:leased_pages")] == [
        f"pd_connector:leased_pages{labels} 0.0"
    ]
    assert f"pd_connector:received_transfers_total{labels} 4.0" in lines
    assert f"pd_connector:incoming_transfers{labels} 0.0" in lines, "nobody has told it yet"


def test_gauges_are_sums_over_all_ranks_whenever_one_has_changed() -> None:
    ranks = RankGauges()
    assert ranks.changed() is None
    both = WorkerActivity(gauges={0: {"leased_pages": 3.0}}).aggregate(
        WorkerActivity(gauges={1: {"leased_pages": 4.0, "sessions": 1.0}})
    )
    ranks.update(both.gauges)
    assert ranks.changed() == {"leased_pages": 7.0, "sessions": 1.0}
    assert ranks.changed() is None
    ranks.update(WorkerActivity(gauges={1: {"leased_pages": 0.0, "sessions": 0.0}}).gauges)
    assert ranks.changed() == {"leased_pages": 3.0, "sessions": 0.0}


def test_a_step_in_which_nothing_was_counted_has_no_stats() -> None:
    telemetry = Telemetry()
    assert PDStats.of(telemetry) is None
    telemetry.gauge(leased_pages=1.0)
    assert PDStats.of(telemetry) is None, "the scheduler tells those"
    telemetry.count("received_transfers")
    first = PDStats.of(telemetry, {"leased_pages": 1.0})
    assert first is not None
    telemetry.count("received_transfers", 2)
    second = PDStats.of(telemetry)
    assert second is not None
    assert first.aggregate(second).reduce() == {"received_transfers": 3}
    assert first.data["gauges"] == {"leased_pages": 1.0}
