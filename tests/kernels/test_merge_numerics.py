# SPDX-License-Identifier: Apache-2.0
"""Attention over parts of a sequence, merged, is attention over the sequence."""

from collections.abc import Callable
from itertools import pairwise

import decode_interpreted  # noqa: F401
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_kernels.attention.merge import Partials, launch_merge, merge_partials, reference_merge

ERROR = 1e-6
EMPTY = float("-inf")


def attention(q: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Partials:
    """Attention of `[heads, dim]` queries over `[token, heads, dim]`, in the inputs' dtype; 0 and -inf
    over no tokens."""
    scores = torch.einsum("hd,thd->ht", q, key)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == EMPTY, 0.0).unsqueeze(-1)).exp()
    return Partials(torch.einsum("ht,thd->hd", weights, value), lse)


def random_partials(shards: int, rows: int, dim: int, spread: float = 3.0) -> Partials:
    chance = torch.Generator().manual_seed(shards * rows + dim)
    outs = torch.randn(shards, rows, dim, generator=chance)
    return Partials(outs, torch.randn(shards, rows, generator=chance) * spread)


def by_kernel(outs: torch.Tensor, lses: torch.Tensor) -> Partials:
    out = torch.full(outs.shape[1:], torch.nan)
    return Partials(out, launch_merge(outs, lses, out))


def exact(outs: torch.Tensor, lses: torch.Tensor) -> Partials:
    return reference_merge(outs.double(), lses.double())


ways = pytest.mark.parametrize("merge", [by_kernel, merge_partials], ids=["kernel", "reference"])
Merge = Callable[[torch.Tensor, torch.Tensor], Partials]


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max())


@given(
    length=st.integers(0, 60),
    cuts=st.lists(st.integers(0, 60), max_size=7),
    sharpness=st.floats(0.1, 6.0),
    seed=st.integers(0, 999),
)
@settings(max_examples=60, deadline=None)
def test_a_sequence_split_anyhow_and_merged_is_the_whole(
    length: int, cuts: list[int], sharpness: float, seed: int
) -> None:
    chance = torch.Generator().manual_seed(seed)
    key, value = torch.randn(2, length, 3, 16, dtype=torch.float64, generator=chance).unbind()
    q = torch.randn(3, 16, dtype=torch.float64, generator=chance) * sharpness
    wanted = attention(q, key, value)
    ends = [0, *sorted(min(cut, length) for cut in cuts), length]
    parts = [attention(q, key[a:b], value[a:b]) for a, b in pairwise(ends)]
    stacked = [torch.stack(each).float() for each in zip(*parts, strict=True)]
    out, lse = merge_partials(*stacked)
    # A logarithm above 16 has a precision of less than 1e-6 in float32.
    error = ERROR * max(1.0, float(stacked[1][stacked[1] > EMPTY].abs().max()) / 8 if length else 0)
    torch.testing.assert_close(out.double(), wanted.out, rtol=error, atol=error)
    torch.testing.assert_close(lse.double(), wanted.lse, rtol=error, atol=error)


@ways
@pytest.mark.parametrize(
    ("shards", "rows", "dim"),
    [(1, 5, 64), (2, 33, 128), (3, 7, 80), (5, 40, 256), (8, 6, 512), (17, 3, 20), (2, 9, 13)],
)
def test_the_error_is_a_rounding_error(merge: Merge, shards: int, rows: int, dim: int) -> None:
    partials = random_partials(shards, rows, dim)
    found, wanted = merge(*partials), exact(*partials)
    assert distance(found.out, wanted.out) <= ERROR
    assert distance(found.lse, wanted.lse) <= ERROR


INF, NAN = float("inf"), float("nan")


@ways
@pytest.mark.parametrize(
    ("lses", "wanted", "lse"),
    [
        ((INF, 2.0), 0.0, INF),
        ((2.0, INF, 5.0), 0.0, INF),
        ((INF, INF), 0.0, INF),
        ((INF, EMPTY), 0.0, INF),
        ((EMPTY, EMPTY), 0.0, EMPTY),
        ((EMPTY, 2.0), 1.0, 2.0),
        ((3e38, 2.0), 1.0, 3e38),
        ((-3e38, EMPTY), 1.0, -3e38),
        ((NAN, 2.0), NAN, NAN),
        ((NAN, INF), NAN, NAN),
        ((EMPTY, NAN), NAN, NAN),
    ],
)
def test_sums_that_are_not_finite(
    merge: Merge, lses: tuple[float, ...], wanted: float, lse: float
) -> None:
    """A shard with a sink of inf has a result of 0 and a sum of inf, and takes all. The `out` of an empty shard is not read."""
    outs = torch.ones(len(lses), 1, 8)
    for shard, own in enumerate(lses):
        outs[shard] = {INF: 0.0, EMPTY: NAN}.get(own, 1.0)
    found = merge(outs, torch.tensor(lses)[:, None])
    torch.testing.assert_close(found.out, torch.full((1, 8), wanted), equal_nan=True)
    torch.testing.assert_close(found.lse, torch.tensor([lse]), equal_nan=True)


