# SPDX-License-Identifier: Apache-2.0
"""The rule by which answers of engines that round are compared."""

import pytest
from sglang_engines.sglang_harness import Answer, assert_close

NOISE = 0.01
WANTED = Answer((5, 6, 7), (-0.1, -0.2, -0.3), 0, (1.0, 0.02, 1.0))


def answer(tokens: tuple[int, ...], logprobs: tuple[float, ...]) -> Answer:
    return Answer(tokens, logprobs, 0, (1.0,) * len(tokens))


def test_logprobs_within_the_noise_are_the_same() -> None:
    assert_close(answer((5, 6, 7), (-0.109, -0.191, -0.3)), WANTED, NOISE)


def test_a_tie_may_end_otherwise_and_what_follows_is_not_compared() -> None:
    assert_close(answer((5, 9, 9), (-0.1, -9.0, -9.0)), WANTED, NOISE)


@pytest.mark.parametrize(
    "found",
    [
        answer((9, 6, 7), (-0.1, -0.2, -0.3)),  # the first token is not a tie
        answer((5, 6, 9), (-0.1, -0.2, -0.3)),
        answer((5, 6, 7), (-0.111, -0.2, -0.3)),
        answer((5, 9, 7), (-0.2, -0.2, -0.3)),  # what comes before a tie is compared
    ],
)
def test_everything_else_is_a_difference(found: Answer) -> None:
    with pytest.raises(AssertionError, match="token"):
        assert_close(found, WANTED, NOISE)


def test_answers_of_other_lengths_are_not_compared() -> None:
    with pytest.raises(ValueError, match="zip"):
        assert_close(answer((5, 6), (-0.1, -0.2)), WANTED, NOISE)
