# SPDX-License-Identifier: Apache-2.0
"""PDConnector beside another connector within vLLM's MultiConnector, in vLLM's own scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from support.vllm_steps import OFFER, PAGE
from vllm.config import KVTransferConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from pd_bench.scheduler.bare import config_of, scheduler_of
from pd_connector.agent.commands import Withdraw
from pd_connector.kv.geometry import Shard
from pd_connector.protocol.producing.outgoing import Offer
from pd_connector.vllm.messages import RankAddress, StepCommands
from pd_connector.vllm.plugin import register

TOKENS = 5 * PAGE
PROMPT = [place % 250 for place in range(TOKENS)]


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[Scheduler]:
    """The scheduler of a prefill engine that also keeps KV on a disk, with one page table there only."""
    register()
    config = config_of(budget=2 * PAGE, seqs=4, max_model_len=1024, caching=False)
    config.scheduler_config.disable_hybrid_kv_cache_manager = True
    parts = [
        {"kv_connector": "PDConnector", "kv_role": "kv_producer"},
        {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
        },
    ]
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": parts},
    )
    grammars = SimpleNamespace(accept_tokens=lambda *_: True)
    made = scheduler_of(Scheduler, config, grammars, blocks=100)
    made.connector.set_xfer_handshake_metadata_pp_aware(
        {(0, 0): RankAddress("127.0.0.1", 7000, Shard(0, 1, 0, 1))}
    )
    yield made
    made.shutdown()


def on_disk(scheduler: Scheduler) -> None:
    """Let the other connector have the prompt's KV."""
    other: Any = scheduler.connector._connectors[1]
    kept = torch.tensor(PROMPT)[: (TOKENS - 1) // PAGE * PAGE]
    other._generate_foldername_debug(kept[: TOKENS - PAGE], [], create_folder=True)


def commands_of(scheduler: Scheduler) -> list[list[Any]]:
    """What the agents of PDConnector are told, step by step, of a prompt that another engine wants."""
    params = {**OFFER, "transfer_id": "t"}
    request = Request(
        request_id="r",
        prompt_token_ids=PROMPT,
        sampling_params=SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params}),
        pooling_params=None,
    )
    scheduler.add_request(request)
    told: list[list[Any]] = []
    for _ in range(10):
        output = scheduler.schedule()
        ours: Any = output.kv_connector_metadata.metadata[0]
        assert isinstance(ours, StepCommands)
        told.append(ours.commands)
        names = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=[
                [1] if request.num_computed_tokens >= request.num_tokens else [] for _ in names
            ],
        )
        scheduler.update_from_output(output, result)
        if any(isinstance(each, Withdraw) or getattr(each, "final", False) for each in told[-1]):
            return told
    raise AssertionError(f"no end: {told}")


def offers(told: list[list[Any]]) -> list[Offer]:
    return [each for step in told for each in step if isinstance(each, Offer)]


def test_a_prompt_is_offered_although_the_other_part_knows_one_page_table_only(
    scheduler: Scheduler,
) -> None:
    *steps, last = offers(commands_of(scheduler))
    assert [offer.tokens for offer in steps] == [0, 2 * PAGE, 4 * PAGE], "it streams"
    assert last.final
    assert last.tokens == TOKENS


def test_pages_that_the_other_part_fills_within_the_step_are_not_sent_before_its_end(
    scheduler: Scheduler,
) -> None:
    on_disk(scheduler)
    (only,) = offers(commands_of(scheduler))
    assert only.final, "whether they were filled is known when the request has ended"
    assert only.tokens == TOKENS
