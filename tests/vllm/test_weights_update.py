# SPDX-License-Identifier: Apache-2.0
"""Weights that change while an engine serves are noticed before a step offers KV of the new ones."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from support.vllm_weights import agent, config, model, offer, start, worker

from pd_connector.agent.commands import ChangeModel, Withdraw
from pd_connector.config import Config
from pd_connector.kv.model import model_problem
from pd_connector.memory.parameters import loaded_full_fingerprint
from pd_connector.protocol.consuming.incoming import Load
from pd_connector.vllm.engine_facts import EngineFacts
from pd_connector.vllm.identity.model import loaded_weights
from pd_connector.vllm.identity.weight_loads import LOADS
from pd_connector.vllm.messages import Prefill, StepCommands, WorkerActivity
from pd_connector.vllm.pages.windows import Windows
from pd_connector.vllm.part import Ended
from pd_connector.vllm.scheduler_side import SchedulerSide

__all__ = ["agent", "config", "model", "worker"]


def step(scheduled, scheduler):
    output = SimpleNamespace(total_num_scheduled_tokens=scheduled, scheduled_new_reqs=[])
    return scheduler.take_step(output)


def scheduler():
    sides = {"produces": True, "consumes": True}
    windows = Windows([(16, 0)])
    return SchedulerSide(
        Config(overlap="off"), EngineFacts(engine_id="e", windows=windows, ranks=1, **sides)
    )


def test_weights_are_looked_at_in_the_first_step_that_computes_after_a_reset():
    side = scheduler()
    assert not step(5, side).compare_weights
    side.reset()
    assert [step(tokens, side).compare_weights for tokens in (0, 0, 5, 5)] == [
        *(False, False),
        *(True, False),
    ]


def test_weights_that_are_the_same_change_nothing(worker, agent):
    worker.begin(StepCommands(compare_weights=True))
    assert agent.commands == []


def test_weights_that_changed_are_told_to_the_agent_before_the_steps_commands(worker, model, agent):
    with torch.no_grad():
        model.projection.weight.mul_(1.5)
    worker.begin(StepCommands(["a command"], compare_weights=True))
    changed, command = agent.commands
    assert isinstance(changed, ChangeModel)
    assert changed.facts.updates == 1
    assert command == "a command"
    worker.begin(StepCommands(compare_weights=True))
    assert len(agent.commands) == 2, "they have not changed since"


def test_weights_are_looked_at_now_and_then_without_a_reset(worker, model, agent):
    with torch.no_grad():
        model.projection.bias.add_(1)
    worker.begin(StepCommands())
    assert agent.commands == []
    worker._model._next_compare = 0.0
    worker.begin(StepCommands(idle=True))
    assert agent.commands == [], "an engine that computes nothing has time"
    worker.begin(StepCommands())
    assert len(agent.commands) == 1


def test_a_version_that_the_operator_tells_is_told_to_peers(worker, agent):
    worker.change_version("step 7")
    (changed,) = agent.commands
    assert changed.facts.version == "step 7"


def test_weights_that_a_load_balancer_moves_are_not_compared(config, model):
    assert loaded_weights(config).sampled
    config.parallel_config.enable_eplb = True
    assert not any(loaded_weights(config))


def packed(model):
    """vLLM on a CPU packs a weight for its kernel, and keeps it nowhere else."""
    weight = model.projection.weight.detach().clone()
    model.projection.cpu_linear = lambda x: x @ weight.t()
    model.projection.weight = nn.Parameter(torch.empty(0))


def test_weights_that_only_a_kernel_holds_are_looked_at_when_they_are_loaded_anew(
    worker, config, model, agent
):
    packed(model)
    start(worker, config, agent)
    worker.begin(StepCommands(compare_weights=True))
    assert agent.commands == []
    model.projection.weight = nn.Parameter(torch.ones(8, 8))
    packed(model)
    worker.begin(StepCommands(compare_weights=True))
    (changed,) = agent.commands
    assert changed.facts.updates == 1
    assert not changed.facts.loaded, "nobody sees all of them"
    packed(model)
    worker.begin(StepCommands(compare_weights=True))
    assert agent.commands[-1].facts.updates == 2


def compare(request):
    return Load(request, "t", (), b"identity", 0, 31, ((1, 2),), False, compares=True)


def changed(worker, model, agent):
    """The weights change in place, without a word to the scheduler."""
    with torch.no_grad():
        model.projection.weight.mul_(1.5)
    worker.begin(StepCommands(compare_weights=True))
    agent.commands.clear()


def test_pages_that_the_scheduler_names_before_it_knows_are_neither_offered_nor_compared(
    worker, model, agent
):
    changed(worker, model, agent)
    commands = [offer("whole"), offer("part", final=False), compare("audited")]
    worker.begin(StepCommands(commands, [Prefill("t", "part", 16)]))
    assert agent.commands == [Withdraw("t", "whole"), Withdraw("t", "part")]
    worker.end()
    assert len(agent.commands) == 2, "nor does the rest of a prompt follow"
    agent.outcomes = list
    agent.telemetry = SimpleNamespace(gauges=dict)
    assert worker.outcomes()[0] == {"whole"}, "vLLM keeps its pages until it hears of it"
    activity = worker.activity()
    assert activity.weight_changes == {0: 1}
    assert [report.request for report in activity.audits] == ["audited"]
    assert worker.activity().weight_changes == {}, "told once"


def test_pages_are_offered_again_when_the_scheduler_knows(worker, model, agent):
    changed(worker, model, agent)
    worker.begin(StepCommands([offer("new")], weight_changes={0: 1}))
    assert agent.commands == [offer("new")]


def test_the_scheduler_takes_back_what_it_knew_and_empties_the_prefix_cache():
    side, evicted = scheduler(), []
    pages = SimpleNamespace(
        evict_blocks=evicted.append,
        num_gpu_blocks=4,
        get_num_free_blocks=lambda: 0,
        get_new_blocks=None,
    )
    manager = SimpleNamespace(
        block_pool=pages,
        allocate_slots=None,
        prefix_cache_lookup_enabled=None,
        coordinator=SimpleNamespace(cache_blocks=None),
    )
    side.bind(manager)
    old = SimpleNamespace(request_id="old", num_prompt_tokens=32, mm_features=(), lora_request=None)
    side.offers.add(old, "t", b"identity", chooses_first=True)
    side.workers_reported(WorkerActivity(weight_changes={0: 1}))
    assert evicted == [{0, 1, 2, 3}]
    told = step(5, side)
    assert told.commands == [Withdraw("t", "old")]
    assert told.weight_changes == {0: 1}
    assert not side.offers.finished(old, ([1, 2],)).keeps_pages


def test_a_request_that_ends_in_the_step_in_which_weights_have_changed_is_not_offered(
    worker, model, agent
):
    """vLLM ends it before the scheduler hears of the change. Its prompt can have KV of both weights, and its consumer was
    refused, so nobody would fetch it before its lease ends."""
    side = scheduler()
    step(32, side)
    changed(worker, model, agent)
    side.offers.finished = lambda *_: Ended(True, {}, (offer("ended"),))
    request = SimpleNamespace(
        request_id="ended", status=None, num_computed_tokens=32, lora_request=None, mm_features=()
    )
    assert side.request_finished(request, ([1, 2],))[0]
    agent.outcomes, agent.telemetry = list, SimpleNamespace(gauges=dict)
    side.workers_reported(worker.activity())
    assert side.pending_work
    worker.begin(step(5, side))
    assert agent.commands == [Withdraw("t", "ended")]
    assert worker.outcomes()[0] == {"ended"}, "vLLM frees them"


def test_a_call_of_workers_has_the_weights_looked_at_in_the_next_step_even_an_idle_one():
    side = scheduler()
    side.workers_called()
    assert side.pending_work
    assert [step(0, side).compare_weights for _ in range(2)] == [True, False]


def test_weights_are_withdrawn_when_they_begin_to_change_and_told_when_they_have(
    worker, model, agent
):
    with LOADS.change(whole=True):
        (withdrawn,) = agent.commands
        assert model_problem(withdrawn.facts, withdrawn.facts)
        with torch.no_grad():
            model.projection.weight.mul_(1.5)
    worker.begin(StepCommands())
    told = agent.commands[-1].facts
    assert told.loaded
    assert model_problem(told, told) == ""


def test_weights_that_come_in_parts_are_told_when_no_more_have_come_for_a_while(worker, agent):
    with LOADS.change():
        pass
    worker.begin(StepCommands())
    assert len(agent.commands) == 1
    worker._model._tells_at = 0.0
    worker.begin(StepCommands())
    assert len(agent.commands) == 2


def test_a_row_that_no_sample_sees_changes_what_is_told_of_parameters_in_memory(config, model):
    model.table = nn.Embedding(40_000, 64)
    before = loaded_weights(config), loaded_full_fingerprint(model)
    with torch.no_grad():
        model.table.weight[10] += 1
    assert loaded_weights(config) == before[0], "so that the test tests what it says"
    assert loaded_full_fingerprint(model) != before[1]
    packed(model)
    assert loaded_full_fingerprint(model) == b"", "a kernel has weights that nobody sees"
