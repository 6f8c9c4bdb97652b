# SPDX-License-Identifier: Apache-2.0
"""What Prometheus reads of a carrier: what became of chunks by cause, and since when the far store cannot be used."""

import time

from chunks import chain, save
from prometheus_client import CollectorRegistry
from support.far_hosts import Host, NewHost
from support.redis_servers import RedisServer
from support.waits import until

from pd_connector.pool.carrier.carrier import Carrier
from pd_connector.pool.carrier.messages import Status
from pd_connector.pool.carrier.metrics import PREFIX, CarrierMetrics


def registry_of(carrier: Carrier) -> CollectorRegistry:
    made = CollectorRegistry()
    made.register(CarrierMetrics(carrier.status))
    return made


def value(host: Host, name: str, **labels: str) -> float:
    found = registry_of(host.carrier).get_sample_value(f"{PREFIX}{name}", labels)
    assert found is not None, f"{name} {labels}"
    return found


def test_chunks_that_are_put_found_and_brought_are_counted_by_cause(new_host: NewHost) -> None:
    one, two = new_host("a"), new_host("b")
    keys = chain("prompt", 6)
    assert save(one.own, keys) == 6
    until(lambda: value(one, "puts_total", cause="put") == 6)
    assert value(one, "put_bytes_total") > 0
    until(lambda: value(one, "waiting_chunks") == 0)
    assert two.carrier.find(chain("another", 2)).sizes == []
    assert len(two.carrier.find(keys).sizes) == 6
    assert value(two, "finds_total", cause="none") == 1
    assert value(two, "finds_total", cause="found") == 1
    assert value(two, "found_chunks_total") == 6
    for future in two.carrier.bring(keys[:2]):
        assert not future.result(60).cause
    assert value(two, "brings_total", cause="brought") == 2
    assert value(two, "brought_bytes_total") > 0
    assert value(two, "bringing_chunks") == 0
    (missing,) = two.carrier.bring(chain("never stored", 1))
    assert missing.result(60).cause == "evicted"
    assert value(two, "brings_total", cause="evicted") == 1


def test_what_does_not_open_is_counted_as_damaged(new_host: NewHost, redis: RedisServer) -> None:
    one, two = new_host("a"), new_host("b")
    keys = chain("prompt", 3)
    assert save(one.own, keys) == 3
    until(lambda: value(one, "puts_total", cause="put") == 3)
    assert len(two.carrier.find(keys).sizes) == 3
    stranger = redis.client()
    for name in stranger.scan_iter():
        stranger.setrange(name, 40, b"\xff" * 8)
    for future in two.carrier.bring(keys):
        assert future.result(60).cause == "damaged"
    assert value(two, "brings_total", cause="damaged") == 3
    assert value(two, "brings_total", cause="brought") == 0


def test_since_when_the_far_store_cannot_be_used(new_host: NewHost, redis: RedisServer) -> None:
    began_s = time.time()
    host = new_host("a", deadline_s=5.0)
    until(lambda: value(host, "far_up") == 1)
    up_s = value(host, "far_since_seconds")
    assert up_s >= began_s
    redis.stop()
    until(lambda: not host.carrier.find(chain("prompt", 1)).sizes and not value(host, "far_up"))
    down_s = value(host, "far_since_seconds")
    assert up_s <= down_s <= time.time()
    assert value(host, "finds_total", cause="silent") >= 1
    redis.start()
    until(lambda: value(host, "far_up") == 1)
    assert value(host, "far_since_seconds") >= down_s


def test_every_cause_is_there_before_it_is_counted() -> None:
    """A counter that appears with its first count has no rate for it."""
    families = list(CarrierMetrics(lambda: Status(far="redis://h", sealed=True)).collect())
    assert {family.name for family in families} >= {
        f"{PREFIX}{name}" for name in ("puts", "brings")
    }
    assert all(family.samples for family in families)
    causes = {
        sample.labels["cause"]
        for family in families
        for sample in family.samples
        if family.name == f"{PREFIX}puts"
    }
    assert causes == {
        "put",
        "there",
        "refused",
        "too_large",
        "damaged",
        "gone",
        "failed",
        "left_out",
    }
