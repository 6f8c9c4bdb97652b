# SPDX-License-Identifier: Apache-2.0
"""Fleets of unlike engines: their file, their places, and NICs that nodes share."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_plugins.commands import main as pd_router
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.sim import fleet
from scheduler_plugins.sim.capacity import kept, largest, sustained
from scheduler_plugins.sim.links import Links, Network, Place
from scheduler_plugins.sim.simulate import Scenario

FLEET = """
profiles:
  fast: {costs: {a: 3.0e-5, c: 0.005, d0: 0.007, d1: 2.0e-5, d2: 5.0e-8, chunk_tokens: 2048}, kv_tokens: 400000, layers: 4, kv_bytes_per_token: 1000}
  slow: {costs: {a: 9.0e-5, c: 0.008, d0: 0.011, d1: 4.0e-5, d2: 8.0e-8, chunk_tokens: 2048}, kv_tokens: 300000}
nodes: {a: {rack: r1, nic_bytes_per_s: 25000}, b: {rack: r1}}
links: {node: 1.0e+6, rack: 1.0e+5}
parts:
  - {role: prefill, profile: fast, number: 2, node: a}
  - {role: prefill, profile: slow, node: b}
  - {role: decode, profile: slow, number: 2, node: b}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET)
    return path


def test_engines_of_a_fleet_have_their_own_costs_room_and_place(file: Path) -> None:
    scenario = Scenario(fleet=fleet.load(file), level=2)
    nodes = scenario.nodes()
    assert [one.name for one in nodes] == ["p0", "p1", "p2", "d0", "d1"]
    assert [one.costs.a for one in nodes] == [3e-5, 3e-5, 9e-5, 9e-5, 9e-5]
    assert [one.place.node for one in nodes] == list("aabbb")
    assert scenario.parts.network is not None
    assert scenario.parts.network.kv_bytes_per_token == 1000
    assert scenario.cluster("jsq").links.network.node_bytes_per_s == 1e6


def test_simulate_plays_a_fleet_and_a_part_of_a_trace(file: Path, tmp_path: Path, capsys) -> None:
    rows = [f"2026-01-01 00:00:{n:02d},{500 + n},20" for n in range(40)]
    trace = tmp_path / "trace.csv"
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    given = ["simulate", str(trace), "--fleet", str(file), "--level", "2", "--json", "-"]
    assert pd_router([*given, "--skip", "30", "--limit", "5"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["requests"] == found["served"] == 5
    assert set(found["utilisation"]) == {"p0", "p1", "p2", "d0", "d1"}
    assert found["ttft_s"]["mean"] > 0.5, "the KV of 500 tokens takes 20 s at a NIC, and 5 s else"
    assert pd_router([*given, "--skip", "40"]) == 2
    assert "skip 40" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            ("profile: fast,", "profile: fats,"),
            "profile 'fats': is not in the file; did you mean 'fast'?",
        ),
        (("node: a}", "node: c}"), "node 'c': is not in the file"),
        (("links: {node: 1.0e+6", "links: {node: 0"), "node_bytes_per_s 0"),
        (
            ("number: 2, node: a", "numbr: 2, node: a"),
            "key 'numbr' is not known; did you mean 'number'?",
        ),
        (("kv_tokens: 400000", "kv_tokens: -1"), "kv_tokens -1"),
        (("a: 3.0e-5", "a: -1"), "a is -1"),
        (("number: 2, node: a", "number: -2, node: a"), "prefill -2"),
        (("nodes:", "\tnodes:"), "found character"),
        (("{rack: r1}}", "*bomb}"), "aliases (*bomb) are not read"),
    ],
)
def test_a_mistake_in_a_fleet_file_is_named(file: Path, wrong: tuple[str, str], said: str) -> None:
    assert wrong[0] in FLEET
    file.write_text(FLEET.replace(*wrong))
    with pytest.raises(fleet.FleetError, match=r"fleet\.yaml") as caught:
        fleet.load(file)
    assert said in str(caught.value)


def test_a_file_that_is_not_there_or_huge_is_named(tmp_path: Path) -> None:
    with pytest.raises(fleet.FleetError, match="cannot be read"):
        fleet.load(tmp_path / "no.yaml")
    (tmp_path / "big.yaml").write_bytes(b"#" * (fleet.MOST_BYTES + 1))
    with pytest.raises(fleet.FleetError, match="at most"):
        fleet.load(tmp_path / "big.yaml")


