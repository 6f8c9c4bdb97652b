# SPDX-License-Identifier: Apache-2.0
"""What is told of a model is true from the start, through changes of its weights, to the end."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from kv.test_weights import save, tensors
from support.waits import until

from pd_connector.agent import weights_program, weights_reader
from pd_connector.agent.advertised_model import AdvertisedModel, DraftFiles
from pd_connector.agent.commands import ChangeModel, KnowWeights, ReadWeights
from pd_connector.kv.checkpoint_files import CheckpointFiles
from pd_connector.kv.model import (
    ModelFacts,
    draft_problem,
    knowing,
    model_problem,
    unread_problem,
)


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

    def __init__(self, path: Path, **changes: Any) -> None:
        self.files = [opened(path)]
        self.at_start = ModelFacts(b"c", reading=True)
        self.commands: list[Any] = []
        self.told = AdvertisedModel(self.at_start, self.files, self.commands.append, **changes)

    def wait(self) -> "Engine":
        """Until all bytes were read."""
        reading = self.told._reading
        assert reading is None or reading.join(100), (
            "the program has a low priority, and ends on a busy machine, too"
        )
        return self

    @property
    def facts(self) -> ModelFacts:
        """As the agent has them."""
        facts = self.at_start
        for command in self.commands:
            if isinstance(command, ChangeModel):
                facts = command.facts
            elif isinstance(command, KnowWeights):
                facts = knowing(facts, command.weights, command.draft)
        return facts

    @property
    def kinds(self) -> list[type]:
        """Kinds of the commands, without those that tell how far reading is."""
        return [type(one) for one in self.commands if not isinstance(one, ReadWeights)]


def _with(facts: ModelFacts, **changes: Any) -> ModelFacts:
    return msgspec.structs.replace(facts, **changes)


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Readers tell nothing before the event is set."""
    goes_on = threading.Event()
    lines = weights_reader.WeightsReader._lines

    def late(reader: Any, cache: Any) -> Iterator[list[str]]:
        assert goes_on.wait(100)
        yield from lines(reader, cache)

    with monkeypatch.context() as patched:
        patched.setattr(weights_reader.WeightsReader, "_lines", late)
        yield goes_on
        goes_on.set()


def one_row(tmp_path: Path) -> Path:
    """A checkpoint of which one row of one table differs, beside the other."""
    made = {**tensors(), "embed": np.zeros((40_000, 64), np.float32)}
    save(tmp_path / "model", made)
    made["embed"][10] += 1
    return save(tmp_path / "other", made)


