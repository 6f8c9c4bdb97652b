# SPDX-License-Identifier: Apache-2.0
"""vLLM sleeps and wakes up (0.33): its pages come back empty, its weights as they were or others."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from support.vllm_weights import agent, config, model, offer, worker

from pd_connector.agent.commands import ChangeModel, Withdraw
from pd_connector.errors import ConfigError, PDConnectorError
from pd_connector.kv.model import model_problem
from pd_connector.vllm import support
from pd_connector.vllm.connector import PDConnector
from pd_connector.vllm.identity.weight_loads import LOADS, watch_model
from pd_connector.vllm.messages import Prefill, StepCommands

__all__ = ["agent", "config", "model", "worker"]


@pytest.fixture
def sleeper(worker, agent, model):
    """A worker of vLLM's class, which has the model."""
    from vllm.v1.worker.worker_base import WorkerBase

    agent.rest = agent.wake = lambda: None

    class Sleeper(WorkerBase):
        def __init__(self) -> None:
            pass

        def sleep(self, level: int = 1) -> None:
            worker.sleep()

        def wake_up(self, tags: list[str] | None = None) -> None:
            if tags is None or "kv_cache" in tags:
                worker.wake()

    watch_model(model)
    return Sleeper()


def test_pages_of_before_are_not_offered(sleeper, worker, agent) -> None:
    sleeper.sleep()
    sleeper.wake_up()
    worker.begin(StepCommands([offer("whole")], [Prefill("t", "part", 16)]))
    assert agent.commands == [Withdraw("t", "whole")]
    agent.outcomes, agent.telemetry = list, SimpleNamespace(gauges=dict)
    assert worker.outcomes()[0] == {"whole"}
    assert worker.activity().weight_changes == {0: 1}, "the scheduler forgets what it knew of pages"
    worker.begin(StepCommands([offer("new")], weight_changes={0: 1}))
    assert agent.commands[-1] == offer("new")


def test_weights_that_came_back_as_they_were_are_those_that_peers_know(
    sleeper, worker, agent
) -> None:
    sleeper.sleep()
    sleeper.wake_up()
    worker.begin(StepCommands(weight_changes={0: 1}))
    assert agent.commands == []


def test_weights_that_changed_meanwhile_are_told_before_anything_is_offered(
    sleeper, worker, agent, model
) -> None:
    sleeper.sleep()
    with torch.no_grad():
        model.projection.weight.mul_(1.5)
    sleeper.wake_up(["weights"])
    sleeper.wake_up(["kv_cache"])
    worker.begin(StepCommands([offer("new")], weight_changes={0: 1}))
    told, withdrawn = agent.commands
    assert isinstance(told, ChangeModel)
    assert withdrawn == Withdraw("t", "new"), "the scheduler has not heard of the change"


def test_weights_that_are_not_kept_are_withdrawn_until_they_are_loaded(
    sleeper, worker, agent, model
) -> None:
    sleeper.sleep(level=2)
    (withdrawn,) = agent.commands
    assert model_problem(withdrawn.facts, withdrawn.facts)
    sleeper.wake_up(["weights"])
    with LOADS.change(whole=True), torch.no_grad():
        model.projection.weight.mul_(1.5)
    sleeper.wake_up(["kv_cache"])
    worker.begin(StepCommands())
    told = agent.commands[-1].facts
    assert told.loaded
    assert told.updates == 2, "the pages went, and the weights did"


@pytest.mark.parametrize("tags", [[], ["kv_cache"]])
def test_weights_without_memory_are_not_read(sleeper, worker, model, monkeypatch, tags) -> None:
    """On a GPU such a read ends the process."""
    sleeper.sleep()
    sleeper.wake_up(tags)
    monkeypatch.setattr(
        "pd_connector.vllm.identity.model_watch.loaded_weights",
        lambda _: pytest.fail("it was read"),
    )
    worker.begin(StepCommands(compare_weights=True))
    with pytest.raises(PDConnectorError, match="after wake_up"):
        worker.change_version("step 7")


def test_vllm_is_told_that_we_bear_it_where_it_calls_us(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PDConnector.supports_sleep_mode(None)
    parts = {name: SimpleNamespace() for name in ("cache_config", "parallel_config")}
    asleep: Any = SimpleNamespace(**parts, model_config=SimpleNamespace(enable_sleep_mode=True))
    monkeypatch.setattr(support, "_tells_of_sleep", lambda: True)
    support.check_supported(asleep)
    monkeypatch.setattr(support, "_tells_of_sleep", lambda: False)
    with pytest.raises(ConfigError, match=r"install vLLM 0\.33"):
        support.check_supported(asleep)
