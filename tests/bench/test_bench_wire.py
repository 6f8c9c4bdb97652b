# SPDX-License-Identifier: Apache-2.0
"""The benchmarks without engines: KV really moves and is really looked at, and bars are applied."""

from __future__ import annotations

import sys

import pytest
from support.waits import until
from typer.testing import CliRunner

from pd_bench.machine import cpu_seconds
from pd_bench.netns import Bed, available
from pd_bench.report import BenchError, Comparison, missed
from pd_bench.wire import command as bench_wire
from pd_bench.wire import measure as wire
from pd_bench.wire.measure import (
    LINE,
    PAGES,
    WireContender,
    insecure_contender,
    link_contender,
    local_contender,
)
from pd_bench.wire.movers import descriptors
from pd_bench.wire.pair import WirePair, WireRun
from pd_bench.wire.party import WireParty
from pd_connector.tools.cli import bench as command
from pd_connector.tools.launch import proc
from pd_connector.tools.wire import LAYERS, PAGE_BYTES, PAGE_TOKENS, WireCache

TOKENS = 64


def filled_consumer() -> WireCache:
    """A consumer's cache as it is after a transfer that went well."""
    producer, consumer = WireCache("producer", TOKENS), WireCache("consumer", TOKENS)
    for theirs, mine in zip(producer.layers, consumer.layers, strict=True):
        mine[consumer.pages] = theirs[producer.pages]
    return consumer


