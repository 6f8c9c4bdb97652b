# SPDX-License-Identifier: Apache-2.0
"""Adapters count by content, and so do the pages that were computed with them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from support.lora_adapters import adapter, changed, load, lora, remove
from support.vllm_steps import FETCH, OFFER, PAGE, SteppedEngine
from vllm.config.lora import LoRAConfig
from vllm.lora.request import LoRARequest
from vllm.v1.core import kv_cache_utils

from pd_connector.agent.commands import Drop, Withdraw
from pd_connector.errors import Cause
from pd_connector.kv.geometry import Shard
from pd_connector.protocol.consuming.incoming import Load
from pd_connector.protocol.producing.outgoing import Offer
from pd_connector.protocol.wire.peers import Peer, Source
from pd_connector.vllm.identity import adapter_watch
from pd_connector.vllm.identity import adapters as adapters_module
from pd_connector.vllm.identity.adapters import Adapters
from pd_connector.vllm.identity.inputs import RequestIdentity, adapter_settings

CHANGED = "has changed since the adapter was loaded"


def request(folder: Path | str | None = None, *args: Any, **options: Any) -> Any:
    asked = None if folder is None else lora(folder, *args, **options)
    return SimpleNamespace(
        prompt_token_ids=[1, 2, 3], cache_salt=None, lora_request=asked, mm_features=[]
    )


def of(*arguments: Any, **options: Any) -> bytes:
    return RequestIdentity().of(request(*arguments, **options))


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Engines of other tests do not watch."""
    before = list(adapter_watch._watching)
    adapter_watch._watching.clear()
    yield
    adapter_watch._watching.clear()
    adapter_watch._watching.update(before)


@pytest.fixture
def known() -> Adapters:
    """What an engine knows that has told it of every adapter."""
    found = Adapters()
    adapter_watch.watch(found)
    return found


def test_an_adapter_is_the_same_wherever_it_lies(tmp_path: Path) -> None:
    ours, theirs = adapter(tmp_path / "a"), adapter(tmp_path / "elsewhere" / "b")
    assert of(ours) == of(theirs, number=7)
    assert of(ours) != of()


def test_an_adapter_of_the_same_name_and_other_content_is_another(tmp_path: Path) -> None:
    before = of(adapter(tmp_path / "a"))
    assert of(adapter(tmp_path / "b", scale=1.5)) != before, "one tensor of it"
    assert of(adapter(tmp_path / "c", rank=16)) != before, "its config"
    assert of(adapter(tmp_path / "d"), name="other") != before


def test_what_lies_beside_the_weights_that_are_loaded_does_not_count(tmp_path: Path) -> None:
    """vLLM reads `adapter_model.safetensors`, else `.bin`, else `.pt`."""
    folder = adapter(tmp_path / "a")
    before = of(folder)
    for name in ("adapter_model.bin", "training_args.bin", "optimizer.pt", "README.md"):
        (folder / name).write_bytes(b"older")
    assert of(folder) == before
    (folder / "adapter_model.safetensors").rename(folder / "weights.safetensors")
    by_bin = of(folder)
    (folder / "adapter_model.bin").write_bytes(b"newer")
    assert of(folder) != by_bin, "what vLLM reads now, whatever else is there"


def test_what_the_engine_does_with_an_adapter_counts(tmp_path: Path) -> None:
    """As in `--lora-target-modules`."""

    def settings(**told: Any) -> str:
        model = SimpleNamespace(dtype=torch.bfloat16)
        config: Any = SimpleNamespace(lora_config=LoRAConfig(**told), model_config=model)
        return adapter_settings(config)

    none: Any = SimpleNamespace(lora_config=None)
    assert adapter_settings(none) == ""
    plain = settings()
    assert plain == settings(lora_dtype=torch.bfloat16) == settings(max_loras=4, max_lora_rank=64)
    folder = adapter(tmp_path / "a")
    others: list[dict[str, Any]] = [
        {"target_modules": ["o_proj"]},
        {"target_modules": ["o_proj", "qkv_proj"]},
        {"lora_dtype": torch.float32},
        {"enable_tower_connector_lora": True},
    ]
    found = [
        RequestIdentity(each).of(request(folder))
        for each in (plain, *(settings(**o) for o in others))
    ]
    assert len(set(found)) == 1 + len(others)
    assert settings(target_modules=["a", "b"]) == settings(target_modules=["b", "a"])
    assert RequestIdentity(settings(**others[0])).of(request()) == of(), "of requests with one"


