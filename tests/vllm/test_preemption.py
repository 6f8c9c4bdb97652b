# SPDX-License-Identifier: Apache-2.0
"""vLLM's own order of calls in a step that preempts: `execute_model` of both model runners, with a
real connector and real agents. Pages are zeroed, then they would be read, then metadata is bound."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from support.agents import TRANSPORTS, Rank, Ranks, assert_pages, ranks, until

pytest.importorskip("vllm")

from vllm.config import VllmConfig
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec
from vllm.v1.worker import gpu_model_runner as first
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu import kv_connector as second_connector
from vllm.v1.worker.gpu import model_runner as second

from pd_connector.agent.commands import Expect, Revoke
from pd_connector.config import Config
from pd_connector.errors import Cause
from pd_connector.vllm.connector import PDConnector
from pd_connector.vllm.messages import StepCommands
from pd_connector.vllm.runner import revokes_late
from pd_connector.vllm.worker_side import WorkerSide

__all__ = ["ranks"]

SETTINGS = TRANSPORTS["shm"] | {"wait_timeout_s": 60.0, "stall_timeout_s": 60.0}
ZEROED = [1, 2]


@dataclass
class Engine:
    """The worker of an engine that has computed a prompt into pages 1 and 2, nobody's as yet."""

    producer: Rank
    consumer: Rank
    connector: PDConnector
    sends: bool = False  # what was zeroed: wait for it

    def preempting_step(self, execute: Callable[[SchedulerOutput], Any]) -> None:
        """A step that gives the prompt's pages to another request; it computes nothing."""
        output = SchedulerOutput.make_empty()
        output.preempted_req_ids = {"offer of t"}
        output.new_block_ids_to_zero = ZEROED
        output.kv_connector_metadata = StepCommands([Revoke("t", "offer of t")], idle=True)
        execute(output)
        assert not any(self.producer.page(1))
        self.producer.offer("t", [8, 9])

    def zeroed(self) -> None:
        """Pages have been zeroed. Only now a consumer asks for them, and is given time."""
        self.consumer.load(self.producer.source, "t", [5, 6], wait=True)
        until(lambda: self.producer.gauge("consumer_sessions"))
        polls = iter(range(100))
        received = partial(self.consumer.count, "received_chunks")
        until(received if self.sends else lambda: received() or next(polls, None) is None)


@pytest.fixture
def start(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], Engine]:
    def start(late_revokes: bool) -> Engine:
        producer, consumer = ranks.pair(SETTINGS, late_revokes=late_revokes)
        parallel = SimpleNamespace(rank=0, world_size=2, data_parallel_size=1)
        worker = WorkerSide(
            SimpleNamespace(parallel_config=parallel),  # type: ignore[arg-type]
            MagicMock(),
            Config(**SETTINGS),
        )
        worker._agent = producer.agent
        connector = object.__new__(PDConnector)
        connector._connector_metadata = None
        connector._worker, connector._scheduler = worker, None
        monkeypatch.setattr(parallel_state, "_PP", MagicMock(is_last_rank=True))
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
        producer.agent.engine_steps()
        producer.agent.submit(Expect("t"))
        producer.offer("t", [1, 2], computed=2 * producer.page_tokens)
        for layer in producer.layers.values():
            layer[8], layer[9] = layer[1], layer[2]
        return Engine(producer, consumer, connector)

    return start


def step_of_the_first_runner(engine: Engine) -> None:
    """`GPUModelRunner` and the CPU's `_zero_block_ids`, which zeroes the engine's own tensors."""
    layers = {f"layers.{number}": layer for number, layer in engine.producer.layers.items()}
    spec = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
    runner = MagicMock(execute_model_state=None, speculative_config=None)
    runner.vllm_config = VllmConfig()
    runner.kv_cache_config.kv_cache_groups = [KVCacheGroupSpec(list(layers), spec)]
    contexts = {name: SimpleNamespace(kv_cache=layer) for name, layer in layers.items()}
    runner.compilation_config.static_forward_context = contexts
    runner.input_batch.req_id_to_index = {}

    def zero(pages: list[int]) -> None:
        CPUModelRunner._zero_block_ids(runner, pages)
        engine.zeroed()

    runner._zero_block_ids = zero
    runner._update_states = partial(first.GPUModelRunner._update_states, runner)
    runner.kv_connector_no_forward = first.GPUModelRunner.kv_connector_no_forward
    engine.preempting_step(partial(first.GPUModelRunner.execute_model, runner))


def step_of_the_second_runner(engine: Engine) -> None:
    runner = MagicMock(aux_output_connector=None)
    runner.req_states = SimpleNamespace(
        num_computed_tokens_np=np.zeros(1),
        prefill_len=SimpleNamespace(np=np.zeros(1)),
        num_computed_prefill_tokens=np.zeros(1),
    )

    def zero(pages: list[int]) -> None:
        for layer in engine.producer.layers.values():
            layer[pages] = 0
        engine.zeroed()

    runner.kv_block_zeroer.zero_block_ids = zero
    runner.update_requests = partial(second.GPUModelRunner.update_requests, runner)
    active = object.__new__(second_connector.ActiveKVConnector)
    active.vllm_config, active.kv_connector = VllmConfig(), engine.connector
    active._disabled, active._pending_load_kwargs = False, None
    runner.kv_connector = active
    engine.preempting_step(partial(second.GPUModelRunner.execute_model, runner))


def test_the_first_runner_tells_in_time_and_the_prompt_comes_from_its_new_pages(start) -> None:
    engine = start(False)
    step_of_the_first_runner(engine)
    assert engine.consumer.loaded("t").cause is None
    assert_pages(engine.producer, [8, 9], engine.consumer, [5, 6])


def test_without_its_hook_zeros_would_count_as_kv(start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PDConnector, "handle_preemptions", lambda self, metadata: None)
    engine = start(False)
    step_of_the_first_runner(engine)
    assert engine.consumer.loaded("t").cause is None
    with pytest.raises(AssertionError):
        assert_pages(engine.producer, [8, 9], engine.consumer, [5, 6])


def test_the_second_runner_tells_late_and_what_was_read_is_not_used(start) -> None:
    engine = start(True)
    step_of_the_second_runner(engine)
    assert engine.consumer.loaded("t").cause == Cause.PREEMPTED


def test_taken_for_the_first_one_zeros_would_count_as_kv(start) -> None:
    engine = start(False)
    engine.sends = True
    step_of_the_second_runner(engine)
    assert engine.consumer.loaded("t").cause is None
    with pytest.raises(AssertionError):  # what had not come yet came from the new pages
        assert_pages(engine.producer, [8, 9], engine.consumer, [5, 6])


@pytest.mark.parametrize(
    ("second_runner", "zeroes", "groups", "late"),
    [
        (False, True, 2, False),
        (True, False, 1, False),
        (True, True, 1, True),
        (True, False, 2, True),
    ],
)
def test_which_engines_revoke_late(
    *, second_runner: bool, zeroes: bool, groups: int, late: bool
) -> None:
    engine = SimpleNamespace(use_v2_model_runner=second_runner)
    caches = SimpleNamespace(needs_kv_cache_zeroing=zeroes, kv_cache_groups=[None] * groups)
    assert revokes_late(engine, caches) is late  # type: ignore[arg-type]
