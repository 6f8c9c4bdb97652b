# SPDX-License-Identifier: Apache-2.0
"""Prefill on one SGLang engine, decode on another: every token as one engine computes it, whatever
the page sizes, ranks and codecs of the two."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from sglang_engines.sglang_harness import (
    CHUNK_TOKENS,
    CHUNKED,
    DECODE,
    PREFILL,
    Answer,
    EnginePool,
    Recipe,
    SglangEngine,
    assert_idle,
    assert_same,
    handed_over,
    received_bytes,
    text,
)

RADIX = ("--disaggregation-decode-enable-radix-cache",)
PAGE = 64
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, CHUNK_TOKENS, 5 * CHUNK_TOKENS - 3)
"""A token, a page less and more, a chunk, five chunks."""

PAIRS = {
    "page 16 -> 16": (PREFILL, DECODE),
    "page 1 -> 64": (Recipe("prefill", 1, args=CHUNKED), Recipe("decode", 64, args=RADIX)),
    "TP2 page 64 -> TP1": (
        Recipe("prefill", 64, tp=2, args=CHUNKED),
        Recipe("decode", 64, args=RADIX),
    ),
    "TP1 page 64 -> TP2 page 1": (
        Recipe("prefill", 64, args=CHUNKED),
        Recipe("decode", 1, tp=2),
    ),
}


@pytest.fixture(scope="module", params=PAIRS, ids=str)
def pair(
    engines: EnginePool, request: pytest.FixtureRequest
) -> tuple[SglangEngine, SglangEngine, list[Answer]]:
    prompts = [text(length) for length in LENGTHS]
    wanted = engines.reference(prompts)
    return *engines.pair(*PAIRS[request.param]), wanted


def test_every_token_is_as_one_engine_computes_it(
    pair: tuple[SglangEngine, SglangEngine, list[Answer]],
) -> None:
    p, d, wanted = pair
    for length, answer in zip(LENGTHS, wanted, strict=True):
        assert_same(handed_over(p, d, text(length)), answer)
    assert_idle(p, d)


def test_prompts_that_share_a_prefix_find_it_on_both_sides(
    engines: EnginePool, pair: tuple[SglangEngine, SglangEngine, list[Answer]]
) -> None:
    p, d, wanted = pair
    longest = text(LENGTHS[-1])
    before = received_bytes(d)
    again = handed_over(p, d, longest)
    assert_same(again, wanted[-1])
    received = received_bytes(d) - before
    if "--disaggregation-decode-enable-radix-cache" in d.args:
        assert again.cached_tokens >= len(longest) // 2
        assert received < before / 2, "the prefix was fetched again"
    assert_idle(p, d)


def test_eight_at_once_do_not_mix(
    pair: tuple[SglangEngine, SglangEngine, list[Answer]],
) -> None:
    p, d, wanted = pair
    with ThreadPoolExecutor(8) as pool:
        asked = [
            (
                place % len(LENGTHS),
                pool.submit(handed_over, p, d, text(LENGTHS[place % len(LENGTHS)])),
            )
            for place in range(8)
        ]
        for place, future in asked:
            assert_same(future.result(), wanted[place])
    assert_idle(p, d)
