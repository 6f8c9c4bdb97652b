# SPDX-License-Identifier: Apache-2.0
"""Shapes that the tests of other decode kernels try (FlashInfer's, FlashMLA's, XQA's, vLLM's and SGLang's own), with values
of ours: odd page sizes, every ratio of query and KV heads, lengths around a page and a tile, long sequences."""

import functools

from attention_cases import FP8, mla, paged
from transfer_cases import Case

from pd_bench.kernels.decode_cases import Heads

PAGES = (1, 5, 8, 24, 48, 100, 128, 256, 784, 1056)
HEADS = (
    *(Heads(1, 1, 64), Heads(3, 1, 128), Heads(7, 1, 128), Heads(12, 3, 80), Heads(28, 4, 128)),
    *(Heads(40, 40, 128), Heads(48, 4, 64), Heads(64, 1, 128), Heads(128, 1, 64), Heads(10, 2, 96)),
)
AROUND = (0, 1, 15, 16, 17, 63, 64, 65)


def around(page: int) -> list[int]:
    """Lengths that end before, at and behind the end of a page."""
    return [max(0, page - 1), page, page + 1]


PEERS: dict[str, Case] = {
    **{f"peers, page {page}": functools.partial(paged, around(page), page=page) for page in PAGES},
    **{
        f"peers, {heads.query} heads, {heads.kv} of KV, dim {heads.dim}": functools.partial(
            paged, [37, 130], heads
        )
        for heads in HEADS
    },
    "peers, lengths": functools.partial(paged, AROUND, workers=5),
    "peers, lengths, fp8": functools.partial(paged, AROUND, cache=FP8, workers=5),
    "peers, one long": functools.partial(paged, [3001, 2, 0], workers=7),
    "peers, window of one token": functools.partial(paged, [37, 70], window=1),
    "peers, window longer than the sequence": functools.partial(paged, [37, 70], window=4096),
    "peers, ragged": functools.partial(paged, [70, 33, 8], queries=5, jagged=True),
    **{
        f"peers, mla, page {page}": functools.partial(mla, 16, around(page)[1:], page=page)
        for page in (1, 24, 256, 784)
    },
    **{
        f"peers, mla, {heads} heads": functools.partial(mla, heads, [37, 70])
        for heads in (1, 5, 20, 64)
    },
    "peers, mla, lengths": functools.partial(mla, 16, AROUND, workers=5),
    "peers, mla, lengths, fp8": functools.partial(mla, 16, AROUND, workers=5, coded=True),
}
