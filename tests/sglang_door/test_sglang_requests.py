# SPDX-License-Identifier: Apache-2.0
"""What the KV of a request is called."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pd_connector.errors import PDConnectorError
from pd_connector.kv.identity import token_fingerprint
from pd_connector.sglang.adapters import Adapters
from pd_connector.sglang.admission import MAX_ROOM
from pd_connector.sglang.requests import fingerprint, transfer_of


def test_a_transfer_is_the_decimal_room() -> None:
    assert transfer_of(MAX_ROOM) == "9223372036854775807"


def req(**changes: Any) -> Any:
    known = {"origin_input_ids": [1, 2, 3], "cache_salt": None, "extra_key": None, "lora_id": None}
    return SimpleNamespace(**known | changes)


def test_tokens_and_salt_are_who_the_kv_is_and_this_process_own_ids_are_not() -> None:
    assert fingerprint(req(), [1, 2, 3], "") == token_fingerprint([1, 2, 3])
    assert fingerprint(req(extra_key="d2f1"), [1, 2, 3], "") == fingerprint(req(), [1, 2, 3], "")
    assert fingerprint(req(cache_salt="a"), [1, 2, 3], "") == token_fingerprint([1, 2, 3], salt="a")
    assert fingerprint(req(), [1, 2, 4], "") != fingerprint(req(), [1, 2, 3], "")
    assert fingerprint(req(), [1, 2, 3], "a 7f") == token_fingerprint([1, 2, 3], adapter="a 7f")


@pytest.mark.parametrize("name", ["input_embeds", "positional_embed_overrides"])
def test_a_prompt_of_embeddings_is_not_told_by_the_token_ids_that_sglang_makes_up(
    name: str,
) -> None:
    with pytest.raises(PDConnectorError, match=name):
        fingerprint(req(**{name: [[0.5]]}), [1, 2, 3], "")


def loaded(**folders: Path | str) -> Adapters:
    """What a rank knows that has these adapters loaded, by SGLang's id."""
    refs = {
        lora_id: SimpleNamespace(lora_name="style", lora_path=str(folder))
        for lora_id, folder in folders.items()
    }
    return Adapters(SimpleNamespace(lora_manager=SimpleNamespace(lora_refs=refs)))


def adapter(folder: Path, weights: bytes) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def test_an_adapter_is_its_name_and_content_wherever_it_lies(tmp_path: Path) -> None:
    here, there = adapter(tmp_path / "a", b"same"), adapter(tmp_path / "b", b"same")
    other = adapter(tmp_path / "c", b"other")
    known = loaded(x=here, y=there, z=other)
    assert known.name("x") == known.name("y") != known.name("z")
    assert known.name("x").startswith("style ")
    assert known.name(None) == ""
    (here / "adapter_model.safetensors").unlink()
    assert known.name("x") == known.name("y"), "its files are read once"


def test_an_adapter_that_cannot_be_told_by_content_ends_its_request(tmp_path: Path) -> None:
    with pytest.raises(PDConnectorError, match="style cannot be told by content"):
        loaded(x=tmp_path).name("x")
    with pytest.raises(PDConnectorError, match="not loaded"):
        Adapters(SimpleNamespace(lora_manager=None)).name("x")


@pytest.mark.parametrize("path", ["~nobody_of_this_name/style", "\0", "__tensor__", "x" * 5000])
def test_no_path_of_an_adapter_ends_the_engine(path: str) -> None:
    """It is looked at in each step."""
    adapters = loaded(x=path)
    adapters.look()
    with pytest.raises(PDConnectorError, match="cannot be told by content"):
        adapters.name("x")


def test_an_adapter_counts_as_it_was_when_it_was_loaded(tmp_path: Path) -> None:
    """SGLang keeps it in memory, whatever becomes of its files."""
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(b"before")
    adapters = loaded(known=tmp_path, broken=tmp_path / "nowhere")
    adapters.look()
    before = adapters.name("known")
    file.write_bytes(b"after")
    adapters.look()
    assert adapters.name("known") == before
    assert loaded(again=tmp_path).name("again") != before
    with pytest.raises(PDConnectorError, match="cannot be told by content"):
        adapters.name("broken")
