# SPDX-License-Identifier: Apache-2.0
"""Where the engine's scheduler has its settings from, and what happens when they change."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from sched_rig import Rig, words

from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.cost.profile import ProfileError, save
from scheduler_plugins.order.srjf import SrjfCalibrated
from scheduler_plugins.order.without_cost import Fcfs
from scheduler_plugins.qos import file
from scheduler_plugins.qos.classes import QosError
from scheduler_plugins.qos.settings import cost_model_path, settings_path


def config(additional: object = None) -> SimpleNamespace:
    return SimpleNamespace(additional_config=additional if additional is not None else {})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "scheduler.yaml"
    path.write_text("scheduler: {policy: fcfs, max_overtaken: 5}")
    return path


@pytest.fixture
def rig(path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """A rig that looks at its file before every step."""
    monkeypatch.setattr(file, "LOOK_EVERY_S", 0.0)
    return Rig(seqs=1, additional={"pd_scheduler": str(path)})


def test_the_flag_names_the_file_and_goes_before_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert settings_path(config()) is None
    monkeypatch.setenv("PD_SCHEDULER_CONFIG", "/from/environment")
    assert settings_path(config()) == Path("/from/environment")
    assert settings_path(config({"pd_scheduler": "/from/flag"})) == Path("/from/flag")
    assert settings_path(config(SimpleNamespace(compute_hash=None))) == Path("/from/environment")


def test_the_cost_model_is_named_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cost_model_path(config()) is None
    monkeypatch.setenv("PD_SCHEDULER_COST_MODEL", "/from/environment")
    assert cost_model_path(config({"pd_cost_model": "/from/flag"})) == Path("/from/flag")
    assert cost_model_path(config()) == Path("/from/environment")


def test_a_name_that_is_no_path_is_refused() -> None:
    with pytest.raises(ValueError, match="pd_scheduler 7: must be the path"):
        settings_path(config({"pd_scheduler": 7}))


def test_a_misspelt_key_is_refused_and_those_of_others_are_not() -> None:
    with pytest.raises(
        ValueError, match="'pd_schedular': is not known; did you mean 'pd_scheduler'"
    ):
        settings_path(config({"pd_schedular": "/from/flag"}))
    assert settings_path(config({"scheduler": "x", "ascend_scheduler_config": {}})) is None


def test_without_a_file_the_defaults_hold() -> None:
    assert isinstance(Rig().order.policy, SrjfCalibrated)


def test_a_file_that_cannot_be_used_stops_the_start(path: Path) -> None:
    path.write_text("scheduler: {policy: fastest}")
    with pytest.raises(QosError, match="fastest"):
        Rig(additional={"pd_scheduler": str(path)})
    with pytest.raises(QosError, match="cannot be read"):
        Rig(additional={"pd_scheduler": str(path) + ".not"})


def test_another_policy_takes_effect_while_requests_wait(rig: Rig, path: Path) -> None:
    assert isinstance(rig.order.policy, Fcfs)
    rig.add("running", words(1, 20), 3)
    rig.step()
    rig.add("long", words(2, 100))
    rig.add("short", words(3, 20))
    path.write_text("scheduler: {policy: srjf, max_overtaken: 6}")
    assert rig.run() == ["running", "short", "long"]
    assert rig.order._max_overtaken == 6
    rig.assert_served()


def test_other_classes_take_effect_while_requests_wait(rig: Rig, path: Path) -> None:
    rig.add("running", words(1, 20), 3)
    rig.step()
    rig.add("other", words(2, 20))
    rig.add("late", words(3, 20), qos="gold")
    path.write_text(
        "scheduler: {qos_classes: [{name: gold, reserved_fraction: 0.5, priority: 2},"
        " {name: rest, reserved_fraction: 0.5}]}"
    )
    assert rig.run() == ["running", "late", "other"]
    rig.assert_served()


def test_a_change_that_cannot_be_used_is_told_and_leaves_everything(
    rig: Rig, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text("scheduler: {policy: fastest}")
    rig.add("a", words(1, 20))
    with caplog.at_level(logging.ERROR, "scheduler_plugins"):
        rig.run()
    assert [record.getMessage().count("fastest") for record in caplog.records] == [1]
    assert isinstance(rig.order.policy, Fcfs)


def test_a_profile_is_believed_from_the_first_request_on(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    save(path, CostModel(a=0.5))
    rig = Rig(additional={"pd_cost_model": str(path)}, seconds_per_token=None)
    assert rig.fit.model.a == 0.5
    path.write_text("{}")
    with pytest.raises(ProfileError):
        Rig(additional={"pd_cost_model": str(path)})
