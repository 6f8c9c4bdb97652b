# SPDX-License-Identifier: Apache-2.0
"""Weights that change while SGLang serves are noticed before a step offers KV of the new ones."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pd_connector.agent import weights_watch
from pd_connector.agent.advertised_model import DraftFiles
from pd_connector.agent.commands import ChangeModel, KnowWeights
from pd_connector.kv.checkpoint_files import CheckpointFiles
from pd_connector.kv.model import ModelFacts, draft_problem, model_problem
from pd_connector.memory.parameters import loaded_fingerprint
from pd_connector.pool.keys import model_root
from pd_connector.sglang.model import LOADS
from pd_connector.sglang.weights import SGLangWeights
from pd_connector.tools.demo import MODEL_DIR

Make = Callable[[torch.nn.Module], tuple[SGLangWeights, list[Any]]]


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(8, 8)


def watch(served: torch.nn.Module) -> tuple[SGLangWeights, list[Any]]:
    """A watch, and what it submits."""
    submitted: list[Any] = []
    loaded = loaded_fingerprint(served)
    facts = ModelFacts(b"c", b"disk", held="all")
    return SGLangWeights(scheduler(served), facts, loaded, None, submitted.append), submitted


def scheduler(served: torch.nn.Module, path: Path = Path("/nowhere")) -> Any:
    """SGLang's. Its runner has a config of its own."""
    config, runners = (SimpleNamespace(model_path=str(path), revision=None) for _ in range(2))
    args = SimpleNamespace(load_format="auto")
    runner = SimpleNamespace(
        model=served,
        model_config=runners,
        load_config=SimpleNamespace(load_format="auto"),
        server_args=args,
    )
    return SimpleNamespace(
        server_args=args,
        model_config=config,
        tp_worker=SimpleNamespace(model_runner=runner),
    )


