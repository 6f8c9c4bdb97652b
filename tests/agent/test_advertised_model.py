# SPDX-License-Identifier: Apache-2.0
"""What is told of a model is true from the start, through changes of its weights, to the end."""

import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from kv.test_weights import save, tensors

from pd_connector.agent import advertised_model
from pd_connector.agent.advertised_model import AdvertisedModel
from pd_connector.agent.commands import ChangeModel, KnowWeights
from pd_connector.kv.checkpoint_files import CheckpointFiles
from pd_connector.kv.model import ModelFacts, model_problem
from pd_connector.kv.weights import read_weights


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(tmp_path / "model", tensors())


def opened(path: Path) -> CheckpointFiles:
    found = CheckpointFiles.open(path)
    assert found is not None
    found.loaded()
    return found


class Engine:
    """An engine that has loaded a checkpoint, and what its agent was told."""

    def __init__(self, path: Path) -> None:
        self.files = [opened(path)]
        found = read_weights(self.files)
        self.at_start = ModelFacts(b"c", found.sampled, loaded=b"memory")
        self.commands: list[Any] = []
        self.told = AdvertisedModel(self.at_start, self.files, self.commands.append)

    def wait(self) -> "Engine":
        """Until all bytes were read."""
        reader = self.told._reader
        assert reader is None or reader.join(30)
        return self

    @property
    def facts(self) -> ModelFacts:
        """As the agent has them."""
        facts = self.at_start
        for command in self.commands:
            if isinstance(command, ChangeModel):
                facts = command.facts
            elif isinstance(command, KnowWeights):
                facts = _with(facts, weights_full=command.full)
        return facts


def _with(facts: ModelFacts, **changes: Any) -> ModelFacts:
    return msgspec.structs.replace(facts, **changes)


def one_row(tmp_path: Path) -> Path:
    """A checkpoint of which one row of one table differs, beside the other; samples are the same."""
    made = {**tensors(), "embed": np.zeros((40_000, 64), np.float32)}
    save(tmp_path / "model", made)
    made["embed"][10] += 1
    return save(tmp_path / "other", made)


def test_one_row_is_seen_when_all_bytes_were_read(checkpoint: Path, tmp_path: Path) -> None:
    other = one_row(tmp_path)
    ours, same, theirs = Engine(checkpoint), Engine(checkpoint), Engine(other)
    before = [engine.told.facts for engine in (ours, theirs)]
    assert model_problem(*before) == "", "samples let it pass"
    for engine in (ours, same, theirs):
        engine.wait()
    assert model_problem(ours.facts, same.facts) == ""
    assert "of all bytes" in model_problem(ours.facts, theirs.facts)


def test_files_are_read_through_what_was_opened(checkpoint: Path, tmp_path: Path) -> None:
    engine = Engine(checkpoint)
    checkpoint.rename(tmp_path / "away")
    assert engine.wait().facts.weights_full


def test_of_files_that_were_written_to_all_bytes_are_not_told(checkpoint: Path) -> None:
    files = opened(checkpoint)
    facts = ModelFacts(b"c", read_weights([files]).sampled)
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes())
    commands: list[Any] = []
    told = AdvertisedModel(facts, [files], commands.append)
    assert told._reader is not None
    assert told._reader.join(30)
    assert commands == []


def test_nothing_is_known_of_weights_that_change(checkpoint: Path) -> None:
    engine, other = Engine(checkpoint).wait(), Engine(checkpoint).wait()
    engine.told.withdraw()
    engine.told.withdraw()
    assert engine.told.changes == 1
    assert "have changed" in model_problem(engine.facts, other.facts)
    assert model_problem(engine.facts, engine.facts), "nor of another that changes"
    engine.told.tell_memory(loaded=b"new", loaded_full=b"new")
    assert model_problem(engine.facts, engine.facts) == ""
    assert model_problem(engine.facts, other.facts)
    assert "changed" in model_problem(engine.facts, _with(engine.facts, loaded_full=b"row"))


def test_weights_that_were_all_loaded_from_files_are_those_files(
    checkpoint: Path, tmp_path: Path
) -> None:
    other = one_row(tmp_path)
    reloaded, fresh, old = (
        Engine(checkpoint).wait(),
        Engine(other).wait(),
        Engine(checkpoint).wait(),
    )
    reloaded.told.withdraw()
    assert reloaded.told.tell_files([opened(other)], loaded=b"new")
    reloaded.wait()
    assert model_problem(reloaded.facts, fresh.facts) == ""
    assert "of all bytes" in model_problem(reloaded.facts, old.facts)


def test_files_of_some_of_the_weights_say_nothing_of_the_others(
    checkpoint: Path, tmp_path: Path
) -> None:
    engine = Engine(checkpoint).wait()
    engine.told.withdraw()
    some = tensors()
    del some["layers.3.norm"]
    part = opened(save(tmp_path / "part", some))
    assert not engine.told.tell_files([part], loaded=b"")
    assert not engine.told.tell_files(engine.files, loaded=b"")
    assert engine.told.withdrawn


def test_what_was_read_of_weights_of_before_is_not_told(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = advertised_model.full_fingerprint
    told: list[AdvertisedModel] = []

    def late(*args: Any) -> bytes:
        while not told:  # the engine goes on meanwhile
            pass
        told[0].withdraw()
        return full(*args)

    monkeypatch.setattr(advertised_model, "full_fingerprint", late)
    engine = Engine(checkpoint)
    told.append(engine.told)
    engine.wait()
    assert [type(command) for command in engine.commands] == [ChangeModel]


def test_weights_are_read_by_a_thread_of_the_engines_own_priority(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a lower one it would keep Python's lock while it waits for a processor: the agent of a busy machine was
    silent for seconds, and its sessions were lost."""
    full = advertised_model.full_fingerprint
    found: list[int] = []

    def noting(*args: Any) -> bytes:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return full(*args)

    monkeypatch.setattr(advertised_model, "full_fingerprint", noting)
    Engine(checkpoint).wait()
    assert found == [os.getpriority(os.PRIO_PROCESS, 0)]


def test_weights_that_change_a_second_time_are_withdrawn_again(checkpoint: Path) -> None:
    engine = Engine(checkpoint).wait()
    for version in ("1", "2"):
        engine.told.withdraw()
        assert "changed" in model_problem(engine.facts, engine.facts), "withdrawn"
        engine.told.tell_memory(loaded=version.encode(), loaded_full=b"all", version=version)
        assert model_problem(engine.facts, engine.facts) == ""
        assert engine.told.facts_now() == engine.facts, "what an agent that starts now tells"
    assert engine.told.changes == 2
