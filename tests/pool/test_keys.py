# SPDX-License-Identifier: Apache-2.0
"""Two chunks have one key only if everything that their KV depends on is the same."""

import os
import subprocess
import sys
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_connector.kv.model import LayerFacts, ModelFacts
from pd_connector.pool.keys import (
    CHUNK_TOKENS,
    KEY_BYTES,
    Input,
    chain,
    extend,
    link,
    model_root,
    root,
    token_bytes,
)

MODEL = bytes(32)
_ids = st.integers(0, 2**31 - 1)
_text = st.text(max_size=8) | st.sampled_from(["", "\ud83d", "\ude00"])


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], dict[str, Any]]:
    """A prompt of a few chunks, and the rest that its KV depends on."""
    count = draw(st.integers(0, 4)) * CHUNK_TOKENS + draw(st.integers(0, 3))
    seed = draw(_ids)
    tokens = [(seed + 7 * place) % 2**31 for place in range(count)]
    inputs = st.builds(Input, _text, st.integers(0, 4 * CHUNK_TOKENS))
    rest = {
        "adapter": draw(_text),
        "salt": draw(_text),
        "inputs": draw(st.lists(inputs, max_size=4)),
    }
    return tokens, rest


@given(prompts(), st.integers(0, 5))
def test_keys_computed_chunk_by_chunk_are_those_of_the_whole_prompt(
    prompt: tuple[list[int], dict[str, Any]], cut: int
) -> None:
    tokens, rest = prompt
    whole = chain(MODEL, tokens, **rest)
    assert len(whole) == len(tokens) // CHUNK_TOKENS
    cut = min(cut, len(whole))
    parent = whole[cut - 1] if cut else root(MODEL, adapter=rest["adapter"], salt=rest["salt"])
    later = extend(parent, tokens[cut * CHUNK_TOKENS :], rest["inputs"], first_chunk=cut)
    assert whole[:cut] + later == whole


def before(prompt: tuple[list[int], dict[str, Any]], stop: int) -> tuple[object, ...]:
    """Everything that the KV of a prompt's first `stop` tokens depends on."""
    tokens, rest = prompt
    inputs = sorted(one for one in rest["inputs"] if one.offset < stop)
    return tokens[:stop], rest["adapter"], rest["salt"], inputs


@given(prompts(), prompts())
def test_chunks_have_one_key_only_if_all_before_them_is_equal(
    one: tuple[list[int], dict[str, Any]], other: tuple[list[int], dict[str, Any]]
) -> None:
    keys = chain(MODEL, one[0], **one[1]), chain(MODEL, other[0], **other[1])
    for number, (a, b) in enumerate(zip(*keys, strict=False)):
        stop = (number + 1) * CHUNK_TOKENS
        assert (a == b) == (before(one, stop) == before(other, stop))
        assert len(a) == KEY_BYTES


def test_every_part_counts_and_so_does_where_it_stands() -> None:
    tokens = list(range(2 * CHUNK_TOKENS))
    changed = [*tokens[:5], 77, *tokens[6:]]
    swapped = [1, 0, *tokens[2:]]
    keys = [
        chain(MODEL, tokens),
        chain(b"\1" * 32, tokens),
        chain(MODEL, changed),
        chain(MODEL, swapped),
        chain(MODEL, tokens, salt="x"),
        chain(MODEL, tokens, adapter="x"),
        chain(MODEL, tokens, salt="x", adapter="y"),
        chain(MODEL, tokens, salt="xy"),
        chain(MODEL, tokens, adapter="xy"),
        chain(MODEL, tokens, inputs=[Input("x", 0)]),
        chain(MODEL, tokens, inputs=[Input("x", 1)]),
        chain(MODEL, tokens, inputs=[Input("y", 0)]),
        chain(MODEL, tokens, inputs=[Input("x", 0), Input("x", 1)]),
        chain(MODEL, tokens, inputs=[Input("x", 11)]),
        chain(MODEL, tokens, inputs=[Input("1x", 1)]),
    ]
    for number in range(2):
        assert len({one[number] for one in keys}) == len(keys)


