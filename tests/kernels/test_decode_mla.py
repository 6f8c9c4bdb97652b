# SPDX-License-Identifier: Apache-2.0
"""`mla_decode`: the kernel, interpreted, against attention written out in float32."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import decode_interpreted
import pytest
import torch
from decode_batches import (
    TREE,
    by_kernel,
    by_reference,
    error,
    latents_by_hand,
    mla_batch,
    tree_words,
)

from pd_kernels.attention import mla_decode, plan_mla_decode
from pd_kernels.attention.mla_call import MlaCall
from pd_kernels.attention.reference import decoded_latents

BOUND = 5e-3
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")


@pytest.fixture(autouse=True, scope="module")
def _bfloat16_products() -> Iterator[None]:
    with decode_interpreted.dots_mended():
        yield


def check(batch: MlaCall, workers: int = 4) -> None:
    found, lse = by_kernel(batch, workers)
    wanted, sums = by_reference(batch)
    empty = sums == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    assert not found[empty].any()
    assert error(found, wanted) <= BOUND
    # The kernel rounds a code times its scale to bfloat16.
    atol = 1e-3 if batch.codes else 1e-4
    assert torch.allclose(lse[~empty], sums[~empty], atol=atol, rtol=1e-5)


@pytest.mark.parametrize("heads", [16, 24, 40, 128])
def test_heads(heads: int) -> None:
    check(mla_batch([150], heads), workers=2)


@pytest.mark.parametrize("queries", [2, 3, 4, 5, 8])
def test_several_queries_see_no_later_tokens(queries: int) -> None:
    check(mla_batch([130, 2], queries=queries))


@pytest.mark.parametrize("page", [16, 64, 80, 256])
@pytest.mark.parametrize("coded", [False, True])
def test_pages_and_codes(page: int, coded: bool) -> None:
    """FP8 is held to attention over what its codes stand for."""
    check(mla_batch([300, 65, 0], page=page, coded=coded))


@pytest.mark.parametrize(
    ("heads", "queries", "page", "dtype"),
    [
        (16, 1, 64, torch.bfloat16),
        (16, 2, 16, torch.float16),
        (40, 1, 64, torch.bfloat16),
        (16, 8, 80, torch.bfloat16),
    ],
)
def test_fp8_with_one_scale(heads: int, queries: int, page: int, dtype: torch.dtype) -> None:
    batch = mla_batch([300, 65, 0], heads, page, queries, dtype=dtype, kv_scale=0.02)
    check(batch, workers=3)
    # The control: another scale.
    found, _ = by_kernel(dataclasses.replace(batch, kv_scale=0.025), 3)
    assert error(found, by_reference(batch)[0]) > 10 * BOUND


def test_queries_see_later_tokens_where_they_may() -> None:
    check(mla_batch([150, 3], queries=4, causal=False))


@pytest.mark.parametrize(
    ("drafts", "heads", "page", "others"),
    [
        (5, 16, 64, {}),
        (3, 4, 16, {}),
        (3, 8, 64, {"coded": True}),
        (5, 16, 64, {"coded": True}),
        (4, 8, 80, {"kv_scale": 0.02}),
        (5, 40, 1, {"dtype": torch.float16}),
    ],
    ids=["plain", "few lines", "codes", "codes, many lines", "one scale", "pages of one token"],
)
def test_drafts_of_a_tree_see_their_own_branch(
    drafts: int, heads: int, page: int, others: dict[str, Any]
) -> None:
    """Against torch's attention; with the mask of a chain the answer is another."""
    seen = TREE[:drafts, :drafts]
    batch = mla_batch([130, 67, drafts], heads, page, drafts, **others)
    batch = dataclasses.replace(batch, tree=tree_words(seen, 3))
    batch.check()
    if batch.coded:
        latents = decoded_latents(batch.cache)
    else:
        latents = batch.cache.float() * batch.kv_scale
    wanted = latents_by_hand(batch, latents, seen)
    reference, sums = by_reference(batch)
    assert torch.allclose(reference, wanted, atol=2e-5)
    found, lse = by_kernel(batch, 3)
    assert error(found, wanted) <= BOUND
    assert torch.allclose(lse, sums, atol=4e-3)
    chain, _ = by_kernel(dataclasses.replace(batch, tree=None), 3)
    assert error(chain, wanted) > 10 * BOUND


