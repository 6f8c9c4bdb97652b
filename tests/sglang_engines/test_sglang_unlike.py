# SPDX-License-Identifier: Apache-2.0
"""Two SGLang engines with other page sizes and other numbers of ranks than each other, with KV coded as
int8, and with pools of different sizes."""

import uuid

import pytest
from sglang_engines.sglang_handoffs import LENGTHS, Handoffs
from sglang_engines.sglang_harness import (
    EnginePool,
    abort_all,
    assert_close,
    assert_idle,
    ended,
    fault,
    handed_over,
    received_bytes,
    refused,
    send,
    text,
)
from sglang_engines.sglang_recipes import (
    CHUNKED,
    LARGE_PAGES,
    LARGE_PAGES_TOKENS,
    PAGE_DAMAGED,
    PERMITS_INT8,
    SMALL_PAGES,
    Recipe,
)

INT8_NOISE = 0.05
RAW_TOKEN_BYTES = 2 * 4 * 4 * 64 * 4  # K and V of 4 layers, 4 heads, 64 elements in float32
PREFILL_TOKENS = 2048
TWO_RANKS = Recipe("prefill", 64, tp=2, args=(*CHUNKED, "--max-total-tokens", str(PREFILL_TOKENS)))
ONE_RANK = Recipe("decode", 1, config=PERMITS_INT8)


class TestPages1ToPages64OfTwoRanks(Handoffs):
    prefill, decode = SMALL_PAGES, LARGE_PAGES

    def test_a_prompt_longer_than_the_decode_pool_ends_with_its_cause(
        self, engines: EnginePool
    ) -> None:
        p, d = engines.pair(self.prefill, self.decode)
        prefill, decode = send(p, d, text(LARGE_PAGES_TOKENS + 1))
        assert "exceeds the maximum" in refused(decode)
        abort_all(p)  # as a router does
        ended(prefill)
        assert_idle(p, d)


class TestInt8:
    def test_every_answer_is_within_the_noise_of_the_codec(self, engines: EnginePool) -> None:
        """Both engines permit int8, and their other peers here do not."""
        prompts = [text(length) for length in LENGTHS]
        engines.start_ahead(ONE_RANK, TWO_RANKS)
        wanted = engines.reference(prompts)
        p, d = engines.pair(SMALL_PAGES, ONE_RANK)
        for prompt, answer in zip(prompts, wanted, strict=True):
            assert_close(handed_over(p, d, prompt), answer, INT8_NOISE)
        assert 0 < received_bytes(d) < RAW_TOKEN_BYTES * sum(LENGTHS) / 3
        with fault(d, PAGE_DAMAGED):
            damaged = handed_over(p, d, prompts[-1], cache_salt=uuid.uuid4().hex)
        with pytest.raises(AssertionError, match="wanted"):
            assert_close(damaged, wanted[-1], INT8_NOISE)
        assert_idle(p, d)


class TestPages64OfTwoRanksToPages1(Handoffs):
    prefill, decode = TWO_RANKS, ONE_RANK

    def test_a_prompt_longer_than_the_prefill_pool_ends_with_its_cause(
        self, engines: EnginePool
    ) -> None:
        p, d = engines.pair(self.prefill, self.decode)
        prefill, decode = send(p, d, text(PREFILL_TOKENS + 1))
        assert "exceeds the maximum" in refused(prefill)
        assert "prefill_ended" in refused(decode)
        assert_idle(p, d)
