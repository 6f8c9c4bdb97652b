# SPDX-License-Identifier: Apache-2.0
"""Weights that change while an engine serves are noticed before a step offers KV of the new ones."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from pd_connector.agent.commands import ChangeModel
from pd_connector.config import Config
from pd_connector.kv.model import ModelFacts
from pd_connector.vllm import owners, worker_side
from pd_connector.vllm.messages import StepCommands
from pd_connector.vllm.model import loaded_weights
from pd_connector.vllm.model_watch import ModelWatch
from pd_connector.vllm.scheduler_side import SchedulerSide
from pd_connector.vllm.windows import Windows


class Attention(nn.Module):
    def get_kv_cache_spec(self):
        raise NotImplementedError


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention()
        self.projection = nn.Linear(8, 8)


class Recorder:
    def __init__(self):
        self.commands = []

    def submit(self, command):
        self.commands.append(command)

    def engine_steps(self):
        pass

    def close(self):
        pass


@pytest.fixture
def model():
    owners.watch()
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def config(model):
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            rank=0, world_size=1, data_parallel_size=1, enable_eplb=False
        ),
        compilation_config=SimpleNamespace(static_forward_context={"layers.0.attn": model.attn}),
    )


@pytest.fixture
def worker(config):
    made = worker_side.WorkerSide(config, None, Config())
    made._agent = Recorder()
    start(made, config)
    return made


def start(worker, config, files=None, **facts):
    """The worker has told these facts of its model."""
    loaded = loaded_weights(config)
    told = ModelFacts(b"config", loaded=loaded.sampled, loaded_fine=loaded.fine, **facts)
    worker._model = ModelWatch(config, told, loaded, files, worker._agent.submit)


def step(scheduled, scheduler):
    output = SimpleNamespace(total_num_scheduled_tokens=scheduled, scheduled_new_reqs=[])
    return scheduler.take_step(output)


def scheduler():
    sides = {"produces": True, "consumes": True}
    windows = Windows([(16, 0)])
    return SchedulerSide(Config(overlap="off"), engine_id="e", windows=windows, ranks=1, **sides)


def test_weights_are_looked_at_in_the_first_step_that_computes_after_a_reset():
    side = scheduler()
    assert not step(5, side).compare_weights
    side.reset()
    assert [step(tokens, side).compare_weights for tokens in (0, 0, 5, 5)] == [
        *(False, False),
        *(True, False),
    ]


def test_weights_that_are_the_same_change_nothing(worker):
    worker.begin(StepCommands(compare_weights=True))
    assert worker._agent.commands == []


def test_weights_that_changed_are_told_to_the_agent_before_the_steps_commands(worker, model):
    with torch.no_grad():
        model.projection.weight.mul_(1.5)
    worker.begin(StepCommands(["a command"], compare_weights=True))
    changed, command = worker._agent.commands
    assert isinstance(changed, ChangeModel)
    assert changed.facts.updates == 1
    assert command == "a command"
    worker.begin(StepCommands(compare_weights=True))
    assert len(worker._agent.commands) == 2, "they have not changed since"


def test_weights_are_looked_at_now_and_then_without_a_reset(worker, model):
    with torch.no_grad():
        model.projection.bias.add_(1)
    worker.begin(StepCommands())
    assert worker._agent.commands == []
    worker._model._next_compare = 0.0
    worker.begin(StepCommands(idle=True))
    assert worker._agent.commands == [], "an engine that computes nothing has time"
    worker.begin(StepCommands())
    assert len(worker._agent.commands) == 1


def test_a_version_that_the_operator_tells_is_told_to_peers(worker):
    worker.change_version("step 7")
    (changed,) = worker._agent.commands
    assert changed.facts.version == "step 7"


def test_weights_that_a_load_balancer_moves_are_not_compared(config, model):
    assert loaded_weights(config).fine
    config.parallel_config.enable_eplb = True
    assert not any(loaded_weights(config))


def packed(model):
    """vLLM on a CPU packs a weight for its kernel, and keeps it nowhere else."""
    weight = model.projection.weight.detach().clone()
    model.projection.cpu_linear = lambda x: x @ weight.t()
    model.projection.weight = nn.Parameter(torch.empty(0))


def test_weights_that_only_a_kernel_holds_are_looked_at_when_they_are_loaded_anew(
    worker, config, model
):
    packed(model)
    start(worker, config)
    worker.begin(StepCommands(compare_weights=True))
    assert worker._agent.commands == []
    model.projection.weight = nn.Parameter(torch.ones(8, 8))
    packed(model)
    worker.begin(StepCommands(compare_weights=True))
    (changed,) = worker._agent.commands
    assert changed.facts.updates == 1
    assert not changed.facts.loaded_fine, "the rest may be alike where these are not"
    packed(model)
    worker.begin(StepCommands(compare_weights=True))
    assert worker._agent.commands[-1].facts.updates == 2


def test_where_those_stayed_the_others_are_compared(worker, config, model):
    packed(model)
    start(worker, config)
    with torch.no_grad():
        model.projection.bias.add_(1)
    worker.begin(StepCommands(compare_weights=True))
    (changed,) = worker._agent.commands
    assert changed.facts.loaded_fine
