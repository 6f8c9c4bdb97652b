# SPDX-License-Identifier: Apache-2.0
"""The connector's metrics, from the ranks to `/metrics`, also with several API servers."""

import multiprocessing
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    values,
)
from prometheus_client.multiprocess import MultiProcessCollector

from pd_connector.telemetry import Telemetry
from pd_connector.vllm.messages import WorkerActivity
from pd_connector.vllm.metrics import PDPromMetrics, PDStats, RankGauges


def api_server(leased_pages: float) -> None:
    """One of several API servers: it reports what its engine has told it, and ends."""
    values.ValueClass = values.get_value_class()  # PROMETHEUS_MULTIPROC_DIR is set by now
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}))
    kinds = {kind: kind for kind in (Counter, Gauge, Histogram)}
    metrics = PDPromMetrics(config, kinds, ["model_name", "engine"], {0: ["m", "0"]})
    counts = [
        ["received_transfers", [], 2],
        ["handoffs", ["handed_over"], 1],
        ["pair_bytes", ["10.0.0.1:7100", "int8"], 8],
    ]
    metrics.observe(
        {"counts": counts, "observations": {}, "gauges": {"leased_pages": leased_pages}}
    )


def test_of_several_api_servers_the_one_that_heard_last_tells_the_gauges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a fork of this process: vLLM's import takes seconds."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    for leased_pages in (5.0, 0.0):
        server = multiprocessing.get_context("fork").Process(
            target=api_server, args=(leased_pages,)
        )
        server.start()
        server.join(60)
        assert server.exitcode == 0
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    lines = generate_latest(registry).decode().splitlines()
    labels = '{engine="0",model_name="m"}'
    assert [line for line in lines if line.startswith("pd_connector:leased_pages")] == [
        f"pd_connector:leased_pages{labels} 0.0"
    ]
    assert f"pd_connector:received_transfers_total{labels} 4.0" in lines
    assert f"pd_connector:incoming_transfers{labels} 0.0" in lines, "nobody has told it yet"
    handed_over = '{cause="handed_over",engine="0",model_name="m"}'
    assert f"pd_connector:handoffs_total{handed_over} 2.0" in lines
    pair = '{codec="int8",engine="0",model_name="m",producer="10.0.0.1:7100"}'
    assert f"pd_connector:pair_bytes_total{pair} 16.0" in lines


def test_gauges_are_sums_over_all_ranks_and_leased_pages_count_once() -> None:
    ranks = RankGauges()
    assert ranks.changed() is None
    both = WorkerActivity(gauges={0: {"leased_pages": 3.0}}).aggregate(
        WorkerActivity(gauges={1: {"leased_pages": 4.0, "sessions": 1.0}})
    )
    ranks.update(both.gauges)
    assert ranks.changed() == {"leased_pages": 4.0, "sessions": 1.0}
    assert ranks.changed() is None
    ranks.update(WorkerActivity(gauges={1: {"leased_pages": 0.0, "sessions": 0.0}}).gauges)
    assert ranks.changed() == {"leased_pages": 3.0, "sessions": 0.0}


def test_weights_are_read_when_all_ranks_that_read_files_have_read_them() -> None:
    ranks = RankGauges()
    for rank, read, nbytes in ((0, 4.0, 9.0), (1, 9.0, 9.0), (2, 0.0, 0.0)):
        ranks.update({rank: {"weights_read_bytes": read, "weights_bytes": nbytes}})
    assert ranks.changed() == {"weights_read_bytes": 4.0, "weights_bytes": 9.0}
    ranks.update({0: {"weights_read_bytes": 9.0, "weights_bytes": 9.0}})
    assert ranks.changed() == {"weights_read_bytes": 9.0, "weights_bytes": 9.0}


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


def test_labels_are_in_the_order_of_the_metric_and_pairs_are_not_in_the_log() -> None:
    telemetry = Telemetry()
    telemetry.count("pair_bytes", 8, producer="10.0.0.1:7100", codec="int8")
    telemetry.count("handoffs", cause="handed_over")
    told = PDStats.of(telemetry)
    assert told is not None
    assert ["pair_bytes", ["10.0.0.1:7100", "int8"], 8] in told.data["counts"]
    assert told.reduce() == {"handoffs[handed_over]": 1}
