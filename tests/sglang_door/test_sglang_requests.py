# SPDX-License-Identifier: Apache-2.0
"""What the KV of a request is called."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pd_connector.errors import PDConnectorError
from pd_connector.kv.identity import token_fingerprint
from pd_connector.sglang.adapters import Adapters, loads_adapter
from pd_connector.sglang.admission import MAX_ROOM
from pd_connector.sglang.rank import PoolPages
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


class Manager:
    """SGLang's of adapters, as far as the door looks at it. It reads files by name."""

    def __init__(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.lora_refs: dict[str, Any] = {}
        self.read: dict[str, bytes] = {}
        self._meanwhile = meanwhile

    def load(self, lora_id: str, path: Path | str) -> None:
        ref = SimpleNamespace(lora_id=lora_id, lora_name="style", lora_path=str(path))
        loads_adapter(Manager._load, self, ref)

    def _load(self, ref: Any) -> None:
        self._meanwhile()
        file = Path(ref.lora_path) / "adapter_model.safetensors"
        with suppress(OSError, ValueError):
            self.read[ref.lora_id] = file.read_bytes()
        self._meanwhile()
        self.lora_refs[ref.lora_id] = ref


def adapters_of(manager: Manager) -> Adapters:
    return Adapters(SimpleNamespace(lora_manager=manager))


def loaded(**folders: Path | str) -> Adapters:
    """What a rank knows that has loaded these adapters, by SGLang's id."""
    manager = Manager()
    for lora_id, folder in folders.items():
        manager.load(lora_id, folder)
    return adapters_of(manager)


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
    with pytest.raises(PDConnectorError, match="style cannot be identified by its content"):
        loaded(x=tmp_path).name("x")
    with pytest.raises(PDConnectorError, match="not loaded"):
        Adapters(SimpleNamespace(lora_manager=None)).name("x")


@pytest.mark.parametrize("path", ["~nobody_of_this_name/style", "\0", "__tensor__", "x" * 5000])
def test_no_path_of_an_adapter_ends_the_engine(path: str) -> None:
    adapters = loaded(x=path)
    with pytest.raises(PDConnectorError, match="cannot be identified by its content"):
        adapters.name("x")


def test_an_adapter_counts_as_it_was_when_it_was_loaded(tmp_path: Path) -> None:
    """SGLang keeps it in memory, whatever becomes of its files."""
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(b"before")
    adapters = loaded(known=tmp_path, broken=tmp_path / "nowhere")
    file.write_bytes(b"after")
    before = adapters.name("known")
    assert loaded(again=tmp_path).name("again") != before
    file.write_bytes(b"before")
    assert loaded(again=tmp_path).name("again") == before
    with pytest.raises(PDConnectorError, match="cannot be identified by its content"):
        adapters.name("broken")


@pytest.mark.parametrize("back", [True, False])
def test_an_adapter_that_is_switched_while_sglang_loads_it_is_not_believed(
    tmp_path: Path, back: bool
) -> None:
    for name in ("a", "b"):
        adapter(tmp_path / name, name.encode())
    link = tmp_path / "current"
    link.symlink_to("a")
    targets = iter(["b", "a"] if back else ["b", "b"])

    def switch() -> None:
        (tmp_path / "next").symlink_to(next(targets))
        (tmp_path / "next").rename(link)

    manager = Manager(switch)
    manager.load("x", link)
    assert manager.read["x"] == b"b", "so that the test tests what it says"
    with pytest.raises(PDConnectorError, match="has changed while SGLang loaded it"):
        adapters_of(manager).name("x")


def test_an_adapter_that_did_not_come_from_files_is_not_believed() -> None:
    manager = Manager()
    manager.lora_refs["x"] = SimpleNamespace(lora_name="style", lora_path="__tensor__")
    with pytest.raises(PDConnectorError, match="not loaded from files"):
        adapters_of(manager).name("x")


def test_what_is_known_of_an_adapter_is_forgotten_with_it(tmp_path: Path) -> None:
    manager = Manager()
    adapter(tmp_path / "a", b"a")
    for number in range(20):
        manager.load(str(number), tmp_path / "a")
        del manager.lora_refs[str(number)]
    assert len(vars(manager)["_pd_connector_loaded"]) == 1


def test_pages_are_safe_after_the_step_that_sglang_computes_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A CPU has no stream for forward passes, or a stand-in for one."""

    class Stream:
        def record_event(self) -> str:
            return "event"

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    schedulers = [SimpleNamespace(forward_stream=one) for one in (Stream(), object())]
    schedulers.append(SimpleNamespace())
    found = [PoolPages(one, 16, limit=9, windows=False).forward_fence() for one in schedulers]
    assert found == ["event", None, None]
