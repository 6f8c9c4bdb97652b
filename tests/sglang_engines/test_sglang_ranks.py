# SPDX-License-Identifier: Apache-2.0
"""A decode engine of two ranks, one of which fails now and then."""

from __future__ import annotations

import time
import uuid

from sglang_engines.sglang_harness import (
    DEADLINE_S,
    Answer,
    EnginePool,
    assert_idle,
    assert_same,
    ended,
    fault,
    send,
    text,
)
from sglang_engines.sglang_recipes import LARGE_PAGES, RANK_FAILS, SMALL_PAGES

EACH = 5


def test_when_ranks_disagree_no_answer_is_wrong_and_no_page_is_lost(
    engines: EnginePool,
) -> None:
    """SGLang's own fault injection: one rank's poll says `Failed`, and both ranks free the pages."""
    (wanted,) = engines.reference([text(200)])
    p, d = engines.pair(SMALL_PAGES, LARGE_PAGES)
    answered = failed = 0
    end = time.monotonic() + DEADLINE_S
    with fault(d, RANK_FAILS):
        while answered < EACH or failed < EACH:
            assert time.monotonic() < end, (
                f"{answered} answered, {failed} failed: wanted {EACH} each"
            )
            prefill, decode = send(p, d, text(200), cache_salt=uuid.uuid4().hex)
            if decode.exception(timeout=60) is None:
                assert_same(Answer.of(decode.result()), wanted)
                answered += 1
            else:
                failed += 1
            ended(prefill)
    assert_idle(p, d)