def test_an_adapter_whose_files_are_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no adapter's weights"):
        of(tmp_path / "nowhere")


@pytest.mark.parametrize("path", ["~nobody-has-this-name/a", "a b//c", "\0", "x" * 5000])
def test_no_path_of_an_adapter_ends_the_engine(path: str, known: Adapters) -> None:
    load(lora(path))
    with pytest.raises(OSError, match=r"."):
        known.name(request(path))


def test_an_adapter_whose_files_have_changed_is_not_believed(
    tmp_path: Path, known: Adapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM reads an adapter again that it had no room for: it may have either content."""
    folder = adapter(tmp_path / "a")
    before = known.name(request(folder))
    changed(folder, scale=2.0)
    read: list[Path] = []
    fingerprint = adapters_module.adapter_fingerprint
    monkeypatch.setattr(
        adapters_module,
        "adapter_fingerprint",
        lambda path: (read.append(path), fingerprint(path))[1],
    )
    for _ in range(3):
        with pytest.raises(OSError, match=CHANGED):
            known.name(request(folder))
    assert read == [folder], "once, not for every request"
    load(lora(folder))
    with pytest.raises(OSError, match=CHANGED):
        known.name(request(folder)), "vLLM has it already, and reads nothing"
    load(lora(folder, 2))
    assert known.name(request(folder, 2)) != before, "loaded again, as another"


def test_an_adapter_that_was_changed_in_place_is_not_believed(
    tmp_path: Path, known: Adapters
) -> None:
    folder = adapter(tmp_path / "a")
    known.name(request(folder))
    file = folder / "adapter_model.safetensors"
    before, content = file.stat(), bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(OSError, match=CHANGED):
        known.name(request(folder))


def test_weights_of_another_kind_that_vllm_would_read_are_a_change(
    tmp_path: Path, known: Adapters
) -> None:
    folder = adapter(tmp_path / "a")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    known.name(request(folder))
    adapter(folder, scale=2.0)  # beside it, and read first
    with pytest.raises(OSError, match=CHANGED):
        known.name(request(folder))


def test_an_adapter_whose_files_are_gone_or_were_only_touched_is_what_it_was(
    tmp_path: Path, known: Adapters
) -> None:
    folder = adapter(tmp_path / "a")
    first = request(folder)
    before, pages = known.name(first), known.pages(first)
    for file in folder.iterdir():
        file.touch()
        file.chmod(0o600)
    assert known.name(request(folder)) == before
    assert known.pages(request(folder)) != pages, "they may have been others in between"
    assert not known.unchanged(first), "while it ran"
    shutil.rmtree(folder)
    assert known.name(request(folder)) == before


def test_an_adapter_counts_as_it_was_when_vllm_was_told_to_load_it(
    tmp_path: Path, known: Adapters
) -> None:
    """Between that and the first request its files may be replaced."""
    folder, others = adapter(tmp_path / "a"), Adapters()
    adapter_watch.watch(others)
    loaded: list[int] = []
    load(lora(folder), lambda: loaded.append(1))
    assert loaded == [1], "once, however many watch"
    changed(folder, scale=2.0)
    for each in (known, others):
        with pytest.raises(OSError, match=CHANGED):
            each.name(request(folder))


def test_an_adapter_that_changes_while_it_is_loaded_is_not_believed(
    tmp_path: Path, known: Adapters
) -> None:
    folder = adapter(tmp_path / "a")
    load(lora(folder), lambda: changed(folder, 2.0))
    with pytest.raises(OSError, match="has changed during its load"):
        known.name(request(folder))


def test_an_adapter_that_cannot_be_read_when_it_is_loaded_is_not_believed_later(
    tmp_path: Path, known: Adapters
) -> None:
    """What lies there later is not what vLLM has."""
    folder = adapter(tmp_path / "a")
    load(lora(folder), lambda: shutil.rmtree(folder))
    adapter(folder, 2.0)
    with pytest.raises(OSError, match="no adapter's weights"):
        known.name(request(folder))


def test_an_adapter_that_vllm_cannot_load_is_no_adapter(tmp_path: Path, known: Adapters) -> None:
    folder = adapter(tmp_path / "a")

    def fail() -> None:
        raise ValueError("rank 8 is greater than max_lora_rank 4")

    with pytest.raises(ValueError, match="max_lora_rank"):
        load(lora(folder), fail)
    assert not known._loaded


def test_two_adapters_of_one_number_are_not_believed(tmp_path: Path, known: Adapters) -> None:
    """vLLM goes on with the first, and, after it had no room for it, with whichever it reads then."""
    first, second = adapter(tmp_path / "a"), adapter(tmp_path / "b", 2.0)
    name = known.name(request(first))
    for each in (second, first):
        with pytest.raises(OSError, match="needs a number of its own"):
            known.name(request(each))
    load(lora(first, load_inplace=True))
    before = request(first)
    assert known.name(before) == name
    with pytest.raises(OSError, match="needs a number of its own"):
        known.name(request(second))
    assert not known.unchanged(before)


def test_an_adapter_that_has_got_the_number_of_a_removed_one_is_another(
    tmp_path: Path, known: Adapters
) -> None:
    first, second = adapter(tmp_path / "a"), adapter(tmp_path / "b", 2.0)
    load(lora(first))
    before = request(first)
    name, pages = known.name(before), known.pages(before)
    remove(1)
    load(lora(second))
    assert not known.unchanged(before), "it goes on with the second"
    known.finished(before)
    assert known.name(request(second)) != name
    remove(1)
    load(lora(first))
    again = request(first)
    assert known.name(again) == name
    assert known.pages(again) != pages, "some were computed with the second"


def test_an_adapter_whose_replacement_could_not_be_loaded_is_not_believed(
    tmp_path: Path, known: Adapters
) -> None:
    """One rank may have loaded it, before another one could not."""
    first, second = adapter(tmp_path / "a"), adapter(tmp_path / "b", 2.0)
    load(lora(first))
    before = request(first)
    known.name(before)

    def fail() -> None:
        raise ValueError("no such file")

    with pytest.raises(ValueError, match="no such file"):
        load(lora(second, load_inplace=True), fail)
    assert not known.unchanged(before)
    with pytest.raises(OSError, match="has failed; load it again"):
        known.name(request(first))
    load(lora(first, load_inplace=True))
    assert known.name(request(first)) == known.name(before)


def test_while_requests_of_a_replaced_adapter_run_the_one_in_its_place_is_not_believed(
    tmp_path: Path, known: Adapters
) -> None:
    """vLLM reads an adapter that was loaded in place for each step: of one of the requests, for all of that number."""
    first = lora(adapter(tmp_path / "a"), load_inplace=True)
    second = lora(adapter(tmp_path / "b", 2.0), load_inplace=True)

    def of(asked: LoRARequest) -> Any:
        return request(asked.lora_path, load_inplace=True)

    load(first)
    old = of(first)
    known.name(old)
    load(second)
    mixed = [of(second), of(second)]
    for each in mixed:
        with pytest.raises(OSError, match="replaces still run"):
            known.name(each)
        assert not known.unchanged(each)
    known.finished(old)
    for each in mixed:
        known.finished(each)
    alone = of(second)
    assert known.name(alone)
    assert known.unchanged(alone)
    assert len({known.pages(each) for each in (old, *mixed, alone)}) == 4
    late = of(first)  # its client asked before the replacement
    with pytest.raises(OSError, match="replaces still run"):
        known.name(late)
    assert not known.unchanged(alone)


def repository(hub: Path, commit: str, scale: float) -> None:
    """`org/sql` in Hugging Face's cache, with its branch at this commit."""
    root = hub / "models--org--sql"
    adapter(root / "snapshots" / commit, scale)
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / "main").write_text(commit)


