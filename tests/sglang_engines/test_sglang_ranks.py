# SPDX-License-Identifier: Apache-2.0
"""A decode engine of two ranks, one of which fails now and then."""

from __future__ import annotations

from sglang_engines.sglang_harness import (
    PREFILL,
    Answer,
    EnginePool,
    Recipe,
    assert_idle,
    assert_same,
    ended,
    send,
    text,
)


def test_when_ranks_disagree_no_answer_is_wrong_and_no_page_is_lost(
    engines: EnginePool,
) -> None:
    """SGLang's own fault injection: one rank's poll says `Failed`, and both ranks free the pages."""
    (wanted,) = engines.reference([text(200)])
    failing = (("SGLANG_TEST_DISAGG_FAILURE_PROB", "0.02"),)
    p, d = engines.pair(PREFILL, Recipe("decode", 16, tp=2, env=failing))
    answered = failed = 0
    for _ in range(30):
        prefill, decode = send(p, d, text(200))
        if decode.exception(timeout=60) is None:
            assert_same(Answer.of(decode.result()), wanted)
            answered += 1
        else:
            failed += 1
        ended(prefill)
    assert answered
    assert failed
    assert_idle(p, d)
