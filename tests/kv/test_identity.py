# SPDX-License-Identifier: Apache-2.0
"""Fingerprints tell apart what must not share KV, and nothing else."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_connector.kv.identity import FINGERPRINT_BYTES, schema2_fingerprint, token_fingerprint

_tokens = st.lists(st.integers(0, 2**31 - 1), max_size=50)
_parts = st.tuples(
    _tokens, st.text(max_size=10), st.text(max_size=10), st.lists(st.text(max_size=10), max_size=3)
)
CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 256, "rope": {"theta": 1e4}}


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


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a.safetensors").write_bytes(bytes(range(256)) * 8192)
    (folder / "b.safetensors").write_bytes(b"small")
    return folder


def test_a_model_is_the_same_wherever_it_lies(checkpoint: Path) -> None:
    before = schema2_fingerprint(CONFIG, checkpoint)
    moved = checkpoint.rename(checkpoint.parent / "elsewhere")
    config = {
        **dict(reversed(CONFIG.items())),
        "_name_or_path": str(moved),
        "transformers_version": "9.9",
    }
    assert schema2_fingerprint(config, moved) == before


def _with(change: dict[str, Any]) -> dict[str, Any]:
    return {**CONFIG, **change}


def test_every_part_of_a_model_counts(checkpoint: Path) -> None:
    fingerprints = [
        schema2_fingerprint(CONFIG, checkpoint),
        schema2_fingerprint(CONFIG, None),
        schema2_fingerprint(CONFIG, None, seed=0),
        schema2_fingerprint(CONFIG, None, seed=1),
        schema2_fingerprint(_with({"hidden_size": 512}), checkpoint),
        schema2_fingerprint(_with({"rope": {"theta": 1e6}}), checkpoint),
        schema2_fingerprint(_with({"extra": None}), checkpoint),
    ]
    assert len(set(fingerprints)) == len(fingerprints)


@pytest.mark.parametrize("place", [0, 1000, -1, -1000])
def test_weights_that_differ_at_a_sampled_place_are_another_model(
    checkpoint: Path, place: int
) -> None:
    before = schema2_fingerprint(CONFIG, checkpoint)
    file = checkpoint / "a.safetensors"
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
    assert schema2_fingerprint(CONFIG, checkpoint) != before


def test_a_change_in_a_small_file_its_name_or_its_size_counts(checkpoint: Path) -> None:
    small = checkpoint / "b.safetensors"
    seen = [schema2_fingerprint(CONFIG, checkpoint)]
    small.write_bytes(b"smalL")
    seen.append(schema2_fingerprint(CONFIG, checkpoint))
    small.write_bytes(b"small\0")
    seen.append(schema2_fingerprint(CONFIG, checkpoint))
    small.rename(checkpoint / "c.safetensors")
    seen.append(schema2_fingerprint(CONFIG, checkpoint))
    assert all(a != b for a, b in itertools.combinations(seen, 2))


def test_files_beside_the_weights_do_not_count(checkpoint: Path) -> None:
    before = schema2_fingerprint(CONFIG, checkpoint)
    (checkpoint / "README.md").write_text("words")
    (checkpoint / "pytorch_model.bin").write_bytes(b"an older copy of the weights")
    assert schema2_fingerprint(CONFIG, checkpoint) == before


def test_a_large_checkpoint_is_sampled_and_not_read(tmp_path: Path) -> None:
    with (tmp_path / "huge.safetensors").open("wb") as stream:
        stream.truncate(1 << 40)  # sparse: a terabyte of zeros
    assert len(schema2_fingerprint(CONFIG, tmp_path)) == FINGERPRINT_BYTES