def test_an_input_counts_from_the_chunk_on_in_which_it_begins() -> None:
    tokens = list(range(4 * CHUNK_TOKENS))
    without, with_input = chain(MODEL, tokens), chain(MODEL, tokens, inputs=[Input("x", 300)])
    assert [a == b for a, b in zip(without, with_input, strict=True)] == [True, True, False, False]


def test_the_order_of_inputs_and_the_kind_of_sequence_do_not_count() -> None:
    inputs = [Input("x", 3), Input("y", 3), Input("z", 200)]
    assert chain(MODEL, range(256), inputs=inputs) == chain(
        MODEL, tuple(range(256)), inputs=inputs[::-1]
    )


def test_a_token_that_has_more_than_32_bits_has_no_key() -> None:
    with pytest.raises(OverflowError):
        chain(MODEL, [2**31] * CHUNK_TOKENS)


def test_the_bytes_of_tokens_are_little_endian_on_every_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert token_bytes([1, 258]) == b"\1\0\0\0\2\1\0\0"
    foreign = "big" if sys.byteorder == "little" else "little"
    monkeypatch.setattr(sys, "byteorder", foreign)
    assert token_bytes([1]) == array("i", [1]).tobytes()[::-1]


def test_keys_are_those_of_the_documented_format() -> None:
    """A change of them makes every store of users forget: it must be meant."""
    assert (
        chain(MODEL, range(256), salt="s", adapter="a", inputs=[Input("i", 130)])[1].hex()
        == EXPECTED
    )


EXPECTED = "43b92034c6bfde6248bec2eef112b4f062706c7bd46dfea68ea7d024e7590611"


def test_no_hash_seed_is_in_a_key() -> None:
    code = (
        "from pd_connector.pool.keys import *; "
        "print(chain(bytes(32), range(256), salt='s', inputs=[Input('b', 1), Input('a', 1)])[1].hex())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


FACTS = ModelFacts(config=b"c", weights=b"f", loaded=b"lf", held="h", samples=b"w")


def changed(**fields: Any) -> ModelFacts:
    return msgspec.structs.replace(FACTS, **fields)


def test_a_model_is_known_by_its_config_and_by_all_bytes_of_its_weights() -> None:
    others = [
        FACTS,
        changed(config=b"d"),
        changed(weights=b"g"),
        changed(model_id="m"),
        changed(version="v"),
        changed(version="f"),
        changed(weights=b""),
        changed(weights=b"", held="other part"),
        changed(weights=b"", loaded=b"lg"),
        changed(weights=b"lf"),
    ]
    roots = [model_root(facts) for facts in others]
    assert None not in roots
    assert len(set(roots)) == len(others)


def test_what_says_nothing_of_the_weights_is_not_in_the_root() -> None:
    layers = (LayerFacts((0,), "model/attention", "a"),)
    for same in (
        changed(layers=layers),
        changed(samples=b""),
        changed(draft=b"d"),
        changed(loaded=b""),
    ):
        assert model_root(same) == model_root(FACTS)


@pytest.mark.parametrize(
    "facts",
    [
        changed(weights=b"", loaded=b""),
        changed(weights=b"", loaded=b"", model_id="named"),
        changed(reading=True, version="v"),
        changed(updates=1),
    ],
    ids=["samples only", "a name only", "still being read", "changed weights without a version"],
)
def test_a_model_whose_weights_are_not_known_in_full_has_no_root(facts: ModelFacts) -> None:
    assert model_root(facts) is None


def test_a_version_stands_for_weights_that_have_changed() -> None:
    assert model_root(changed(updates=3, version="v")) == model_root(
        changed(version="v", weights=b"")
    )


def test_a_link_is_of_its_parent() -> None:
    tokens = token_bytes(range(CHUNK_TOKENS))
    assert link(b"a" * 32, tokens) != link(b"b" * 32, tokens)
