# SPDX-License-Identifier: Apache-2.0
"""Files are read from the moment on when an engine begins to load them, each load by its own files."""

from pathlib import Path

import pytest
from kv.test_checkpoint_files import link, opened, switch
from support.waits import until

from pd_connector.agent.weight_loads import WeightLoads

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
    second = opened(link)
    loads.begin("place", second)
    loads.end()
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