@ways
def test_an_empty_shard_changes_nothing_whatever_lies_in_it(merge: Merge) -> None:
    outs, lses = random_partials(3, 10, 64)
    wanted = merge(outs[::2].contiguous(), lses[::2].contiguous())
    outs[1], lses[1] = torch.nan, EMPTY
    found = merge(outs, lses)
    assert torch.equal(found.out, wanted.out)
    assert torch.equal(found.lse, wanted.lse)


@pytest.mark.filterwarnings("ignore:divide by zero")  # the interpreter's, where it is meant
@ways
def test_where_all_shards_are_empty_nothing_was_attended_to(merge: Merge) -> None:
    outs, lses = random_partials(4, 10, 64)
    lses[:, 3] = EMPTY
    out, lse = merge(outs, lses)
    assert not out[3].any()
    assert lse[3] == EMPTY
    assert bool(lse[[0, 1, 2, 4]].isfinite().all())


@ways
def test_very_unlike_sums_neither_overflow_nor_vanish(merge: Merge) -> None:
    outs, lses = random_partials(3, 10, 64, spread=1.0)
    lses += torch.tensor([[9e4], [9e4], [-9e4]])
    found, wanted = merge(outs, lses), exact(outs, lses)
    # Next to 9e4 a float32 is one of a lattice of 1/128.
    assert distance(found.out, wanted.out) <= ERROR
    assert distance(found.lse, wanted.lse) <= 1 / 128


@ways
def test_what_is_not_a_number_stays_visible(merge: Merge) -> None:
    outs, lses = random_partials(3, 4, 64)
    lses[1, 2] = torch.nan
    outs[0, 3, 5] = torch.nan
    out, lse = merge(outs, lses)
    assert bool(out[2].isnan().all())
    assert bool(lse[2].isnan())
    assert bool(out[3, 5].isnan())
    assert not out[:2].isnan().any()


@ways
def test_a_shard_that_is_left_out_is_missed(merge: Merge) -> None:
    """The negative control."""
    outs, lses = random_partials(3, 10, 64)
    assert distance(merge(outs[:2], lses[:2]).out, merge(outs, lses).out) > 1000 * ERROR


@ways
def test_shards_may_lie_anywhere(merge: Merge) -> None:
    """Distances that are not multiples of 16 bytes, and rows that are not dense."""
    slab = torch.randn(3, 10 * 64 + 10 + 1)
    outs = slab[:, : 10 * 64].view(3, 10, 64)
    lses = slab[:, 10 * 64 : -1]
    assert outs.stride(0) % 4
    assert distance(merge(outs, lses).out, exact(outs, lses).out) <= ERROR
    turned = outs.transpose(1, 2).contiguous().transpose(1, 2)
    assert distance(merge(turned, lses).out, exact(outs, lses).out) <= ERROR


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_answer_is_rounded_once_to_the_dtype_asked_for(dtype: torch.dtype) -> None:
    partials = random_partials(3, 10, 64)
    out = torch.empty(10, 64, dtype=dtype)
    assert merge_partials(*partials, out=out).out is out
    assert torch.equal(out, reference_merge(*partials).out.to(dtype))
    kernel = torch.empty_like(out)
    launch_merge(*partials, kernel)
    assert distance(kernel.float(), out.float()) <= torch.finfo(dtype).eps * 4


def test_a_list_of_partials_is_merged_like_a_stack() -> None:
    outs, lses = random_partials(3, 10, 64)
    found = merge_partials(list(outs.view(3, 2, 5, 64)), list(lses.view(3, 2, 5)))
    assert torch.equal(found.out.view(10, 64), merge_partials(outs, lses).out)
    assert found.lse.shape == (2, 5)


@ways
def test_no_rows_are_merged_to_no_rows(merge: Merge) -> None:
    out, lse = merge(torch.empty(2, 0, 64), torch.empty(2, 0))
    assert out.shape == (0, 64)
    assert lse.shape == (0,)


def test_partials_that_do_not_fit_are_refused() -> None:
    outs, lses = random_partials(3, 10, 64)
    with pytest.raises(ValueError, match=r"outs \[3, 10, 64\], lses \[2, 10\]"):
        merge_partials(outs, lses[:2])
    with pytest.raises(ValueError, match="partials are float32"):
        merge_partials(outs.bfloat16(), lses)
    with pytest.raises(ValueError, match=r"want \[10, 64\], dense"):
        merge_partials(outs, lses, out=torch.empty(64, 10).t())


def test_the_operator_is_traced_by_torch_compile() -> None:
    outs, lses = random_partials(3, 10, 64)
    torch.library.opcheck(torch.ops.pd_kernels.merge_partials, (outs, lses, torch.empty(10, 64)))


def test_compiled_code_merges_the_same() -> None:
    outs, lses = random_partials(3, 10, 64)
    compiled = torch.compile(merge_partials, backend="eager", fullgraph=True)
    found, wanted = compiled(outs, lses), merge_partials(outs, lses)
    assert torch.equal(found.out, wanted.out)
    assert torch.equal(found.lse, wanted.lse)
