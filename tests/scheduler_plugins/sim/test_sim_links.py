# SPDX-License-Identifier: Apache-2.0
"""Transfers share links fairly, and no link carries more than it can."""

from collections import Counter
from itertools import product
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_plugins.sim.links import Links, Network, Place

NETWORK = Network(bytes_per_s=100.0, latency_s=0.0, kv_bytes_per_token=1.0)


def drain(links: Links, until_s: float = inf) -> None:
    while links.next_event_s < until_s:
        links.advance(links.next_event_s)


def test_two_transfers_into_one_engine_take_half_each_and_the_rest_alone() -> None:
    links, ended = Links(NETWORK), dict[str, float]()
    links.start("p0", "d0", 100, 0.0, lambda at_s: ended.update(a=at_s))
    links.start("p1", "d0", 300, 0.0, lambda at_s: ended.update(b=at_s))
    drain(links)
    assert ended == pytest.approx({"a": 2.0, "b": 4.0}, abs=0.05)
    assert links.moved_bytes == 400


def test_what_one_cannot_use_goes_to_the_others() -> None:
    # Three leave p0, one of them for d1; p1 sends to d1 too, and may use what is left there.
    links, ended = Links(NETWORK), dict[str, float]()
    for n, target in enumerate(("d0", "d0", "d1")):
        links.start("p0", target, 100, 0.0, lambda at_s, n=n: ended.update({f"p0-{n}": at_s}))
    links.start("p1", "d1", 200, 0.0, lambda at_s: ended.update(p1=at_s))
    drain(links)
    assert ended["p1"] == pytest.approx(3.0, abs=0.05), "two thirds of the link while they last"
    assert ended["p0-0"] == pytest.approx(3.0, abs=0.05)


@pytest.mark.parametrize("at_s", [3 * 3600.0, 2.6e6])
def test_a_fast_link_late_in_a_long_trace_comes_to_an_end(at_s: float) -> None:
    """Then the clock resolves no less than a thousand bytes' time."""
    links, ended = Links(Network(bytes_per_s=9e11, latency_s=0.0)), list[float]()
    for n in range(50):
        links.start(f"p{n % 3}", f"d{n % 4}", 1e6 + 7.3 * n, at_s + n * 1e-7, ended.append)
    for _ in range(1000):
        if links.next_event_s < inf:
            links.advance(links.next_event_s)
    assert len(ended) == 50


def test_a_dead_engines_transfers_end_nowhere() -> None:
    links, ended = Links(NETWORK), list[float]()
    links.start("p0", "d0", 100, 0.0, ended.append)
    links.start("p1", "d1", 100, 0.0, ended.append)
    links.drop("d0")
    drain(links)
    assert ended == pytest.approx([1.0], abs=0.02)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(2, 500), st.floats(0, 10)),
        min_size=1,
        max_size=12,
    )
)
def test_all_bytes_arrive_and_never_faster_than_a_link_can(
    flows: list[tuple[int, int, int, float]],
) -> None:
    links, ended = Links(NETWORK), dict[int, float]()
    for n, (source, target, size, at_s) in sorted(enumerate(flows), key=lambda pair: pair[1][3]):
        drain(links, at_s)
        links.start(
            f"p{source}", f"d{target}", size, at_s, lambda when_s, n=n: ended.update({n: when_s})
        )
    drain(links)
    assert len(ended) == len(flows)
    for n, (_, _, size, at_s) in enumerate(flows):
        assert ended[n] >= at_s + (size - 1) / 100.0 - 1e-6
    for side in (0, 1):
        for engine in range(4):
            mine = [(n, one) for n, one in enumerate(flows) if one[side] == engine]
            if mine:
                busy_s = max(ended[n] for n, _ in mine) - min(one[3] for _, one in mine)
                assert sum(one[2] - 1 for _, one in mine) <= 100.0 * busy_s + 1e-6


RACKS = Network(bytes_per_s=100.0, node_bytes_per_s=1e6, other_bytes_per_s=70.0, latency_s=0.0, kv_bytes_per_token=1.0, layers=4)  # fmt: skip
PLACES = [Place("", f"n{n}", f"r{n // 2}", nic) for n, nic in enumerate((150.0, 90.0, 250.0))]
"""Three nodes; the first two in one rack. Engine `p1` and `d1` are on the node n1."""


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(2, 900), st.floats(0, 10), st.floats(0, 5)),
        min_size=2,
        max_size=16,
    )
)  # fmt: skip
def test_a_nic_never_carries_more_than_its_rate(
    flows: list[tuple[int, int, int, float, float]],
) -> None:
    """KV that streams during a prefill included: it has only what the NIC had to spare."""
    links, rates = Links(RACKS), {place.node: place.nic_bytes_per_s for place in PLACES}
    for side, n in product("pd", range(6)):
        links.place(f"{side}{n}", PLACES[n % 3])
    carried, done = Counter[tuple[str, str]](), Counter[int]()

    def carry(source: int, target: int, size: float) -> None:
        ends = PLACES[source % 3].node, PLACES[target % 3].node
        if ends[0] != ends[1]:
            carried.update({(ends[0], "out"): size, (ends[1], "in"): size})  # type: ignore[dict-item]

    def check(now_s: float) -> None:
        """What was carried so far, and what goes on now."""
        links._pass(now_s)
        moving = Counter(carried)
        speed = Counter[tuple[str, str]]()
        for flow in links._flows:
            for name, way in flow.path:
                if name.startswith("NIC of "):
                    moving[name.removeprefix("NIC of "), way] -= flow.left  # type: ignore[assignment]
                    speed[name.removeprefix("NIC of "), way] += flow.rate  # type: ignore[assignment]
        for (node, way), size in moving.items():
            assert size <= rates[node] * now_s + 2 * len(flows), (node, way)
        for (node, way), per_s in speed.items():
            assert per_s <= rates[node] * (1 + 1e-6), (node, way)

    for n, (source, target, size, at_s, prefill_s) in sorted(
        enumerate(flows), key=lambda pair: pair[1][3]
    ):
        while links.next_event_s < at_s:
            check(links.next_event_s)
            links.advance(links.next_event_s)
        left = links.exposed_bytes(f"p{source}", f"d{target}", size, min(prefill_s, at_s), at_s)
        assert size / RACKS.layers <= left <= size
        carry(source, target, size)
        links.start(f"p{source}", f"d{target}", left, at_s, lambda _, n=n: done.update([n]))
        check(at_s)
    while links.next_event_s < inf:
        check(links.next_event_s)
        links.advance(links.next_event_s)
    assert len(done) == len(flows)