def test_a_chain_of_words_is_causality() -> None:
    batch = mla_batch([130, 2, 0], queries=4)
    chain = dataclasses.replace(batch, tree=tree_words(torch.ones(4, 4).tril().bool(), 3))
    for found, wanted in zip(by_kernel(chain, 3), by_kernel(batch, 3), strict=True):
        assert torch.equal(found, wanted)


def test_a_tree_that_does_not_belong_to_the_queries_is_refused() -> None:
    batch = mla_batch([90, 200], queries=3)
    given, words = (batch.query, batch.cache, batch.table, batch.lengths), tree_words(TREE, 2)
    out = mla_decode(*given, scale=1.0, tree=words[:, :3].contiguous())
    assert out.shape == (2, 3, 16, 512)
    for tree in (words, words[:, :3], words[:, :3].long(), words[0, :3]):
        with pytest.raises(ValueError, match=r"tree of .*: must be dense int32 \[2, 3\]"):
            mla_decode(*given, scale=1.0, tree=tree)
    with pytest.raises(ValueError, match="tree with causal=False: must be causal"):
        mla_decode(*given, scale=1.0, tree=words[:, :3].contiguous(), causal=False)


def test_any_number_of_workers_gives_the_same() -> None:
    batch = mla_batch([700, 0, 40], dtype=torch.float16)
    for workers in (1, 3, 12):
        check(batch, workers)


def test_a_wrong_page_is_noticed() -> None:
    batch = mla_batch([300, 200])
    wrong = batch.table.clone()
    wrong[0, 3] = wrong[0, 2]
    found, _ = by_kernel(dataclasses.replace(batch, table=wrong), 4)
    assert error(found, by_reference(batch)[0]) > 10 * BOUND


def test_a_wrong_scale_is_noticed() -> None:
    batch = mla_batch([300], coded=True)
    wrong = batch.cache.clone()
    first = int(batch.table[0, 0])
    wrong[first, :, 515] ^= 1 << 0  # an exponent's bit of every token's first scale
    found, _ = by_kernel(dataclasses.replace(batch, cache=wrong), 4)
    assert error(found, by_reference(batch)[0]) > 2 * BOUND


