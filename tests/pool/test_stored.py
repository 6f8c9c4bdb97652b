# SPDX-License-Identifier: Apache-2.0
"""What any engine wrote, any other engine reads: every element bit for bit, and nothing else is touched.

Where each element lies is told by `support.caches`, element by element; no view is trusted.
"""

import pytest
import torch
from support.caches import everything
from support.filled import bits, element, fill, ranks, snapshot
from support.pool_ranks import read, write
from support.setups import Layer, Model, Setup

from pd_connector.pool.keys import CHUNK_TOKENS

TOKENS = 3 * CHUNK_TOKENS
MODEL: Model = (Layer(8, 4, 4),) * 4


def pass_through(model: Model, ours: Setup, theirs: Setup, numbers=(1,)) -> None:  # type: ignore[no-untyped-def]
    sources = ranks(model, ours, TOKENS, 1)
    dense = fill(sources, TOKENS, 2, spread=False)
    files = {number: write(sources, number) for number in numbers}
    for rank in ranks(model, theirs, TOKENS, 3):
        before = snapshot(rank)
        for number in numbers:
            read(rank, files[number], number, (0, TOKENS))
        for key in everything(rank, range(TOKENS)):
            loaded = key[2] // CHUNK_TOKENS in numbers
            wanted = dense[key] if loaded else before[key[0]][torch.tensor(rank.places(*key))]
            assert torch.equal(bits(element(rank, key)), bits(wanted)), key


WRITERS = [
    Setup(page_sizes=(32,)),
    Setup(tp=16, page_sizes=(64,)),
    Setup(tp=2, starts=(0, 2), page_sizes=(32,)),
    Setup(starts=(0, 1, 2, 3)),
    Setup(page_sizes=(96,)),
    Setup(page_sizes=(256,), layout="NHD"),
    Setup(layout=""),
    Setup(layout="K, V"),
    Setup(layout="packed in parts"),
]
READERS = [
    Setup(page_sizes=(32,)),
    Setup(tp=2, page_sizes=(64,)),
    Setup(starts=(0, 2), page_sizes=(16,)),
    Setup(tp=4, starts=(0, 2), page_sizes=(128,)),
    Setup(tp=16, page_sizes=(256,)),
    Setup(tp=2, page_sizes=(96,)),
]


@pytest.mark.parametrize("ours", WRITERS, ids=str)
@pytest.mark.parametrize("theirs", READERS, ids=str)
def test_any_engine_reads_what_any_other_wrote(ours: Setup, theirs: Setup) -> None:
    pass_through(MODEL, ours, theirs)
