# SPDX-License-Identifier: Apache-2.0
"""Two SGLang engines with other page sizes and other numbers of ranks than each other, with KV coded as
int8, and with pools of unlike sizes."""

import uuid

import pytest
from sglang_engines.sglang_handoffs import LENGTHS, Handoffs
from sglang_engines.sglang_harness import (
    EnginePool,
    assert_close,
    assert_idle,
    fault,
    handed_over,
    text,
)
from sglang_engines.sglang_recipes import (
    CHUNKED,
    LARGE_PAGES,
    PAGE_DAMAGED,
    SMALL_PAGES,
    Recipe,
)

PERMITS_INT8 = '{"codec": "int8"}'
INT8_NOISE = 0.05
PREFILL_TOKENS = 2048
TWO_RANKS = Recipe(
    "prefill",
    64,
    tp=2,
    args=(*CHUNKED, "--max-total-tokens", str(PREFILL_TOKENS)),
    config=PERMITS_INT8,
)
ONE_RANK = Recipe("decode", 1)
INT8 = Recipe("decode", 16, config=PERMITS_INT8)


class TestPages1ToPages64OfTwoRanks(Handoffs):
    prefill, decode = SMALL_PAGES, LARGE_PAGES


class TestPages64OfTwoRanksToPages1(Handoffs):
    prefill, decode = TWO_RANKS, ONE_RANK


class TestPages64OfTwoRanksToInt8:
    def test_every_answer_is_within_the_noise_of_the_codec(self, engines: EnginePool) -> None:
        """Int8 is agreed upon because both engines permit it."""
        prompts = [text(length) for length in LENGTHS]
        engines.start_ahead(TWO_RANKS, INT8)
        wanted = engines.reference(prompts)
        p, d = engines.pair(TWO_RANKS, INT8)
        for prompt, answer in zip(prompts, wanted, strict=True):
            assert_close(handed_over(p, d, prompt), answer, INT8_NOISE)
        with fault(d, PAGE_DAMAGED):
            damaged = handed_over(p, d, prompts[-1], cache_salt=uuid.uuid4().hex)
        with pytest.raises(AssertionError, match="wanted"):
            assert_close(damaged, wanted[-1], INT8_NOISE)
        assert_idle(p, d)
