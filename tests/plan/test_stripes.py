# SPDX-License-Identifier: Apache-2.0
"""Tokens that context-parallel ranks share: which pass between two ranks, and that each passes once."""

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_connector.errors import UnsupportedGeometryError
from pd_connector.kv.geometry import WHOLE, Geometry, Group, Shard, Stripe
from pd_connector.plan.coverage import lacking, uncovered
from pd_connector.plan.route import meet, routes
from pd_connector.plan.stripes import MAX_PERIOD, Stripes, common

SIZES = st.sampled_from([1, 2, 3, 4, 6])
INTERLEAVES = st.sampled_from([1, 2, 3, 4, 8, 16])


@st.composite
def stripes(draw: st.DrawFn) -> Stripe:
    size = draw(SIZES)
    if size == 1:
        return WHOLE
    return Stripe(draw(st.integers(0, size - 1)), size, draw(INTERLEAVES))


@given(stripes(), stripes(), st.integers(0, 400), st.integers(0, 400))
@settings(max_examples=300)
def test_the_tokens_that_pass_are_those_that_both_hold(
    source: Stripe, destination: Stripe, first: int, length: int
) -> None:
    both = common(source, destination)
    stop = first + length
    held = [t for t in range(first, stop) if source.holds(t) and destination.holds(t)]
    if both is None:
        assert held == list(range(first, stop))
        return
    assert both.count(first, stop) == len(held) <= both.most(length)
    assert [t for t in range(first, stop) if _passes(both, t)] == held
    assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(both.runs))


@given(stripes(), st.integers(0, 500))
def test_a_ranks_tokens_lie_side_by_side_in_its_pages(stripe: Stripe, tokens: int) -> None:
    held = [token for token in range(tokens) if stripe.holds(token)]
    assert [stripe.place(token) for token in held] == list(range(len(held)))


def test_a_pattern_that_repeats_too_late_is_refused_with_both_values() -> None:
    with pytest.raises(UnsupportedGeometryError, match=r"4093 / 3 ranks .* 128 / 1024 tokens"):
        common(Stripe(0, 4093, 128), Stripe(0, 3, 1024))
    assert MAX_PERIOD < 4093 * 128


def engine(tp: int, pcp: int, cp: int, interleave: int, group: Group) -> list[Geometry]:
    """All ranks of an engine of one stage."""
    layers = len(group.layers)
    split = msgspec.structs.replace(group, interleave=interleave if cp > 1 else 0)
    return [
        Geometry(Shard(0, layers, rank, tp, cp, place, pcp), (split,))
        for rank in range(tp)
        for place in range(pcp)
    ]


GROUP = Group("attention", (0, 1, 2, 3, 4), 2, 8, 8, 48, 0, "bfloat16", "HND", heads_apart=True)
LATENT = msgspec.structs.replace(GROUP, kind="latent", heads=1, value_dim=0)


