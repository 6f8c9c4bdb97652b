# SPDX-License-Identifier: Apache-2.0
"""`paged_decode`: the kernel, interpreted, against attention written out in float32."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import decode_interpreted
import pytest
import torch
import triton.language as tl
from decode_batches import FP8, by_kernel, by_reference, error, paged_batch, plan_of
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.language import exp2

from pd_kernels.attention import (
    Mod,
    alibi,
    document,
    merge_partials,
    paged_decode,
    plan_paged_decode,
    soft_cap,
)
from pd_kernels.attention.paged_call import PagedCall, config_of
from pd_kernels.attention.paged_kernel import launch_paged

BOUND = 5e-3
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")


@pytest.fixture(autouse=True, scope="module")
def _bfloat16_products() -> Iterator[None]:
    with decode_interpreted.dots_mended():
        yield


def check(batch: PagedCall, workers: int = 5) -> None:
    """The kernel's result and lse are the reference's, up to the rounding of 16-bit numbers."""
    found, lse = by_kernel(batch, workers)
    wanted, sums = by_reference(batch)
    assert torch.equal(lse == -torch.inf, sums == -torch.inf)
    empty = sums == -torch.inf
    assert not found[empty].any()
    assert error(found, wanted) <= BOUND
    assert torch.allclose(lse[~empty], sums[~empty], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (5, 1), (14, 2), (24, 1), (72, 1)])
def test_groups_of_any_size(heads: int, kv_heads: int) -> None:
    check(paged_batch([150], heads, kv_heads), workers=2)


@pytest.mark.parametrize("dim", [32, 80, 96, 120, 128, 192, 256, 512])
def test_dims(dim: int) -> None:
    check(paged_batch([200, 1], dim=dim))


@pytest.mark.parametrize("cache", [None, FP8])
@pytest.mark.parametrize(("dim", "value_dim"), [(192, 128), (64, 80), (120, 512)])
def test_values_may_have_another_dim_than_keys(
    dim: int, value_dim: int, cache: torch.dtype | None
) -> None:
    check(paged_batch([200, 1, 40], dim=dim, value_dim=value_dim, cache=cache, queries=2))


SINKS = torch.tensor([0.5, -torch.inf, torch.inf, 6.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "more", [{}, {"window": 90}, {"cache": FP8, "key_scale": 0.7, "value_scale": 1.9}]
)
def test_sinks(dtype: torch.dtype, more: dict[str, Any]) -> None:
    """Also where a row is split, where nothing is visible, and where a sink is infinite."""
    batch = paged_batch([400, 0, 3], queries=4, sinks=SINKS.to(dtype), **more)
    found, lse = by_kernel(batch, 5)
    wanted, sums = by_reference(batch)
    assert error(found, wanted) <= BOUND
    assert torch.allclose(lse, sums, atol=1e-5, rtol=1e-5)
    assert not found[:, :, 2].any(), "a sink of inf leaves nothing to the tokens"
    plain, tokens = by_reference(dataclasses.replace(batch, sinks=None))
    assert torch.equal(wanted[:, :, 1], plain[:, :, 1]), "one of -inf takes nothing"
    by_hand = plain[..., 3, :] * (tokens[..., 3] - sums[..., 3]).exp()[..., None]
    assert torch.allclose(wanted[..., 3, :], by_hand.nan_to_num(), atol=1e-6)
    assert error(plain[:, :, [0, 3]], wanted[:, :, [0, 3]]) > 10 * BOUND, "sinks make a difference"


def test_a_shared_prefix_is_read_once_by_hand() -> None:
    """All sequences' queries are heads of one sequence, the prefix; the suffixes are a batch of their own."""
    shared, lengths, page, kv_heads, group = 96, [130, 97, 200], 16, 2, 2
    whole = paged_batch(lengths, kv_heads * group, kv_heads)
    prefix = whole.table[:1, : shared // page]
    table = whole.table.clone()
    table[:, : shared // page] = prefix
    whole = dataclasses.replace(whole, table=table)
    query = whole.query.unflatten(2, (kv_heads, group)).transpose(
        0, 2
    )  # [kv head, 1, sequence, group]
    heads = query.reshape(1, 1, -1, whole.query.shape[3])
    first = dataclasses.replace(
        whole, query=heads, table=prefix, lengths=torch.tensor([shared]), causal=False
    )
    rest = dataclasses.replace(
        whole, table=table[:, shared // page :].contiguous(), lengths=whole.lengths - shared
    )
    out, lse = by_kernel(first, 3, torch.float32)
    shape = kv_heads, len(lengths), group
    out = out.view(*shape, -1).transpose(0, 1).flatten(1, 2).unsqueeze(1)
    lse = lse.view(shape).transpose(0, 1).flatten(1, 2).unsqueeze(1)
    own = by_kernel(rest, 3, torch.float32)
    merged = merge_partials([out, own[0]], [lse, own[1]])
    wanted, sums = by_reference(whole)
    assert error(merged.out, wanted) <= BOUND
    assert torch.allclose(merged.lse, sums, atol=1e-5, rtol=1e-5)
    assert error(own[0], wanted) > 10 * BOUND


@pytest.mark.parametrize("page", [16, 48, 128, 256])
@pytest.mark.parametrize("order", ["NHD", "HND", "apart"])
def test_pages_and_layouts(page: int, order: str) -> None:
    check(paged_batch([300, page, page + 1], page=page, order=order))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache", [None, FP8])
def test_dtypes(dtype: torch.dtype, cache: torch.dtype | None) -> None:
    """An FP8 cache is held to attention over what its codes stand for."""
    scales = {"key_scale": 0.7, "value_scale": 1.9} if cache else {}
    check(paged_batch([260, 70], dtype=dtype, cache=cache, **scales))


@pytest.mark.parametrize(
    "more",
    [{}, {"dim": 80, "queries": 3, "window": 70}, {"kv_heads": 1, "heads": 24, "queries": 4}],
    ids=["4 heads", "dim 80, 3 queries, window", "96 lines, one KV head"],
)
def test_kv_heads_with_scales_of_their_own(more: dict[str, Any]) -> None:
    """Held to attention in float32 over caches that were multiplied by hand; one scale for all is wrong."""
    batch = paged_batch([300, 0, 33], cache=FP8, **more)
    key, value = (
        torch.tensor([0.25, 3.0])[: batch.kv_heads],
        torch.tensor([4.0, 0.5])[: batch.kv_heads],
    )
    scaled = dataclasses.replace(batch, head_scales=(key, value))
    by_hand = dataclasses.replace(
        batch, keys=batch.keys.float() * key[:, None], values=batch.values.float() * value[:, None]
    )
    wanted, sums = by_reference(by_hand)
    for found, lse in (by_kernel(scaled, 5), by_reference(scaled)):
        assert error(found, wanted) <= BOUND
        assert torch.allclose(lse, sums, atol=1e-5, rtol=1e-5)
    for wrong in (
        dataclasses.replace(batch, key_scale=float(key.max()), value_scale=float(value.max())),
        dataclasses.replace(batch, head_scales=(value, key)),
    ):
        if batch.kv_heads > 1 or wrong.head_scales is not None:
            assert error(by_kernel(wrong, 5)[0], wanted) > 10 * BOUND


@pytest.mark.parametrize("queries", [2, 3, 5, 8])
def test_several_queries_see_no_later_tokens(queries: int) -> None:
    check(paged_batch([150, queries], heads=6, queries=queries))


def test_queries_see_later_tokens_where_they_may() -> None:
    check(paged_batch([150, 3], queries=4, causal=False))


def test_queries_before_the_first_token_give_nothing() -> None:
    batch = paged_batch([2, 100], queries=5)
    found, lse = by_kernel(batch, 3)
    assert not found[0, :3].any()
    assert (lse[0, :3] == -torch.inf).all()
    check(batch)


def test_sequences_without_kv_give_nothing() -> None:
    batch = paged_batch([0, 100, 0, 0, 40, 0])
    found, lse = by_kernel(batch, 4)
    assert not found[[0, 2, 3, 5]].any()
    assert (lse[[0, 2, 3, 5]] == -torch.inf).all()
    check(batch)


def test_a_batch_of_nothing() -> None:
    found, lse = by_kernel(paged_batch([0, 0]), 4)
    assert not found.any()
    assert (lse == -torch.inf).all()


def test_a_sequence_of_a_million_tokens() -> None:
    """The last tokens only, since the interpreter takes minutes for all. Its table names each page many times."""
    batch, tokens = (
        paged_batch([4096], heads=2, kv_heads=1, page=256, window=300, queries=2),
        1 << 20,
    )
    table = batch.table[:, :16].repeat(1, tokens // 4096)
    million = dataclasses.replace(batch, table=table, lengths=torch.tensor([tokens]))
    check(million, workers=3)
    last = dataclasses.replace(million, lengths=torch.tensor([tokens - 1]))  # the control
    assert error(by_kernel(last, 3)[0], by_reference(million)[0]) > 10 * BOUND


def test_scores_of_minus_infinity_weigh_nothing() -> None:
    """A score mod may hide tokens itself: some of a tile, a whole first tile, or all."""

    def reference(score, b, h, q_idx, kv_idx, args):  # type: ignore[no-untyped-def]
        return torch.where(kv_idx < args[0] + b * 100, -torch.inf, score)

    batch = paged_batch([300, 300, 90], score_mod=Mod.of(_hides, (150,), reference))
    check(batch)
    assert (by_kernel(batch, 3)[1][2] == -torch.inf).all()


def _hides(score, b, h, q_idx, kv_idx, args):  # type: ignore[no-untyped-def]
    return tl.where(kv_idx < args[0] + b * 100, float("-inf"), score)


@pytest.mark.parametrize("window", [1, 100, 1_000])
def test_windows(window: int) -> None:
    check(paged_batch([300, 5, 101], window=window))
    check(paged_batch([300, 5], window=window, queries=3))


def test_tokens_before_the_window_are_not_read() -> None:
    batch = paged_batch([1_000], window=100)
    wanted, _ = by_kernel(batch, 3)
    hidden = batch.table.clone()
    hidden[:, : (1_000 - 100) // 128 * 8] = 1 << 30  # whole tiles of 128 tokens: no such pages
    found, _ = by_kernel(dataclasses.replace(batch, table=hidden), 3)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("page", [1, 16, 128])
@pytest.mark.parametrize("cache", [None, FP8])
def test_what_lies_in_front_of_the_window_may_be_anything(
    page: int, cache: torch.dtype | None
) -> None:
    """Engines take back pages that no window reaches; others write there, or nobody does. The window
    begins within a tile and within a page."""
    window, queries, length = 100, 2, 300
    batch = paged_batch([length, 40], page=page, queries=queries, window=window, cache=cache)
    wanted, sums = by_reference(batch)
    for token in range(length - queries - window + 1):
        number = batch.table[0, token // page]
        for one in (batch.keys, batch.values):
            one[number, token % page] = torch.full(one.shape[2:], torch.nan).to(one.dtype)
    for found, lse in (by_reference(batch), by_kernel(batch, 3, torch.float32)):
        assert error(found, wanted) <= BOUND
        assert torch.allclose(lse, sums, atol=1e-5, rtol=1e-5)


def nearer(score, b, h, q_idx, kv_idx, args):  # type: ignore[no-untyped-def]
    return score - 0.05 * (q_idx - kv_idx) * (h + 1) + b


def even(b, h, q_idx, kv_idx, args):  # type: ignore[no-untyped-def]
    return (kv_idx % 2 == 0) | (kv_idx == q_idx)


def like_flex_attention(score, b, h, q_idx):  # type: ignore[no-untyped-def]
    return score


def with_a_global(score, b, h, q_idx, kv_idx, args):  # type: ignore[no-untyped-def]
    return score * BOUND


def test_mods_that_no_kernel_takes_are_refused_where_they_are_made() -> None:
    factor = 3.0

    def with_a_closure(score, b, h, q_idx, kv_idx, args):  # type: ignore[no-untyped-def]
        return score * factor

    for function, message in (
        (lambda score, b, h, q_idx, kv_idx, args: score, "not a lambda"),
        (like_flex_attention, r"with 4 parameters: a score mod has \(score, b, h"),
        (with_a_global, "with_a_global uses BOUND from outside: pass values"),
        (with_a_closure, "uses factor from outside"),
    ):
        with pytest.raises(ValueError, match=message):
            Mod.of(function)


where = 3.0
"""As a name of a module's own beside `tl.where`."""


def with_names_of_triton(score, b, h, q_idx, kv_idx, args):  # type: ignore[no-untyped-def]
    return tl.where(kv_idx > q_idx, exp2(score), score)


def test_a_mod_may_name_what_triton_has() -> None:
    assert Mod.of(with_names_of_triton)


def test_values_wider_than_keys_have_the_launch_options_of_their_own_width() -> None:
    """By the keys' width alone, tiles of 64 and 512 elements need 300,032 bytes of shared memory: no GPU has them."""
    assert config_of(64, 2, 16, 512) == config_of(512, 2, 16, 512)


SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.02])
IDS = (torch.arange(600) // 37).int().view(2, 300)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(
    "mods",
    [
        {"score_mod": soft_cap(1.5)},
        {"score_mod": alibi(SLOPES)},
        {"mask_mod": document(IDS)},
        {"score_mod": Mod.of(nearer)},
        {"mask_mod": Mod.of(even)},
        {"score_mod": alibi(SLOPES), "mask_mod": document(IDS), "window": 90},
    ],
    ids=["soft cap", "ALiBi", "document", "own score", "own mask", "all"],
)
def test_mods(mods: dict[str, Any], queries: int) -> None:
    batch = paged_batch([300, 140], queries=queries, scale=0.5, **mods)
    check(batch)
    plain = dataclasses.replace(batch, score_mod=None, mask_mod=None)
    wanted, _ = by_reference(batch)
    assert error(by_reference(plain)[0], wanted) > 10 * BOUND, "the mod makes a difference"


def test_a_mod_is_never_asked_about_tokens_that_are_not_there() -> None:
    """Else it would read outside what it captures: `IDS` have room for 300 tokens and no more."""
    ids = torch.full((1 << 16,), -1, dtype=torch.int32)
    ids[: 2 * 300] = IDS.flatten()
    batch = paged_batch([300, 299], queries=8, mask_mod=document(ids[:600].view(2, 300)))
    check(batch)


@given(
    lengths=st.lists(st.integers(0, 400), min_size=1, max_size=4),
    kv_heads=st.integers(1, 2),
    queries=st.integers(1, 2),
    workers=st.lists(st.integers(1, 12), min_size=2, max_size=2, unique=True),
    page=st.sampled_from([16, 64]),
)
@settings(max_examples=12, deadline=None)
def test_any_number_of_workers_gives_the_same(
    lengths: list[int], kv_heads: int, queries: int, workers: list[int], page: int
) -> None:
    batch = paged_batch(lengths, 4, kv_heads, queries=queries, page=page)
    wanted, sums = by_reference(batch)
    for count in workers:
        found, lse = by_kernel(batch, count, torch.float32)
        if wanted.any():
            assert error(found, wanted) <= BOUND
        assert torch.allclose(lse, sums, atol=1e-5)


def test_splits_change_nothing_but_rounding() -> None:
    batch = paged_batch([2_000], kv_heads=1, dtype=torch.float16)
    whole, _ = by_kernel(batch, 1, torch.float32)
    split, _ = by_kernel(batch, 12, torch.float32)
    assert (plan_of(batch, 12).ranges[:, 5] > 0).any(), "it is split"
    assert 0 < error(split, whole) < 5e-4


def test_a_wrong_page_is_noticed() -> None:
    batch = paged_batch([300, 200])
    wanted, _ = by_reference(batch)
    wrong = batch.table.clone()
    wrong[0, 3] = wrong[0, 4]
    found, _ = by_kernel(dataclasses.replace(batch, table=wrong), 5)
    assert error(found, wanted) > 10 * BOUND


def test_a_piece_that_is_missing_is_never_merged_around() -> None:
    """A row of which one piece has not arrived is not written, and its counters say so."""
    batch = paged_batch([900], kv_heads=1)
    plan = plan_of(batch, 4)
    ranges = plan.ranges.clone()
    plan.ranges[2, 2:4] = plan.ranges[2, 0:2]  # the third worker does nothing
    plan.ranges[2, 1] = 0
    out = torch.full(batch.query.shape, 7.0)
    launch_paged(batch, out, None, plan.tensors, ((True, False), (False, True)))
    assert (out == 7.0).all()
    assert plan.counters.any()

    plan.counters.zero_()
    plan.ranges.copy_(ranges)
    launch_paged(batch, out, None, plan.tensors, ((True, False), (False, True)))
    assert error(out, by_reference(batch)[0]) <= BOUND


@pytest.mark.parametrize("phases", [((True, True),), ((True, False), (False, True))])
def test_a_launch_leaves_the_counters_as_it_found_them(phases: Any) -> None:
    """Programs that run in turn, in one launch: only the last to arrive finds all there."""
    batch = paged_batch([900, 20, 400], kv_heads=1)
    plan = plan_of(batch, 6)
    out = torch.zeros(batch.query.shape)
    for _ in range(2):
        launch_paged(batch, out.zero_(), None, plan.tensors, phases)
        assert not plan.counters.any()
        assert error(out, by_reference(batch)[0]) <= BOUND


def arguments(batch: PagedCall) -> tuple[torch.Tensor, ...]:
    return batch.query, batch.keys, batch.values, batch.table, batch.lengths


def test_the_operator_takes_the_reference_for_tensors_on_a_cpu() -> None:
    batch = paged_batch([90, 200], queries=2, window=50)
    wanted, sums = by_reference(batch)
    out, lse = paged_decode(*arguments(batch), window=50, return_partials=True)
    assert out.dtype == lse.dtype == torch.float32
    assert torch.equal(out, wanted)
    assert torch.equal(lse, sums)
    plan = plan_paged_decode(batch.query, batch.keys, window=50).fill(batch.lengths)
    given = torch.empty_like(batch.query)
    assert paged_decode(*arguments(batch), window=50, plan=plan, out=given) is not None
    assert torch.equal(given, wanted.to(given.dtype))


def test_one_query_needs_no_axis_of_its_own() -> None:
    batch = paged_batch([90, 200])
    query, *others = arguments(batch)
    out, lse = paged_decode(query[:, 0], *others, return_lse=True)
    assert out.shape == query[:, 0].shape
    assert lse.shape == query.shape[:1] + query.shape[2:3]
    assert torch.equal(out, paged_decode(query, *others)[:, 0])


@pytest.mark.parametrize("by_head", [False, True])
def test_it_can_be_compiled(by_head: bool) -> None:
    batch = paged_batch([90, 200], cache=FP8 if by_head else None)
    scale = torch.tensor([0.5, 2.0]) if by_head else 1.0
    mod = alibi(SLOPES)
    plan = plan_paged_decode(batch.query, batch.keys).fill(batch.lengths)

    def step(*given: torch.Tensor) -> Any:
        out, lse = paged_decode(
            *given, score_mod=mod, k_scale=scale, v_scale=scale, return_lse=True, plan=plan
        )
        return out + 1, lse

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(compiled(*arguments(batch)), step(*arguments(batch)), strict=True):
        assert torch.equal(found, wanted)


def test_what_does_not_belong_together_is_refused() -> None:
    batch = paged_batch([90, 200])
    query, keys, values, table, lengths = arguments(batch)
    other = plan_paged_decode(query, keys, window=9).fill(lengths)
    with pytest.raises(ValueError, match=r"k_cache .* both must be"):
        paged_decode(query, keys[0], values[0], table, lengths)
    with pytest.raises(ValueError, match=r"4 query heads: must be a multiple of 3"):
        paged_decode(
            query,
            keys[:, :, :1].expand(-1, -1, 3, -1),
            values[:, :, :1].expand(-1, -1, 3, -1),
            table,
            lengths,
        )
    for scales, message in (
        ({"k_scale": torch.ones(2)}, r"k_scale is a tensor \[2\], and the other scale a number"),
        ({"v_scale": torch.ones(2)}, r"v_scale is a tensor \[2\], and the other scale a number"),
        *(
            (
                {"k_scale": wrong, "v_scale": torch.ones(2)},
                r"k_scale of .*: must be a number, or dense",
            )
            for wrong in (torch.ones(64), torch.ones(2, 2), torch.ones(2).half(), torch.ones(()))
        ),
        (
            {"k_scale": torch.ones(2), "v_scale": torch.ones(1)},
            r"v_scale of .* float32 \[2\] on cpu",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            paged_decode(query, keys, values, table, lengths, **scales)
    with pytest.raises(ValueError, match=r"sinks \[3\]: must be dense, \[4\]"):
        paged_decode(query, keys, values, table, lengths, sinks=torch.zeros(3))
    with pytest.raises(ValueError, match=r"sinks of torch\.int64"):
        paged_decode(query, keys, values, table, lengths, sinks=torch.zeros(4, dtype=torch.int64))
    for made, message in (
        (plan_paged_decode(query, keys), "was never filled, and the call has 2"),
        (plan_paged_decode(query, keys).fill(lengths[:1]), "was filled for 1 sequences"),
    ):
        with pytest.raises(ValueError, match=message):
            paged_decode(query, keys, values, table, lengths, plan=made)
    with pytest.raises(ValueError, match="score_mod: its function must have the parameters"):
        paged_decode(query, keys, values, table, lengths, score_mod=Mod.of(even))
    with pytest.raises(ValueError, match="9 queries: must be 1 to 8"):
        paged_decode(query.expand(-1, 9, -1, -1), keys, values, table, lengths)
    with pytest.raises(ValueError, match=r"caches of torch.float16 .* torch.bfloat16 as q"):
        paged_decode(query, keys.half(), values.half(), table, lengths)
    with pytest.raises(ValueError, match=r"block_table \[1, \d+\], lengths \[2\]: must be"):
        paged_decode(query, keys, values, table[:1], lengths)
    with pytest.raises(ValueError, match=r"out \[2, 4, 64\]: must be dense"):
        paged_decode(query, keys, values, table, lengths, out=torch.empty(2, 4, 64))
    with pytest.raises(ValueError, match=r"plan for RowShape.*window=9.*: must be for .*window=0"):
        paged_decode(query, keys, values, table, lengths, plan=other)
    for wrong in (query.repeat(1, 1, 16, 1), query.repeat(1, 1, 1, 2)[..., :112]):
        dim = wrong.shape[3]
        cache = torch.zeros(*keys.shape[:3], dim, dtype=keys.dtype)
        mine = plan_paged_decode(wrong, cache).fill(lengths)
        like = wrong[..., :96] if dim == 112 else wrong[:, :, :4]
        caches = [cache[..., : like.shape[3]]] * 2
        with pytest.raises(
            ValueError, match=r"plan for 1 x \d+ lines of \d+ elements: must be for"
        ):
            paged_decode(like, *caches, table, lengths, plan=mine)
    with pytest.raises(ValueError, match=r"q of torch.float32: must be bfloat16 or float16"):
        dataclasses.replace(batch, query=query.float()).check_kernel()
    apart = batch.lengths.repeat_interleave(3)[::3]
    with pytest.raises(ValueError, match="lengths: 3 elements apart, must be consecutive"):
        dataclasses.replace(batch, lengths=apart).check_kernel()