NETWORK = Network(
    bytes_per_s=100.0, node_bytes_per_s=1000.0, device_bytes_per_s=1e4, rack_bytes_per_s=50.0,
    other_bytes_per_s=20.0, latency_s=0.0, kv_bytes_per_token=1.0, layers=100,
)  # fmt: skip


def placed(nic: float) -> Links:
    links = Links(NETWORK)
    for name, place in {
        "p0": Place("g0", "a", "r", nic),
        "p1": Place("g1", "a", "r", nic),
        "d0": Place("g0", "a", "r", nic),
        "d1": Place("g1", "b", "r", inf),
        "d2": Place("g0", "c", "s", inf),
    }.items():
        links.place(name, place)
    return links


@pytest.mark.parametrize(
    ("target", "rate"), [("d0", 1e4), ("p1", 1000.0), ("d1", 50.0), ("d2", 20.0), ("d9", 100.0)]
)
def test_a_pairs_rate_is_that_of_its_kind(target: str, rate: float) -> None:
    assert placed(inf).estimate_s("p0", target, 1000) == pytest.approx(1000 / rate)


def test_engines_of_a_node_share_its_nic_and_not_its_inner_links() -> None:
    links, ended = placed(60.0), dict[str, float]()
    links.start("p0", "d1", 300, 0.0, lambda at_s: ended.update(a=at_s))
    links.start("p1", "d9", 300, 0.0, lambda at_s: ended.update(b=at_s))
    links.start("p1", "d0", 1000, 0.0, lambda at_s: ended.update(c=at_s))
    while links.next_event_s < inf:
        links.advance(links.next_event_s)
    assert ended == pytest.approx({"a": 10.0, "b": 10.0, "c": 1.0}, rel=0.02)


def test_kv_that_streams_during_a_prefill_has_what_the_nic_can_spare() -> None:
    assert placed(inf).exposed_bytes("p0", "d1", 100, 1.0, 10.0) == 50
    links = placed(60.0)
    assert links.exposed_bytes("p0", "d1", 100, 1.0, 10.0) == 50
    for _ in range(20):
        left = links.exposed_bytes("p0", "d1", 100, 1.0, 10.0)
    assert left == 100, "all that it could have carried was given away"


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.sampled_from(["d0", "d1", "d2", "d9"]), st.integers(2, 500), st.floats(0, 10), st.booleans()),
        min_size=1,
        max_size=12,
    )
)  # fmt: skip
def test_flows_and_streams_together_never_exceed_a_nic(
    flows: list[tuple[int, str, int, float, bool]],
) -> None:
    links, ended, left_node = placed(60.0), list[float](), 0.0
    for source, target, size, at_s, streams in sorted(flows, key=lambda one: one[3]):
        while links.next_event_s < at_s:
            links.advance(links.next_event_s)
        left = float(size)
        if streams:
            left = links.exposed_bytes(f"p{source}", target, size, 2.0, at_s)
        if target != "d0":
            left_node += size
        links.start(f"p{source}", target, left, at_s, ended.append)
    while links.next_event_s < inf:
        links.advance(links.next_event_s)
    assert len(ended) == len(flows)
    assert left_node - len(flows) <= 60.0 * max(ended) + 1e-6


def test_the_largest_rate_is_found_and_its_search_ends() -> None:
    assert sustained(lambda rate: rate <= 37.0, close=0.01) == pytest.approx(37.0, rel=0.01)
    assert sustained(lambda rate: True) > 900
    assert sustained(lambda rate: False, close=0.03) == 0.0
    assert largest(lambda value: value < 3, 1, 9, 0.01) == pytest.approx(3, rel=0.02)


def test_a_refused_request_is_not_in_time() -> None:
    scenario = Scenario(prefill=1, decode=1, ttft_slo_s=0.001, tpot_slo_s=1.0)
    asked = [Waiting(id=str(n), tokens=1000, block_hashes=(), arrival_s=n, max_tokens=2, priority=0) for n in range(3)]  # fmt: skip
    served = scenario.cluster("least_delay").run(asked)
    assert all(one.rejected for one in served)
    assert kept(served, 0.001, 1.0) == 0.0
    assert kept([], 1, 1) == 1.0
