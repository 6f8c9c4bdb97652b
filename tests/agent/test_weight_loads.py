# SPDX-License-Identifier: Apache-2.0
"""Files are read from the moment on when an engine begins to load them, each load by its own files."""

from pathlib import Path

import pytest
from kv.test_checkpoint_files import link, opened, switch
from support.waits import until

from pd_connector.agent.weight_loads import WeightLoads
from pd_connector.kv.checkpoint_files import CheckpointFiles

__all__ = ["link"]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_each_load_of_a_place_is_known_by_its_own_files(link: Path) -> None:
    loads = WeightLoads()
    looked_at, first = opened(link), opened(link)
    loads.begin("place", looked_at)
    loads.begin("place", first)
    assert loads.files["place"] is looked_at, "nothing has changed since"
    loads.end()
    switch(link)
    with loads.change(whole=True):
        second = opened(link)
        loads.begin("place", second)
    assert loads.files["place"] is second
    assert looked_at.problem == second.problem == ""


def test_what_is_looked_at_again_after_a_change_is_read_in_its_place(link: Path) -> None:
    loads = WeightLoads()
    loads.reads = True
    before = opened(link)
    loads.begin("place", before)
    switch(link)
    now = opened(link)
    loads.begin("place", now)
    loads.end()
    assert before.reader.stopped
    until(lambda: now.weights)
    assert now.problem == ""


@pytest.mark.parametrize("used", [True, False])
def test_reading_begins_with_the_load_if_the_engine_uses_the_connector(
    link: Path, used: bool
) -> None:
    loads, files = WeightLoads(), opened(link)
    loads.reads = used
    loads.begin("place", files)
    if used:
        until(lambda: files.weights, "before the engine has loaded anything")
    assert (files.reader is not None) is used
    loads.end()
    assert files.problem == ""


def two_models(link: Path) -> tuple[WeightLoads, CheckpointFiles]:
    """An engine that has loaded a model, and loads its drafter from the same place next."""
    loads, main = WeightLoads(), opened(link)
    loads.begin("place", main)
    loads.end()
    return loads, main


def test_a_checkpoint_that_is_replaced_between_the_loads_of_two_models_is_not_known(
    link: Path,
) -> None:
    loads, _ = two_models(link)
    switch(link)
    loads.begin("place", opened(link))
    loads.end()
    assert "replaced between the loads of two models" in loads.files["place"].problem


def test_a_problem_of_the_first_of_two_models_is_one_of_both(link: Path) -> None:
    loads, main = two_models(link)
    file = link / "model.safetensors"
    file.write_bytes(file.read_bytes())
    main.look()
    loads.begin("place", opened(link))
    loads.end()
    assert "was written to" in loads.files["place"].problem


def test_two_models_of_one_checkpoint_are_known(link: Path) -> None:
    loads, _ = two_models(link)
    loads.begin("place", opened(link))
    loads.end()
    assert loads.files["place"].problem == ""