@st.composite
def engines(draw: st.DrawFn, group: Group) -> list[Geometry]:
    """Any sizes that fit: the ranks with the same heads are a multiple of those that share tokens."""
    tp, pcp = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 2, 3]))
    holders = max(1, tp // group.heads) * pcp
    cp = draw(st.sampled_from([size for size in range(1, holders + 1) if holders % size == 0]))
    return engine(tp, pcp, cp, draw(INTERLEAVES), group)


@given(st.data(), st.sampled_from([GROUP, LATENT]))
@settings(max_examples=120)
def test_every_token_of_every_head_comes_once(data: st.DataObject, group: Group) -> None:
    ours, theirs = data.draw(engines(group)), data.draw(engines(group))
    tokens = range(0, 400, 7)
    for destination in theirs:
        stripe = destination.stripe(destination.groups[0])
        found = [routes(source, destination, ("raw",), ("raw",)) for source in ours]
        came: dict[tuple[int, int, int], int] = {}
        for source, pair in zip(ours, found, strict=True):
            assert not lacking(source, destination)
            assert not pair or meet(source.shard, destination.shard, {group.heads})
            for route in pair:
                held = [t for t in tokens if _passes(route.stripes, t)]
                assert all(source.stripe(source.groups[0]).holds(token) for token in held)
                for layer in route.layers:
                    for head in route.heads:
                        for token in held:
                            key = layer, head, token
                            came[key] = came.get(key, 0) + 1
        assert set(came) == {
            (layer, head, token)
            for layer in group.layers
            for head in destination.heads(group)
            for token in tokens
            if stripe.holds(token)
        }
        assert set(came.values()) <= {1}
        assert uncovered(tuple(found), destination) == ""
        for missing, pair in enumerate(found):
            told = uncovered(tuple(found[:missing] + found[missing + 1 :]), destination)
            assert bool(told) == bool(pair)


def _passes(both: Stripes | None, token: int) -> bool:
    return both is None or both.count(token, token + 1) == 1


def test_equal_engines_talk_one_to_one_and_send_whole_pages() -> None:
    ranks = engine(4, 1, 2, 16, GROUP)
    for i, source in enumerate(ranks):
        for j, destination in enumerate(ranks):
            pair = routes(source, destination, ("raw",), ("raw",))
            assert bool(pair) == (i == j)
            assert all(route.verbatim for route in pair)


def test_unlike_interleaves_send_no_whole_pages() -> None:
    source, destination = engine(4, 1, 2, 16, GROUP)[0], engine(4, 1, 2, 48, GROUP)[0]
    (route,) = routes(source, destination, ("raw",), ("raw",))
    assert not route.verbatim


def test_states_are_never_split() -> None:
    """Prefill context parallelism keeps copies of a state; decode context parallelism shares its units."""
    shard = Shard(0, 1, 3, 4, 4)
    assert [shard.cp_rank, list(shard.heads(8)), shard.replicas(8)] == [3, [6, 7], 1]
    copied = [Shard(0, 1, 0, 1, 3, place, 3) for place in range(3)]
    assert [(one.cp_rank, one.replicas(8), one.replica(8)) for one in copied] == [
        (0, 3, 0),
        (1, 3, 1),
        (2, 3, 2),
    ]


@pytest.mark.parametrize(
    ("shard", "changes", "told"),
    [
        (
            Shard(0, 5, 0, 2, 2),
            {"interleave": 1},
            "among 2 context-parallel ranks, and 1 ranks hold",
        ),
        (
            Shard(0, 5, 0, 8, 3),
            {"interleave": 1},
            "among 3 context-parallel ranks, and 4 ranks hold",
        ),
        (Shard(0, 5, 0, 8, 2), {"interleave": 5}, "interleave of 5 tokens .*pages of 48"),
        (Shard(0, 5, 0, 8, 2), {"interleave": 2, "state_tokens": 4}, "interleave of 2 .*for 4"),
        (Shard(0, 5, 0, 8), {"state_tokens": 5}, "an entry for 5 tokens in pages of 48"),
        (Shard(0, 5, 0, 8, 1, 2, 2), {}, "rank 2 of 2 ranks of prefill"),
    ],
    ids=str,
)
def test_what_cannot_be_shared_is_refused(shard: Shard, changes: dict[str, int], told: str) -> None:
    (plain,) = engine(1, 1, 1, 0, GROUP)
    wrong = Geometry(shard, (msgspec.structs.replace(GROUP, **changes),))
    for pair in ((wrong, plain), (plain, wrong)):
        with pytest.raises(UnsupportedGeometryError, match=told):
            routes(*pair, ("raw",), ("raw",))


def test_unlike_entries_are_refused_with_both_values() -> None:
    (plain,) = engine(1, 1, 1, 0, GROUP)
    other = Geometry(plain.shard, (msgspec.structs.replace(GROUP, state_tokens=4),))
    with pytest.raises(UnsupportedGeometryError, match="differ in state_tokens 1 / 4"):
        routes(plain, other, ("raw",), ("raw",))
