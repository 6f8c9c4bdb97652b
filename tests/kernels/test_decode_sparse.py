# SPDX-License-Identifier: Apache-2.0
"""`sparse_mla_decode`: the kernel, interpreted, against attention written out over the chosen rows."""

import dataclasses
import random
from collections.abc import Iterator, Sequence

import decode_interpreted
import pytest
import torch
from decode_batches import by_kernel, by_reference, error, mla_batch

from pd_kernels.attention import plan_sparse_mla_decode, sparse_mla_decode
from pd_kernels.attention.mla_call import MlaCall
from pd_kernels.attention.reference import decoded_latents

BOUND = 5e-3
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")


@pytest.fixture(autouse=True, scope="module")
def _bfloat16_products() -> Iterator[None]:
    with decode_interpreted.dots_mended():
        yield


def selections(counts: Sequence[int], heads: int, coded: bool, missing: float) -> MlaCall:
    """A batch over single rows. `missing`: the part of a selection that is -1, in random places; a few rows stand
    twice. All other rows of the cache are NaN."""
    batch = mla_batch(counts, heads, page=1, coded=coded, causal=False)
    table, chance = batch.table.clone(), random.Random(7)
    for number, count in enumerate(counts):
        for place in range(count):
            if chance.random() < missing:
                table[number, place] = -1
            elif chance.random() < 0.05:
                table[number, place] = table[number, 0]
    return dataclasses.replace(batch, table=table)


def written_out(batch: MlaCall) -> torch.Tensor:
    """Float32 `[tokens, heads, 512]`, by softmax over each selection."""
    latents = decoded_latents(batch.cache) if batch.coded else batch.cache.float()
    results = []
    for number, count in enumerate(batch.lengths.tolist()):
        rows = [row for row in batch.table[number, :count].tolist() if row >= 0]
        chosen, query = latents[rows, 0], batch.query[number, 0].float()
        share = (
            (query @ chosen.T * batch.scale).softmax(1) if rows else query.new_zeros(len(query), 0)
        )
        results.append(share @ chosen[:, :512])
    return torch.stack(results)


@pytest.mark.parametrize("missing", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("heads", "coded"), [(16, False), (16, True), (40, False), (128, True)])
def test_selections(heads: int, coded: bool, missing: float) -> None:
    batch = selections([150, 0, 64, 1], heads, coded, missing)
    wanted = written_out(batch)
    for found, lse in (by_kernel(batch, 3), by_reference(batch)):
        empty = lse[:, 0] == -torch.inf
        assert not found[:, 0][empty].any()
        if missing < 1.0:
            assert error(found[:, 0], wanted) <= BOUND
        else:
            assert empty.all()
            assert not wanted.any()


def test_a_missing_row_that_is_not_skipped_is_seen() -> None:
    batch = selections([150, 90], 16, False, 0.3)
    chosen = dataclasses.replace(
        batch, table=batch.table.where(batch.table >= 0, batch.table[0, 1])
    )
    assert error(by_kernel(chosen, 3)[0], by_reference(batch)[0]) > 10 * BOUND


def test_the_function_takes_rows_of_any_stride() -> None:
    batch = selections([70, 33], 16, True, 0.2)
    rows = torch.zeros(len(batch.cache), 1312, dtype=torch.uint8)[:, :656]
    rows.copy_(batch.cache[:, 0])
    plan = plan_sparse_mla_decode(batch.query[:, 0], rows, max_tokens=5).fill(batch.lengths)
    given = batch.query[:, 0], rows, batch.table, batch.lengths
    out, lse = sparse_mla_decode(*given, scale=batch.scale, return_lse=True, plan=plan)
    assert out.shape == (2, 16, 512)
    assert lse.shape == (2, 16)
    assert error(out.float(), written_out(batch)) <= BOUND
    with pytest.raises(ValueError, match=r"q \[2, 1, 16, 576\], cache"):
        sparse_mla_decode(batch.query, rows, batch.table, batch.lengths, scale=1.0)