def test_a_repository_whose_branch_moves_on_is_what_vllm_has_downloaded(
    tmp_path: Path, known: Adapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies in another folder then, and nothing in the first has changed."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    load(lora("org/sql"), lambda: repository(tmp_path, "a" * 40, 1.0))
    first = known.name(request("org/sql"))
    load(lora("org/sql", 2), lambda: repository(tmp_path, "b" * 40, 2.0))
    second = known.name(request("org/sql", 2))
    assert second != first, "not what lay there before vLLM asked for it"
    with pytest.raises(OSError, match=CHANGED):
        known.name(request("org/sql", 1)), "vLLM would read the new one"
    shutil.rmtree(tmp_path / "models--org--sql")
    with pytest.raises(OSError, match=CHANGED):
        known.name(request("org/sql", 2)), "vLLM would download whatever is there now"


class Engine(SteppedEngine):
    """An engine with adapters, of which vLLM's own scheduler has the prefix cache."""

    def __init__(self, **extra: Any) -> None:
        super().__init__(adapters=True, **{"overlap": "off", **extra})
        self.side.set_peers((Peer(Source("127.0.0.1", 7, "e"), Shard(0, 2, 0, 1)),))

    def ask(self, name: str, asked: LoRARequest | None, **kv: Any) -> int:
        """A prompt of 60 tokens; returns how many of them were found in the prefix cache."""
        self.commands.clear()
        request = self.add(name, 60, 1, lora=asked, **kv)
        cached = self.scheduler.kv_cache_manager.get_computed_blocks(request)[1]
        for _ in range(6):
            self.step()
        if name in self.scheduler.requests:
            self.step(finished_sending={name})
        return int(cached)

    def told(self, kind: type) -> list[Any]:
        return [command for command in self.commands if isinstance(command, kind)]


def test_pages_of_an_adapter_are_not_found_by_another_that_is_loaded_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As documented: unloaded, and loaded under its name. vLLM itself would find them."""
    folder, engine = adapter(tmp_path / "a"), Engine()
    load(lora(folder))
    assert engine.ask("a", lora(folder)) == 0
    assert engine.ask("b", lora(folder), **OFFER) == 3 * PAGE, "while it is the same"
    (before,) = engine.told(Offer)
    changed(folder, 2.0)
    load(lora(folder, 2))
    assert engine.ask("c", lora(folder, 2), **OFFER) == 0
    (after,) = engine.told(Offer)
    assert after.identity != before.identity
    assert engine.ask("d", lora(folder, 2)) == 3 * PAGE
    assert engine.ask("e", None) == 0
    assert engine.ask("f", None) == 3 * PAGE

    monkeypatch.setattr(
        kv_cache_utils, adapter_watch._KEYS, kv_cache_utils._gen_lora_extra_hash_keys.__wrapped__
    )
    assert engine.ask("g", lora(folder, 2)) == 0
    changed(folder, 3.0)
    load(lora(folder, 3))
    assert engine.ask("h", lora(folder, 3), **OFFER) == 3 * PAGE, "pages of the one before"


def test_the_same_adapter_loaded_again_finds_its_pages(tmp_path: Path) -> None:
    folder, engine = adapter(tmp_path / "a"), Engine()
    load(lora(folder))
    engine.ask("a", lora(folder))
    load(lora(folder, 2))
    assert engine.ask("b", lora(folder, 2)) == 3 * PAGE


def test_pages_that_may_be_of_either_content_are_not_found(tmp_path: Path) -> None:
    """A request may have run while the files were others, though they are what they were."""
    folder, engine = adapter(tmp_path / "a"), Engine()
    load(lora(folder))
    engine.ask("a", lora(folder))
    changed(folder, 2.0)
    load(lora(folder, 2))
    changed(folder, 1.0)
    load(lora(folder, 3))
    assert engine.ask("b", lora(folder, 3)) == 0
    assert engine.ask("c", lora(folder, 3)) == 3 * PAGE


def test_an_adapter_that_is_replaced_in_place_leaves_its_pages_behind(tmp_path: Path) -> None:
    """vLLM keeps the number, and reads the files for every step from then on."""
    folder, engine = adapter(tmp_path / "a"), Engine()
    load(lora(folder))
    engine.ask("a", lora(folder), **OFFER)
    (before,) = engine.told(Offer)
    elsewhere = adapter(tmp_path / "b", 2.0)
    replaced = lora(elsewhere, load_inplace=True)
    load(replaced)
    assert engine.ask("b", replaced, **OFFER) == 0
    (after,) = engine.told(Offer)
    assert after.identity != before.identity
    changed(elsewhere, 3.0)
    assert engine.ask("c", replaced, **OFFER) == 0
    assert engine.told(Offer)[0].identity not in (before.identity, after.identity)


@pytest.mark.parametrize("how", ["files", "in place"])
def test_what_is_computed_while_its_adapter_changes_is_not_offered(
    tmp_path: Path, how: str
) -> None:
    folder, engine = adapter(tmp_path / "a"), Engine(budget=32)
    load(lora(folder))
    engine.add("a", 100, 1, lora=lora(folder), **OFFER)
    engine.step()
    if how == "files":
        changed(folder, 2.0)
    else:
        load(lora(adapter(tmp_path / "b", 2.0), load_inplace=True))
    for _ in range(6):
        engine.step()
    assert not engine.told(Offer)
    assert len(engine.told(Withdraw)) == 1


def test_what_streams_may_still_be_withdrawn_as_long_as_its_adapter_may_change(
    tmp_path: Path,
) -> None:
    """Its consumer is told so, and waits for the end."""
    folder, engine = adapter(tmp_path / "a"), Engine(budget=32, overlap="step")
    load(lora(folder))
    engine.add("a", 100, 1, lora=lora(folder), **OFFER)
    for _ in range(3):
        engine.step()
    load(lora(adapter(tmp_path / "b", 2.0), load_inplace=True))
    for _ in range(3):
        engine.step()
    assert [(offer.final, offer.provisional) for offer in engine.told(Offer)] == [(False, True)] * 4
    assert len(engine.told(Withdraw)) == 1
    engine.ask("plain", None, **OFFER)
    assert {offer.provisional for offer in engine.told(Offer)} == {False}


def test_what_is_computed_beside_requests_of_the_replaced_adapter_is_not_offered(
    tmp_path: Path,
) -> None:
    """It may be computed with the replaced one, and ends before that one's request does."""
    engine, other = Engine(budget=32), lora(adapter(tmp_path / "b", 2.0), load_inplace=True)
    first = lora(adapter(tmp_path / "a"), load_inplace=True)
    load(first)
    engine.add("a", 60, 20, lora=first)
    engine.step()
    load(other)
    assert engine.ask("b", other, **OFFER) == 0
    assert not engine.told(Offer)
    assert "a" in engine.scheduler.requests
    for _ in range(20):
        engine.step()
    assert engine.ask("c", other, **OFFER) == 0, "pages of either adapter"
    assert engine.told(Offer)
    assert engine.ask("d", other, **OFFER) == 3 * PAGE


def test_what_is_computed_here_while_its_adapter_changes_is_not_compared(tmp_path: Path) -> None:
    """It would differ, and its producer would be distrusted for nothing."""
    folder = adapter(tmp_path / "a")
    for change in (False, True):
        engine = Engine(budget=32)
        load(lora(folder))
        engine.add("a", 100, 8, lora=lora(folder), **FETCH, remote_request_id="t")
        engine.step()
        if change:
            changed(folder, 2.0)
        for _ in range(6):
            engine.step()
        assert len(engine.told(Load)) == (not change)
        assert [drop.cause for drop in engine.told(Drop)] == [Cause.MODEL] * change


def test_a_request_keeps_the_pages_that_it_began_with(tmp_path: Path) -> None:
    """A hash is of all pages before it: they all have to be of one content, or none is found."""
    folder, engine = adapter(tmp_path / "a"), Engine()
    load(lora(folder))
    found = engine.add("a", 40, 40, lora=lora(folder))
    changed(folder, 2.0)
    for _ in range(50):
        engine.step()
    again = engine.add("b", 40, 1, lora=lora(folder))
    again.append_output_token_ids([1] * 40)
    assert len(found.block_hashes) >= 4
    assert not set(found.block_hashes) & set(again.block_hashes)


def test_with_a_vllm_that_keys_pages_otherwise_no_adapter_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(kv_cache_utils, adapter_watch._KEYS)
    found = Adapters()
    adapter_watch.watch(found)
    with pytest.raises(OSError, match="cannot key pages by an adapter's content"):
        found.name(request(adapter(tmp_path / "a")))
    assert found.name(request()) == ""


def switch(link: Path, to: Path) -> None:
    (link.parent / "next").symlink_to(to)
    (link.parent / "next").rename(link)


def test_a_link_that_is_switched_and_switched_back_during_a_load_is_seen(
    tmp_path: Path, known: Adapters
) -> None:
    one, other = adapter(tmp_path / "one"), adapter(tmp_path / "other", scale=1.5)
    link = tmp_path / "current"
    link.symlink_to(one)

    def meanwhile() -> None:
        switch(link, other)
        switch(link, one)

    asked = request(link)
    load(asked.lora_request, meanwhile)
    with pytest.raises(OSError, match="has changed during its load"):
        known.name(asked)


def test_a_link_that_is_switched_and_switched_back_while_a_request_runs_is_seen(
    tmp_path: Path, known: Adapters
) -> None:
    """vLLM may have reread the other adapter for it."""
    one, other = adapter(tmp_path / "one"), adapter(tmp_path / "other", scale=1.5)
    link = tmp_path / "current"
    link.symlink_to(one)
    asked = request(link)
    load(asked.lora_request)
    before = known.name(asked)
    assert known.unchanged(asked)
    switch(link, other)
    switch(link, one)
    assert not known.unchanged(asked)
    assert known.name(request(link)) == before, "later requests have it"
