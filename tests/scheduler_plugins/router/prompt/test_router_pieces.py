# SPDX-License-Identifier: Apache-2.0
"""Large bodies are decoded in pieces, each of which is short, and mean what they mean when they are decoded at once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_plugins.admission.prompt import KEPT_BYTES, prompt_of
from scheduler_plugins.router.prompt import body, pieces
from scheduler_plugins.router.prompt.pieces import PIECE_BYTES, PieceDecoder
from scheduler_plugins.router.prompt.raw_field import RawField

MIB = 1 << 20
IDS = b'{"prompt":[%b]}' % b",".join([b"12345"] * (1 * MIB))
LARGE = {
    "ids": IDS,
    "a text": b'{"prompt":"%b"}' % (b"a b c d " * (4 * MIB)),
    "escapes": b'{"prompt":"%b"}' % (b"\\n\\ud83d\\ude00" * (1 * MIB)),
    "an image": b'{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"%b"}}]}]}'
    % (b"aA+/" * (4 * MIB)),
    "messages": b'{"messages":[%b]}'
    % b",".join([b'{"role":"user","content":"%b"}' % (b'[{,\\\\\\"' * 200)] * 10_000),
    "batches": b'{"prompt":[%b]}' % b",".join([b"[%b]" % b",".join([b"1"] * 50_000)] * 20),
}


def decoded(raw: bytes) -> tuple[Any, list[int]]:
    """The value, and the sizes of the JSON texts that were decoded at once."""
    sizes = []

    def decode(piece: bytes) -> Any:
        sizes.append(len(piece))
        return json.loads(piece)

    steps = PieceDecoder(raw, decode).steps()
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            return ended.value, sizes


@pytest.mark.parametrize("name", LARGE)
def test_no_piece_is_large_and_the_whole_is_as_it_was_sent(name: str) -> None:
    raw = LARGE[name]
    value, sizes = decoded(raw)
    assert value == json.loads(raw)
    assert max(sizes) <= PIECE_BYTES + 2, "the loop never stands still for more than a piece"
    assert len(sizes) >= len(raw) // PIECE_BYTES
    (field,) = value.values()
    assert isinstance(field, RawField)
    sent = body.encode({**value, "stream": False})
    assert json.loads(b"".join(sent)) == {**json.loads(raw), "stream": False}
    copied = [part for part in sent if not isinstance(part, memoryview)]
    assert sum(map(len, copied)) < 100, "each engine gets the client's own bytes"


names = st.text(max_size=3)
"""A name must fit into a piece."""
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(-1e9, 1e9) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(names, inner),
    max_leaves=60,
)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(names, values, max_size=6),
    st.booleans(),
    st.sampled_from([None, 1, "\t "]),
    st.integers(50, 200),
)
def test_every_object_is_read_alike_wherever_it_is_cut(
    content: dict[str, Any], ascii_only: bool, indent: int | str | None, piece_bytes: int
) -> None:
    raw = json.dumps(content, ensure_ascii=ascii_only, indent=indent)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pieces, "PIECE_BYTES", piece_bytes)
        assert decoded(raw.encode())[0] == content


@pytest.mark.parametrize("size", range(8, 24))
def test_characters_are_not_cut_and_halves_of_them_survive(size: int) -> None:
    text = "a\ud83d \ude00 \U0001f600\n\u00e9\u65e5\\u" * 5
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pieces, "PIECE_BYTES", size)
        assert decoded(json.dumps({"a": text}).encode())[0] == {"a": text}
        plain = text.replace("\ud83d", "").replace("\ude00", "")
        assert decoded(json.dumps({"a": plain}, ensure_ascii=False).encode())[0] == {"a": plain}


@settings(max_examples=500, deadline=None)
@given(st.text('[]{}",:1 a\\nu0d8', max_size=40))
def test_what_is_no_json_is_refused_wherever_it_is_cut(text: str) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pieces, "PIECE_BYTES", 12)
        try:
            found = decoded(text.encode())[0]
        except (ValueError, pieces.TooComplexError):
            return
    assert found == json.loads(text)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b'{"a":[1,2,]}', "missing"),
        (b'{"a":[1,2}', "is wanted"),
        (b'{"a":"b', "does not end"),
        (b'{"a":1} x', "trailing"),
        (b'{"a":"\\u12"}', "not a valid string"),
        (b"[1]", "is wanted"),
    ],
)
def test_it_is_said_what_is_wrong_and_where(raw: bytes, said: str) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pieces, "PIECE_BYTES", 4)
        with pytest.raises(ValueError, match=said):
            decoded(raw)


def test_what_no_engine_wants_is_refused_early() -> None:
    deep = b'{"a":' + b"[" * 40 + b'"%b"' % (b"x" * PIECE_BYTES) + b"]" * 40 + b"}"
    with pytest.raises(pieces.TooComplexError, match="nested too deeply"):
        decoded(deep)
    fields = json.dumps({str(n): n for n in range(1001)}).encode()
    with pytest.raises(pieces.TooComplexError, match="1,000 at most"):
        decoded(fields)


def test_a_large_field_that_the_router_changes_is_sent_as_it_is_then() -> None:
    """The JSON of a field must not bring back what was taken out of it."""
    extra = {"kv_transfer_params": {"remote_host": "evil"}, "kept": "x" * PIECE_BYTES}
    raw = json.dumps({"prompt": "a" * PIECE_BYTES, "vllm_xargs": extra}).encode()
    sent = json.loads(b"".join(body.encode(body.parse(raw, body.COMPLETIONS))))
    assert sent == {"prompt": "a" * PIECE_BYTES, "vllm_xargs": {"kept": extra["kept"]}}


def test_of_a_long_prompt_the_beginning_is_hashed_and_all_is_counted() -> None:
    ids = prompt_of(body.parse(IDS, body.COMPLETIONS))
    assert ids.size_bytes == 8 * MIB
    assert len(ids.data) == KEPT_BYTES
    text = prompt_of(body.parse(LARGE["a text"], body.COMPLETIONS))
    assert text.size_bytes == 32 * MIB
    assert len(text.data) == KEPT_BYTES
    image = prompt_of(body.parse(LARGE["an image"], body.CHAT))
    assert image.size_bytes < 10, "an image is not text"