def test_the_caches_hold_what_the_benchmark_says_it_moves():
    cache = WireCache("producer", TOKENS)
    assert sum(layer.nbytes for layer in cache.layers) == cache.nbytes == 64 * 128 * 1024
    assert sorted(cache.pages) == list(range(TOKENS // PAGE_TOKENS))
    assert cache.tables["producer"] != cache.tables["consumer"]


def test_a_descriptor_is_one_page_of_one_layer():
    found = descriptors([1000, 5_000_000], TOKENS // PAGE_TOKENS, PAGE_BYTES, 0)
    assert found[:, 0].tolist() == [
        base + page * PAGE_BYTES for base in (1000, 5_000_000) for page in range(4)
    ]
    assert set(found[:, 1].tolist()) == {65536}


@pytest.mark.parametrize("lossy", [False, True])
def test_what_has_arrived_is_looked_at_page_by_page(lossy):
    cache = filled_consumer()
    assert cache.check(lossy) == ""
    first, second = cache.pages[:2]
    pages = cache.layers[7]
    pages[[first, second]] = pages[[second, first]]
    assert "layer 7" in cache.check(lossy)
    cache.wipe()
    assert "layer 0" in cache.check(lossy)


def test_small_errors_pass_only_where_the_codec_is_lossy():
    cache = filled_consumer()
    cache.layers[3].mul_(1 + 1 / 64)
    assert cache.check(lossy=True) == ""
    assert "layer 3" in cache.check(lossy=False)


def test_kv_moves_between_two_processes_which_are_gone_afterwards():
    with WirePair(TOKENS) as pair:
        pids = pair.pids
        for way in (local_contender("shm", "raw"), local_contender("tcp", "int8"), LINE):
            pair.open(way.kind, way.settings)
            for _ in range(2):
                run = pair.run(way.lossy)
                assert run.seconds > 0
                pages = LAYERS * TOKENS // PAGE_TOKENS
                assert 0 < run.descriptors <= (pages / 2 if way.collates else pages)
            pair.close()
        with pytest.raises(BenchError, match="transports"):
            pair.open("ours", {"transports": []})
        assert cpu_seconds(pids) > 0
    assert [proc.read(pid) for pid in pids] == [None, None]


def test_per_page_nixl_posts_a_descriptor_for_each_page_of_each_layer():
    pytest.importorskip("nixl")
    with WirePair(TOKENS) as pair:
        pair.open(PAGES.kind, {})
        assert pair.run(lossy=False).descriptors == LAYERS * TOKENS // PAGE_TOKENS


@pytest.mark.netns
@pytest.mark.skipif(bool(available()), reason=f"no network namespaces: {available()}")
def test_over_a_link_nothing_is_faster_than_the_link():
    rate_mbit = 500.0
    env = {"PD_CONNECTOR_KEY": "a key of more than sixteen characters"}
    with Bed(rate_mbit) as bed, WirePair(4 * TOKENS, env, bed.namespaces) as pair:
        for way in (LINE, link_contender("tcp", "raw"), insecure_contender("tcp", "raw")):
            pair.open(way.kind, way.settings)
            run = pair.run(way.lossy)
            # What a burst lets pass at once is less than a hundredth of this.
            assert run.seconds > 0.9 * 4 * TOKENS * 128 * 1024 * 8 / (rate_mbit * 1e6)
            pair.close()


class FakePair:
    """Moves at rates that are given, in GB/s by the name of a setting, without moving anything."""

    def __init__(self, rates: dict[str, float]) -> None:
        self.rates = rates
        self.opened: list[str] = []

    def open(self, kind: str, settings: dict) -> None:
        self.opened.append(settings.get("codec", kind))

    def run(self, lossy: bool | None) -> WireRun:
        gb = TOKENS * 128 * 1024 / 1e9
        descriptors = 1000 if self.opened[-1] == "pages" else 19
        return WireRun(gb / self.rates[self.opened[-1]], 1.0, descriptors)

    def close(self) -> None:
        pass


def measured(
    place: str, ways: list[WireContender], **rates: float
) -> tuple[FakePair, list[Comparison]]:
    pair = FakePair(rates)
    found = wire.measure(pair, place, ways, TOKENS, 2, 1, lambda line: None)
    return pair, [one for _, several in found.tables for one in several]


def test_on_one_machine_verified_pages_need_more_than_half_the_rate_of_unverified_ones():
    ways = [local_contender("shm", codec) for codec in ("raw", "int8")]
    pair, good = measured("local", ways, pages=2.0, raw=1.11, int8=0.1)
    assert pair.opened == ["pages", "raw", "int8", "pages"], "the baseline first and last"
    assert missed(good) == []
    _, bad = measured("local", ways, pages=2.0, raw=1.09, int8=0.1)
    assert [(one.name, one.params["codec"]) for one in missed(bad)] == [("local rate", "raw")]


def test_over_a_link_codecs_must_nearly_double_its_rate():
    ways = [link_contender("tcp", codec) for codec in ("raw", "fp8_e4m3")]
    rates = {"plain": 0.12, "pages": 0.2, "raw": 0.118, "fp8_e4m3": 0.23}
    _, good = measured("link", ways, **rates)
    assert missed(good) == []
    _, bad = measured("link", ways, **rates | {"raw": 0.115, "fp8_e4m3": 0.22})
    assert [one.name for one in missed(bad)] == ["link capacity"] * 2


def test_what_is_moved_without_a_key_has_a_row_of_its_own():
    ways = [link_contender("tcp", "raw"), insecure_contender("tcp", "raw")]
    _, found = measured("link", ways, plain=0.12, pages=0.2, raw=0.118)
    named = {one.params["transport"] for one in found if one.name == "link CPU"}
    assert named == {"tcp", "tcp, insecure"}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["wire", "--codec", "zip"], "int8"),
        (["wire", "--mib", "3"], "multiple of 2"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_what_can(arguments, named):
    result = CliRunner().invoke(command.app, arguments)
    assert result.exit_code == 2
    assert named in result.output


def test_without_namespaces_the_machine_alone_can_be_measured(monkeypatch):
    monkeypatch.setattr(bench_wire, "available", lambda: "`ip` is missing")
    monkeypatch.setattr(bench_wire.importlib.util, "find_spec", lambda name: name)
    result = CliRunner().invoke(command.app, ["wire"])
    assert result.exit_code == 2
    assert "--local" in result.output


def test_the_interval_that_a_party_measures_with_is_the_one_it_was_told():
    """What one contender's agent has set would else hold for the next one, too."""
    before = sys.getswitchinterval()
    party = WireParty("producer", TOKENS, "127.0.0.1")
    try:
        for told_ms in (0.5, 5.0, 0.5):
            party.open("ours", {"transports": ["shm"], "switch_interval_ms": told_ms})
            wanted = pytest.approx(told_ms / 1000)
            until(lambda wanted=wanted: sys.getswitchinterval() == wanted, "the interval")
            party.close()
    finally:
        sys.setswitchinterval(before)
