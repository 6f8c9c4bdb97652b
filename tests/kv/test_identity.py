# SPDX-License-Identifier: Apache-2.0
"""Fingerprints tell apart what must not share KV, and nothing else."""

from hypothesis import given
from hypothesis import strategies as st

from pd_connector.kv.identity import FINGERPRINT_BYTES, token_fingerprint

_tokens = st.lists(st.integers(0, 2**31 - 1), max_size=50)
_parts = st.tuples(
    _tokens, st.text(max_size=10), st.text(max_size=10), st.lists(st.text(max_size=10), max_size=3)
)


def _of(parts: tuple[list[int], str, str, list[str]]) -> bytes:
    tokens, salt, adapter, inputs = parts
    return token_fingerprint(tokens, salt=salt, adapter=adapter, inputs=inputs)


@given(_parts, _parts)
def test_prompts_have_one_fingerprint_only_if_all_their_parts_are_equal(
    one: tuple[list[int], str, str, list[str]], other: tuple[list[int], str, str, list[str]]
) -> None:
    assert (_of(one) == _of(other)) == (one == other)
    assert len(_of(one)) == FINGERPRINT_BYTES


def test_every_part_of_a_request_counts_and_so_does_where_it_stands() -> None:
    fingerprints = [
        token_fingerprint([1, 2, 3]),
        token_fingerprint([1, 2]),
        token_fingerprint([1, 3, 2]),
        token_fingerprint([1, 2, 3, 0]),
        token_fingerprint([1, 2, 3], salt="x"),
        token_fingerprint([1, 2, 3], adapter="x"),
        token_fingerprint([1, 2, 3], inputs=["x"]),
        token_fingerprint([1, 2, 3], inputs=["x", "y"]),
        token_fingerprint([1, 2, 3], inputs=["y", "x"]),
        token_fingerprint([1, 2, 3], inputs=["xy"]),
        token_fingerprint([1, 2, 3], salt="x", adapter="y"),
        token_fingerprint([1, 2, 3], salt="xy"),
    ]
    assert len(set(fingerprints)) == len(fingerprints)


def test_the_kind_of_sequence_does_not_count() -> None:
    assert token_fingerprint((1, 2)) == token_fingerprint([1, 2])
    assert token_fingerprint([1], inputs=iter(["a"])) == token_fingerprint([1], inputs=("a",))


def test_a_salt_that_is_no_utf8_has_a_fingerprint_of_its_own() -> None:
    lone = token_fingerprint([1], salt="\ud83d")
    assert lone != token_fingerprint([1], salt="?")
    assert lone != token_fingerprint([1], salt="\ude00")