def test_nothing_is_told_before_all_bytes_were_read_and_then_one_row_that_differs(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = one_row(tmp_path)
    with held(monkeypatch) as goes_on:
        ours, same, theirs = Engine(checkpoint), Engine(checkpoint), Engine(other)
        for engine in (same, theirs):
            assert engine.kinds == []
            assert "has not read" in unread_problem(ours.facts, engine.facts)
        goes_on.set()
        for engine in (ours, same, theirs):
            engine.wait()
    assert unread_problem(ours.facts, theirs.facts) == ""
    assert model_problem(ours.facts, same.facts) == ""
    assert "of all bytes" in model_problem(ours.facts, theirs.facts)


def test_what_was_read_once_is_known_at_once(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Engine(checkpoint).wait()
    monkeypatch.setattr(weights_reader.subprocess, "Popen", lambda *_, **__: pytest.fail("read"))
    engine = Engine(checkpoint)
    assert engine.facts.weights, "before anything else is done"
    assert not engine.told.reads


def test_how_far_reading_is_is_told(checkpoint: Path) -> None:
    engine = Engine(checkpoint).wait()
    told = [one for one in engine.commands if isinstance(one, ReadWeights)]
    nbytes = (checkpoint / "model.safetensors").stat().st_size
    assert told[0] == ReadWeights(0, nbytes)
    assert told[-1] == ReadWeights(nbytes, nbytes)
    assert told == sorted(told)


def test_files_are_read_through_what_was_opened(checkpoint: Path, tmp_path: Path) -> None:
    engine = Engine(checkpoint)
    checkpoint.rename(tmp_path / "away")
    assert engine.wait().facts.weights


def rewritten(checkpoint: Path) -> Engine:
    """An engine whose files were written to before they were read."""
    files = opened(checkpoint)
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes())
    engine = Engine(checkpoint)
    engine.told.close()
    engine.commands.clear()
    engine.told = AdvertisedModel(engine.at_start, [files], engine.commands.append)
    return engine.wait()


def test_files_that_were_written_to_are_not_told_but_what_is_in_memory(checkpoint: Path) -> None:
    engine = rewritten(checkpoint)
    assert engine.kinds == []
    assert engine.told.unreadable
    assert engine.commands[-1] == ReadWeights(0, 0), "nothing is read any more"
    engine.told.tell_memory(loaded=b"memory")
    assert not engine.told.unreadable
    assert engine.facts == ModelFacts(b"c", loaded=b"memory")


def test_a_program_that_fails_is_told_and_nothing_is_known(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weights_reader, "_PROGRAM", "import sys; sys.exit('ill')")
    engine = Engine(checkpoint).wait()
    assert engine.told.unreadable
    assert engine.kinds == []
    assert "the weights are not known by their files" in caplog.text


def test_a_program_that_is_killed_once_runs_again(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for memory that is short while the engine starts."""
    program = (
        "import os, pathlib, signal; mark = pathlib.Path({!r}); once = not mark.exists(); mark.touch(); "
        "once and os.kill(os.getpid(), signal.SIGKILL); "
    ).format(str(tmp_path / "ran"))
    monkeypatch.setattr(weights_reader, "_PROGRAM", program + weights_reader._PROGRAM)
    assert Engine(checkpoint).wait().facts.weights


@pytest.mark.parametrize("what", ["Popen", "look", "sched_setaffinity"])
def test_reading_ends_whatever_fails(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError("not here") if what == "sched_setaffinity" else RuntimeError("unforeseen")

    owner: Any = {
        "Popen": weights_reader.subprocess,
        "look": CheckpointFiles,
        "sched_setaffinity": os,
    }[what]
    files = opened(checkpoint)
    monkeypatch.setattr(owner, what, fails)
    commands: list[Any] = []
    told = AdvertisedModel(ModelFacts(b"c", reading=True), [files], commands.append)
    until(lambda: not told.reads)
    assert told.unreadable is (what != "sched_setaffinity"), "a program on fewer cores is slower"
    assert any(isinstance(one, KnowWeights) for one in commands) is not told.unreadable


def test_reading_ends_with_the_weights_although_another_process_keeps_the_pipe(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that the engine has forked at the wrong moment."""
    path = tmp_path / "pid"
    program = (
        "import pathlib, subprocess; keeps = subprocess.Popen(['sleep', '300']); "
        f"pathlib.Path({str(path)!r}).write_text(str(keeps.pid)); "
    )
    monkeypatch.setattr(weights_reader, "_PROGRAM", program + weights_reader._PROGRAM)
    assert Engine(checkpoint).wait().facts.weights
    os.kill(int(path.read_text()), signal.SIGKILL)  # it is there still


def test_a_draft_model_is_told_with_the_weights(checkpoint: Path, tmp_path: Path) -> None:
    def drafts(path: Path) -> Engine:
        return Engine(checkpoint, draft=DraftFiles(b"config", [opened(path)])).wait()

    small = save(tmp_path / "draft", tensors(1))
    ours, same, theirs = drafts(small), drafts(small), drafts(one_row(tmp_path))
    assert ours.facts.draft
    assert draft_problem(ours.facts, same.facts) == ""
    assert "another draft model" in draft_problem(theirs.facts, ours.facts)


def test_a_draft_model_that_was_still_read_when_weights_changed_is_told_later(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = DraftFiles(b"config", [opened(save(tmp_path / "draft", tensors(1)))])
    with held(monkeypatch):
        engine = Engine(checkpoint, draft=draft)
        engine.told.withdraw()
    engine.told.tell_memory(loaded=b"new")
    assert engine.facts.reading or engine.facts.draft
    engine.wait()
    assert engine.facts.draft
    assert engine.facts.loaded == b"new"
    assert not engine.facts.weights


def test_a_draft_model_that_may_have_changed_is_told_by_its_new_files_or_not_at_all(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Both models of an engine may change at once, and the draft model alone."""
    small, tuned = save(tmp_path / "draft", tensors(1)), one_row(tmp_path / "drafts")
    first = tmp_path / "drafts" / "model"

    def drafts(*paths: Path) -> Engine:
        """Starts with the first, changes to the others."""
        engine = Engine(checkpoint, draft=DraftFiles(b"config", [opened(paths[0])])).wait()
        for path in paths[1:]:
            engine.told.withdraw()
            engine.told.forget_draft()
            draft = DraftFiles(b"config", [opened(path)])
            assert engine.told.tell_files([opened(checkpoint)], draft)
        return engine.wait()

    changed, tuned_from_start = drafts(first, tuned), drafts(tuned)
    assert changed.facts.draft
    assert changed.facts.draft == tuned_from_start.facts.draft
    assert changed.facts.draft != drafts(first).facts.draft
    assert drafts(first, tuned, first).facts.draft == drafts(first).facts.draft
    assert not drafts(small, tuned).facts.draft, "tensors that the new files lack stayed"
    changed.told.withdraw()
    changed.told.forget_draft()
    changed.told.tell_memory(loaded=b"new")
    assert not changed.wait().facts.draft
    assert "have changed while it served" in draft_problem(tuned_from_start.facts, changed.facts)


def test_nothing_is_known_of_weights_that_change(checkpoint: Path) -> None:
    engine, other = Engine(checkpoint).wait(), Engine(checkpoint).wait()
    engine.told.withdraw()
    engine.told.withdraw()
    assert engine.told.changes == 1
    assert "have changed" in model_problem(engine.facts, other.facts)
    assert model_problem(engine.facts, engine.facts), "nor of another that changes"
    engine.told.tell_memory(loaded=b"new")
    assert model_problem(engine.facts, engine.facts) == ""
    assert model_problem(engine.facts, other.facts)
    assert "changed" in model_problem(engine.facts, _with(engine.facts, loaded=b"row"))


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
    assert reloaded.told.tell_files([opened(other)])
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
    assert not engine.told.tell_files([part])
    assert not engine.told.tell_files(engine.files)
    assert engine.told.withdrawn


def test_torchs_archives_that_were_loaded_again_are_told_by_memory(tmp_path: Path) -> None:
    """Their tensors are not listed, so that one may be missing."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pytorch_model.bin").write_bytes(name.encode())
    engine = Engine(tmp_path / "one").wait()
    assert engine.facts.weights
    engine.told.withdraw()
    assert not engine.told.tell_files([opened(tmp_path / "two")])


def test_what_was_read_of_weights_of_before_is_not_told(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held(monkeypatch) as goes_on:
        engine = Engine(checkpoint)
        engine.told.withdraw()
        goes_on.set()
        engine.wait()
    assert engine.kinds == [ChangeModel]
    assert engine.commands[-2] == ReadWeights(0, 0), "nothing is read any more"


def test_another_agent_is_told_what_was_read_since_it_started(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    with held(monkeypatch) as goes_on:
        engine = Engine(checkpoint)
        assert engine.told.facts_now().reading
        goes_on.set()
        engine.wait()
    engine.told.tell_to(told.append)
    assert told == [one for one in engine.commands if isinstance(one, KnowWeights)]
    assert told


def test_weights_are_read_by_a_process_that_gives_way(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread with a lower priority would keep Python's lock while it waits for a processor: the agent of a busy machine
    was silent for seconds, and its sessions were lost."""
    program = (
        "import os, sys; import pd_connector.agent.weights_program as program; "
        "program.fingerprint = lambda *_: bytes([*[0] * 14, os.nice(0), len(os.sched_getaffinity(0))]); "
        "program.main()"
    )
    monkeypatch.setattr(weights_reader, "_PROGRAM", program)
    *_, nice, cores = Engine(checkpoint).wait().facts.weights
    assert nice == min(19, os.nice(0) + weights_program._NICE)
    assert weights_program._NICE > 0
    assert cores == len(os.sched_getaffinity(0)), "all that the engine has"


def test_the_program_ends_with_its_engine(checkpoint: Path, tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from pd_connector.agent import weights_reader\n"
        "from pd_connector.kv.checkpoint_files import CheckpointFiles\n"
        "weights_reader._PROGRAM = weights_reader._PROGRAM.replace('main()', "
        "'from pd_connector.agent import weights_program as p, weights_program; import time; '"
        "'p.fingerprint = lambda *_: time.sleep(600); main()')\n"
        "reader = weights_reader.WeightsReader(CheckpointFiles.open(Path(sys.argv[1])), None)\n"
        "while reader._program is None: pass\n"
        "print(reader._program.pid, flush=True)\n"
        "sys.stdin.read(); os._exit(1)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(checkpoint)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as engine:
        assert engine.stdout is not None
        program = Path("/proc") / engine.stdout.readline().strip()
        assert program.exists()
    until(lambda: not program.exists() or "Z" in (program / "stat").read_text().split()[2])


def test_weights_that_change_a_second_time_are_withdrawn_again(checkpoint: Path) -> None:
    engine = Engine(checkpoint).wait()
    for version in ("1", "2"):
        engine.told.withdraw()
        assert "changed" in model_problem(engine.facts, engine.facts), "withdrawn"
        engine.told.tell_memory(loaded=version.encode(), version=version)
        assert model_problem(engine.facts, engine.facts) == ""
        assert engine.told.facts_now() == engine.facts, "what an agent that starts now tells"
    assert engine.told.changes == 2