@pytest.mark.parametrize("heads", [16, 32])
@pytest.mark.parametrize(("least", "growth"), [(1e-12, 1.0), (1e-6, 1e3), (1e5, 1e-4)])
def test_fp8_scales_of_any_magnitude(heads: int, least: float, growth: float) -> None:
    """Weights are float16, which holds neither 1e-12 nor 1e5: the largest scale so far is taken out
    of them, in each tile again."""
    batch = mla_batch([200, 130], heads, coded=True)
    assert batch.words
    scales = batch.cache.view(torch.float32)[..., 128:132]
    for row, page in enumerate(batch.table[:, :4].tolist()):
        for place, number in enumerate(page[: -(-int(batch.lengths[row]) // 64)]):
            scales[number] *= least * growth**place
    largest = float(scales.nan_to_num().max())
    check(dataclasses.replace(batch, scale=batch.scale / (448 * largest)), workers=3)


def test_pages_of_codes_that_are_not_aligned_are_refused() -> None:
    batch = mla_batch([90], coded=True)
    wide = torch.zeros(3, 64 * 656 + 8, dtype=torch.uint8)[:, : 64 * 656].unflatten(1, (64, 656))
    with pytest.raises(ValueError, match=r"cache: pages and tokens \(41992, 656\) bytes apart"):
        dataclasses.replace(batch, cache=wide).check_kernel()


def test_codes_are_near_what_they_stand_for() -> None:
    """The tests of FP8 use the layout that FlashMLA has."""
    batch, coded = mla_batch([64]), mla_batch([64], coded=True)
    page = int(batch.table[0, 0])
    found, wanted = decoded_latents(coded.cache[page]), batch.cache[page].float()
    assert error(found[:, :512], wanted[:, :512]) < 0.04
    assert torch.equal(found[:, 512:], wanted[:, 512:])


def test_the_operator_takes_the_reference_for_tensors_on_a_cpu() -> None:
    batch = mla_batch([90, 200], queries=2)
    given = batch.query, batch.cache, batch.table, batch.lengths
    wanted, sums = by_reference(batch)
    out, lse = mla_decode(*given, scale=batch.scale, return_partials=True)
    assert torch.equal(out, wanted)
    assert torch.equal(lse, sums)
    plan = plan_mla_decode(batch.query, batch.cache).fill(batch.lengths)
    alone = (batch.query[:, 1], *given[1:])
    single, sums = mla_decode(*alone, scale=batch.scale, return_lse=True)
    assert single.shape == (2, 16, 512)
    assert torch.equal(sums, lse[:, 1])
    assert torch.equal(mla_decode(*given, scale=batch.scale, plan=plan)[:, 1], single)


def test_it_can_be_compiled() -> None:
    batch = mla_batch([90, 200])
    given = batch.query, batch.cache, batch.table, batch.lengths

    def step(*tensors: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = mla_decode(*tensors, scale=0.1)
        return result + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*given), step(*given))


def test_what_does_not_belong_together_is_refused() -> None:
    batch = mla_batch([90, 200])
    query, cache, table, lengths = batch.query, batch.cache, batch.table, batch.lengths
    other = plan_mla_decode(query.expand(-1, 2, -1, -1), cache).fill(lengths)
    with pytest.raises(ValueError, match="q of dim 512: must be 512 of the latent and 64"):
        mla_decode(query[..., :512], cache, table, lengths, scale=1.0)
    with pytest.raises(ValueError, match="9 queries: must be 1 to 8"):
        mla_decode(query.expand(-1, 9, -1, -1), cache, table, lengths, scale=1.0)
    with pytest.raises(ValueError, match=r"cache .*: must be \[pages, page, 576\]"):
        mla_decode(query, cache[..., :512], table, lengths, scale=1.0)
    with pytest.raises(ValueError, match=r"cache .*: must be \[pages, page, 656\]"):
        mla_decode(query, cache.view(torch.uint8), table, lengths, scale=1.0)
    with pytest.raises(ValueError, match=r"kv_scale 2 with a cache of torch.bfloat16: must be 1"):
        mla_decode(query, cache, table, lengths, scale=1.0, kv_scale=2.0)
    with pytest.raises(ValueError, match=r"kv_scale is a tensor \[64\]: must be one number"):
        mla_decode(query, cache, table, lengths, scale=1.0, kv_scale=torch.ones(64))  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"cache of torch.float8_e5m2: must be torch.bfloat16 as q"
    ):
        mla_decode(query, cache.to(torch.float8_e5m2), table, lengths, scale=1.0)
    with pytest.raises(ValueError, match=r"q of torch.float16: must be torch.bfloat16"):
        mla_decode(query.half(), cache, table, lengths, scale=1.0)
    with pytest.raises(ValueError, match=r"block_table \[1, \d+\], lengths \[2\]: must be"):
        mla_decode(query, cache, table[:1], lengths, scale=1.0)
    with pytest.raises(ValueError, match=r"out \[2, 16, 576\]: must be dense"):
        mla_decode(query[:, 0], cache, table, lengths, scale=1.0, out=torch.empty(2, 16, 576))
    with pytest.raises(ValueError, match=r"plan for RowShape.*queries=2.*: must be for"):
        mla_decode(query, cache, table, lengths, scale=1.0, plan=other)
