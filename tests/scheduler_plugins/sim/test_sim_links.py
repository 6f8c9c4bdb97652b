# SPDX-License-Identifier: Apache-2.0
"""Transfers share links fairly, and no link carries more than it can."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_plugins.sim.links import Links, Network

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