def tuned(folder: Path) -> Path:
    """The demo model with other weights."""
    other = folder / "tuned"
    shutil.copytree(MODEL_DIR, other)
    with (other / "model.safetensors").open("r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(bytes(64))
    return other


def update(served: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in served.parameters():
            parameter.mul_(1.5)


def test_a_flush_that_changed_nothing_changes_nothing() -> None:
    watched, submitted = watch(model())
    watched.flushed(done=True)
    watched.step()
    assert submitted == []


def test_weights_are_looked_at_in_the_first_step_after_a_flush() -> None:
    served = model()
    watched, submitted = watch(served)
    update(served)
    watched.step()
    assert submitted == [], "nothing says that they have changed"
    watched.flushed(done=True)
    watched.step()
    watched.flushed(done=True)
    watched.step()
    _, changed = submitted
    assert isinstance(changed, ChangeModel)
    assert changed.facts.updates == 1
    untouched = watch(model())[0]._advertised.facts
    assert "weights have changed" in model_problem(changed.facts, untouched)
    assert model_problem(changed.facts, changed.facts) == "", "updated alike on both sides"


def test_weights_are_looked_at_now_and_then_without_a_flush(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served, now = model(), 1000.0
    monkeypatch.setattr(weights_watch, "time", SimpleNamespace(monotonic=lambda: now))
    watched, submitted = watch(served)
    update(served)
    watched.step()
    assert submitted == []
    now += weights_watch.COMPARE_S
    watched.step()
    (withdrawn,) = submitted
    assert model_problem(withdrawn.facts, withdrawn.facts), "the cache has KV of the old ones"
    watched.flushed(done=False)
    watched.step()
    assert len(submitted) == 1
    watched.flushed(done=True)
    watched.step()
    assert model_problem(submitted[-1].facts, submitted[-1].facts) == ""


def test_an_update_is_told_when_it_begins_and_again_when_the_cache_was_flushed() -> None:
    served = model()
    watched, submitted = watch(served)
    with watched.change():
        (withdrawn,) = submitted
        assert model_problem(withdrawn.facts, withdrawn.facts)
        update(served)
    watched.step()
    assert len(submitted) == 1, "SGLang was told not to flush"
    with watched.change():
        update(served)
        watched.flushed(done=True)
    watched.step()
    assert submitted[-1].facts.loaded
    assert model_problem(submitted[-1].facts, submitted[-1].facts) == ""


def test_an_update_of_several_parts_is_told_when_it_ends() -> None:
    served = model()
    watched, submitted = watch(served)
    with watched.change(begins=True):
        pass
    with watched.change():
        update(served)
        watched.flushed(done=True)
    watched.step()
    assert len(submitted) == 1
    with watched.change(ends=True):
        watched.flushed(done=True)
    watched.step()
    assert len(submitted) == 2


def test_an_engine_waits_at_its_start_until_its_weights_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its decode engines compute no prompt, so a request that comes earlier would fail."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    submitted: list[Any] = []
    served, files = model(), CheckpointFiles.open(MODEL_DIR)
    facts = ModelFacts(b"c", held="all", reading=True)
    watched = SGLangWeights(
        scheduler(served), facts, loaded_fingerprint(served), files, submitted.append
    )
    assert isinstance(submitted[-1], KnowWeights)
    assert watched.facts.weights == submitted[-1].weights


def test_weights_of_another_folder_are_known_by_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`update_weights_from_disk` gives the new path to the config of SGLang's runner, not to that of its scheduler."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    other = tuned(tmp_path)
    served, files = model(), CheckpointFiles.open(MODEL_DIR)
    facts = ModelFacts(b"c", held="all", reading=True)
    engine = scheduler(served, MODEL_DIR)
    watched = SGLangWeights(engine, facts, loaded_fingerprint(served), files, lambda command: None)
    before = watched.facts
    assert model_root(before)
    with watched.change(whole=True):
        LOADS.begin((str(other), None), CheckpointFiles.open(other))
        engine.tp_worker.model_runner.model_config.model_path = str(other)
        update(served)
        watched.flushed(done=True)
    watched.step()
    assert model_root(watched.facts), "the pool is used on"
    assert watched.facts.weights != before.weights


def test_a_draft_model_is_known_by_its_files_again_after_an_update_from_disk_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang updates both models from one path."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    other = tuned(tmp_path)
    served, files = model(), CheckpointFiles.open(MODEL_DIR)
    assert files is not None
    engine, found = scheduler(served, MODEL_DIR), [DraftFiles(b"draft", (files,))]
    facts = ModelFacts(b"c", held="all", reading=True)
    watched = SGLangWeights(
        engine,
        facts,
        loaded_fingerprint(served),
        files,
        lambda command: None,
        draft=found[0],
        drafts=lambda: found[-1],
    )
    before = watched.facts.draft
    assert before
    with watched.change(whole=True):
        for _ in range(2):  # of either model
            LOADS.begin((str(other), None), CheckpointFiles.open(other))
        engine.tp_worker.model_runner.model_config.model_path = str(other)
        found.append(DraftFiles(b"draft", (LOADS.files[str(other), None],)))
        update(served)
        watched.flushed(done=True)
    watched.step()
    after = watched.facts
    assert after.draft not in (b"", before)
    with watched.change():  # by tensors, of either model
        watched.flushed(done=True)
    watched.step()
    assert not watched.facts.draft
    assert draft_problem(after, watched.facts)


def test_files_that_are_not_those_that_were_loaded_are_told_by_memory_at_the_start() -> None:
    submitted: list[Any] = []
    served, files = model(), CheckpointFiles.open(MODEL_DIR)
    assert files is not None
    files.problem = "it was replaced by another file"
    facts = ModelFacts(b"c", held="all", reading=True)
    SGLangWeights(scheduler(served), facts, loaded_fingerprint(served), files, submitted.append)
    assert submitted[-1].facts.loaded
    assert not submitted[-1].facts.reading


def test_sglangs_watchdog_does_not_end_an_engine_that_waits_for_its_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    created = pytest.importorskip(
        "sglang.srt.managers.scheduler_components.invariant_checker"
    ).create_scheduler_watchdog
    watched, _ = watch(model())
    engine = watched._scheduler
    engine.is_initializing, engine.forward_ct = True, 0
    engine.watchdog = created(engine, watchdog_timeout=60.0)

    def counts() -> bool:
        first = engine.watchdog.get_counter()
        return bool(engine.watchdog.get_counter() != first)

    meanwhile: list[bool] = []
    monkeypatch.setattr(watched._advertised, "wait", lambda: meanwhile.append(counts()))
    assert not counts(), "it would end the engine"
    watched._wait()
    assert meanwhile == [True]
    assert not counts(), "it watches again"
