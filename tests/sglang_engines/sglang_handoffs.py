# SPDX-License-Identifier: Apache-2.0
"""What must hold between any two SGLang engines: every token as one engine computes it, whatever their
page sizes, ranks and codecs. Classes of tests inherit it and name the engines."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
from sglang_engines.sglang_harness import (
    Answer,
    EnginePool,
    SglangEngine,
    assert_idle,
    assert_same,
    fault,
    handed_over,
    received_bytes,
    text,
)
from sglang_engines.sglang_recipes import CHUNK_TOKENS, PAGE_DAMAGED, RADIX, Recipe

PAGE = 64
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, CHUNK_TOKENS, 5 * CHUNK_TOKENS - 3)
"""A token, a page less and more, a chunk, five chunks."""

Pair = tuple[SglangEngine, SglangEngine, list[Answer]]


class Handoffs:
    """Tests of one pair of engines."""

    prefill: ClassVar[Recipe]
    decode: ClassVar[Recipe]

    @pytest.fixture
    def pair(self, engines: EnginePool) -> Pair:
        """The two engines, and what one engine answers alone."""
        engines.start_ahead(self.prefill, self.decode)  # side by side with that one
        wanted = engines.reference([text(length) for length in LENGTHS])
        return *engines.pair(self.prefill, self.decode), wanted

    def test_every_token_is_as_one_engine_computes_it(self, pair: Pair) -> None:
        p, d, wanted = pair
        for length, answer in zip(LENGTHS, wanted, strict=True):
            assert_same(handed_over(p, d, text(length)), answer)
        assert_idle(p, d)

    def test_prompts_that_share_a_prefix_find_it_on_both_sides(self, pair: Pair) -> None:
        p, d, wanted = pair
        longest, caches = text(LENGTHS[-1]), set(RADIX) <= set(d.args)
        before = received_bytes(d) if caches else 0.0
        again = handed_over(p, d, longest)
        assert_same(again, wanted[-1])
        if caches:
            assert again.cached_tokens >= len(longest) // 2
            prefixed = received_bytes(d) - before
            assert prefixed < before / 2, "the prefix was fetched again"
            # The negative control: with another salt nothing is found, and all of it is fetched.
            assert_same(handed_over(p, d, longest, cache_salt=uuid.uuid4().hex), wanted[-1])
            assert received_bytes(d) - before - prefixed > 2 * prefixed
        assert_idle(p, d)

    def test_eight_at_once_do_not_mix(self, pair: Pair) -> None:
        p, d, wanted = pair
        with ThreadPoolExecutor(8) as pool:
            places = [place % len(LENGTHS) for place in range(8)]
            asked = [pool.submit(handed_over, p, d, text(LENGTHS[place])) for place in places]
            for place, future in zip(places, asked, strict=True):
                assert_same(future.result(), wanted[place])
        assert_idle(p, d)

    def test_a_page_damaged_after_verification_fails_the_comparison(self, pair: Pair) -> None:
        """The negative control: answers depend on every page that was moved."""
        p, d, wanted = pair
        sound = handed_over(p, d, text(LENGTHS[-1]), cache_salt=uuid.uuid4().hex)
        assert_same(sound, wanted[-1])
        with fault(d, PAGE_DAMAGED):
            damaged = handed_over(p, d, text(LENGTHS[-1]), cache_salt=uuid.uuid4().hex)
        with pytest.raises(AssertionError, match="wanted"):
            assert_same(damaged, wanted[-1])
        assert_idle(p, d)
