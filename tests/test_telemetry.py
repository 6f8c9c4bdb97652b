# SPDX-License-Identifier: Apache-2.0
"""Counts are handed over once and none is lost; gauges are as they are now."""

import threading

from pd_connector.telemetry import Telemetry


def test_a_snapshot_holds_what_happened_since_the_last_one():
    telemetry = Telemetry()
    telemetry.count("failed_transfers", cause="checksum")
    telemetry.count("failed_transfers", 2, cause="model")
    telemetry.count("failed_transfers", cause="checksum")
    telemetry.observe("seconds", 0.5)
    first = telemetry.take()
    assert first is not None
    assert first.counts == {
        ("failed_transfers", (("cause", "checksum"),)): 2,
        ("failed_transfers", (("cause", "model"),)): 2,
    }
    assert first.observations == {"seconds": [0.5]}
    assert telemetry.take() is None


def test_labels_are_the_same_in_any_order():
    telemetry = Telemetry()
    telemetry.count("x", a="1", b="2")
    telemetry.count("x", b="2", a="1")
    snapshot = telemetry.take()
    assert snapshot is not None
    assert snapshot.counts == {("x", (("a", "1"), ("b", "2"))): 2}


def test_gauges_stay_and_only_a_change_is_news():
    telemetry = Telemetry()
    telemetry.gauge(slots=3)
    assert telemetry.take() is not None
    telemetry.gauge(slots=3)
    assert telemetry.take() is None
    telemetry.gauge(slots=0)
    snapshot = telemetry.take()
    assert snapshot is not None
    assert snapshot.gauges == {"slots": 0}
    assert telemetry.gauges() == {"slots": 0}


def test_a_snapshot_does_not_change_afterwards():
    telemetry = Telemetry()
    telemetry.count("x")
    telemetry.gauge(slots=1)
    snapshot = telemetry.take()
    telemetry.count("x", 5)
    telemetry.gauge(slots=2)
    assert snapshot is not None
    assert snapshot.counts == {("x", ()): 1}
    assert snapshot.gauges == {"slots": 1}


def test_no_count_is_lost_between_two_threads():
    telemetry = Telemetry()
    counted = 20_000

    def count() -> None:
        for _ in range(counted):
            telemetry.count("x")

    thread = threading.Thread(target=count)
    thread.start()
    snapshots = []
    while thread.is_alive():
        snapshots.append(telemetry.take())
    snapshots.append(telemetry.take())
    assert sum(snapshot.counts["x", ()] for snapshot in snapshots if snapshot) == counted
