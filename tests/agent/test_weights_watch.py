# SPDX-License-Identifier: Apache-2.0
"""What a rank tells of weights that change while its engine serves."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kv.test_checkpoint_files import link, opened
from kv.test_weights import save, tensors

from pd_connector.agent.commands import ReadWeights
from pd_connector.agent.weight_loads import WeightLoads
from pd_connector.agent.weights_watch import WeightsWatch
from pd_connector.kv.checkpoint_files import CheckpointFiles
from pd_connector.kv.model import ModelFacts
from pd_connector.memory.parameters import Loaded, loaded_fingerprint

__all__ = ["link"]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class Watch(WeightsWatch):
    """A door's, whose engine has loaded a checkpoint."""

    def __init__(self, path: Path) -> None:
        self.commands: list[Any] = []
        self.loads, self.parameters = WeightLoads(), torch.nn.Linear(4, 4)
        self.loads.begin("place", opened(path))
        self.loads.end()
        files, facts = self.files(), ModelFacts(b"c", held="all", reading=True)
        super().__init__(facts, self.samples(), files, None, self.commands.append, self.loads)
        self._advertised.wait()

    def model(self) -> torch.nn.Module:
        return self.parameters

    def samples(self) -> Loaded:
        return loaded_fingerprint(self.parameters)

    def files(self) -> Sequence[CheckpointFiles]:
        return [self.loads.files["place"]]

    def told(self) -> ModelFacts:
        """The facts once what is read was read."""
        self.tell()
        self._advertised.wait()
        return self._advertised.facts


def test_of_two_updates_before_a_batch_the_files_of_the_first_are_not_told(link: Path) -> None:
    watch = Watch(link)
    before = watch._advertised.facts.weights
    trained = save(link.parent / "trained", {name: one + 1 for name, one in tensors().items()})
    with watch.loads.change(whole=True):
        watch.loads.begin("place", opened(trained))
    with watch.loads.change(whole=True):
        pass  # all weights, from elsewhere
    facts = watch.told()
    assert facts.loaded
    assert not facts.weights
    with watch.loads.change(whole=True):
        watch.loads.begin("place", opened(link))
    assert watch.told().weights == before, "the files of the last change are"


def test_an_engine_whose_weights_cannot_be_read_will_tell_what_is_in_memory(link: Path) -> None:
    watch = Watch(link)
    assert not watch.reads
    watch.loads.files["place"].problem = "no longer there"
    watch._advertised._know(watch.files())
    assert watch.reads
    assert watch.commands[-1] == ReadWeights(0, 0)
    watch.tell_memory()
    assert not watch.reads


def test_weights_that_change_before_they_were_found_to_be_unreadable_are_told_by_the_change(
    link: Path,
) -> None:
    watch = Watch(link)
    watch._advertised.unreadable = True
    with watch.loads.change():
        assert not watch._advertised.unreadable, "their memory is neither old nor new"
