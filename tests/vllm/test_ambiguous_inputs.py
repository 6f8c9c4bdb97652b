# SPDX-License-Identifier: Apache-2.0
"""Two images come under one identifier, as a client can choose it: KV that vLLM computes for either is not handed over."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from support.vllm_steps import OFFER
from vllm.v1.request import RequestStatus

from pd_connector.agent.commands import Withdraw
from pd_connector.config import Config
from pd_connector.kv.geometry import Shard
from pd_connector.protocol.producing.outgoing import Offer
from pd_connector.protocol.wire.peers import Peer, Source
from pd_connector.vllm.engine_facts import EngineFacts
from pd_connector.vllm.pages.windows import Windows
from pd_connector.vllm.scheduler_side import SchedulerSide

TOKENS = 32
ANOTHER, OURS = torch.zeros(8, 64), torch.ones(8, 64)


@pytest.fixture
def side() -> SchedulerSide:
    found = SchedulerSide(
        Config(overlap="step"),
        EngineFacts(
            engine_id="e",
            windows=Windows([(16, 0)]),
            ranks=1,
            produces=True,
            consumes=False,
        ),
    )
    found.set_peers((Peer(Source("127.0.0.1", 7, "e"), Shard(0, 2, 0, 1)),))
    return found


def request(name: str, pixels: torch.Tensor, params: dict[str, Any] | None) -> Any:
    feature = SimpleNamespace(
        data={"pixel_values": SimpleNamespace(data=pixels)},
        modality="image",
        identifier="hash of ours",
        mm_position=SimpleNamespace(offset=4, length=8),
    )
    return SimpleNamespace(
        request_id=name,
        kv_transfer_params=params,
        prompt_token_ids=list(range(TOKENS)),
        prompt_embeds=None,
        cache_salt=None,
        lora_request=None,
        mm_features=[feature],
        num_prompt_tokens=TOKENS,
        num_tokens=TOKENS,
        num_computed_tokens=TOKENS,
        output_token_ids=[1],
        resumable=False,
        status=RequestStatus.FINISHED_LENGTH_CAPPED,
        skip_reading_prefix_cache=False,
        replay_start=0,
    )


@pytest.mark.parametrize("other", [ANOTHER, OURS, None], ids=["another", "the same", "none"])
@pytest.mark.parametrize("late", [False, True])
def test_kv_of_an_image_is_offered_if_no_other_one_has_its_identifier(
    side: SchedulerSide, other: torch.Tensor | None, late: bool
) -> None:
    """Another client sends its image first, or while ours is computed, and wants no KV to be moved."""
    asked, others = request("ours", OURS, OFFER), []
    if other is not None:
        others.append(request("other", other, None))
    for one in [asked, *others] if late else [*others, asked]:
        side.on_new_request(one)
    side._commands.clear()
    keeps, answer = side.request_finished(asked, ([1, 2],))
    wrong = other is ANOTHER
    assert keeps == (not wrong)
    assert (answer is None) == wrong
    assert [type(command) for command in side._commands] == [Withdraw if wrong else Offer]


def test_what_streams_of_it_is_provisional(side: SchedulerSide) -> None:
    asked = request("ours", OURS, OFFER)
    side.on_new_request(asked)
    assert side.offers._streaming is not None
    assert side.offers._streaming._prompts["ours"].provisional
