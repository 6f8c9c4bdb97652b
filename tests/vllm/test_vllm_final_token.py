# SPDX-License-Identifier: Apache-2.0
"""vLLM as a producer tells the first token with its last offer, for decode engines that go on from it."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.request import RequestStatus

from pd_connector.agent.commands import Withdraw
from pd_connector.config import Config
from pd_connector.kv.geometry import Shard
from pd_connector.protocol.producing.outgoing import Offer
from pd_connector.protocol.wire.final_token import FinalToken
from pd_connector.protocol.wire.peers import Peer, Source
from pd_connector.vllm.engine_facts import EngineFacts
from pd_connector.vllm.pages.windows import Windows
from pd_connector.vllm.scheduler_side import SchedulerSide

PAGE = 16
PROMPT = list(range(40))
ROOM = "123456789"


def finished(**changes: Any) -> Any:
    """A prefill that has ended, as far as the scheduler's side looks at it."""
    request = {
        "request_id": "r",
        "kv_transfer_params": {"do_remote_decode": True, "transfer_id": ROOM},
        "prompt_token_ids": PROMPT,
        "prompt_embeds": None,
        "cache_salt": None,
        "lora_request": None,
        "mm_features": [],
        "num_prompt_tokens": len(PROMPT),
        "num_computed_tokens": len(PROMPT),
        "replay_start": 0,
        "output_token_ids": [417],
        "status": RequestStatus.FINISHED_LENGTH_CAPPED,
    }
    return SimpleNamespace(**{**request, **changes})


def last_command(request: Any) -> Any:
    side = SchedulerSide(
        Config(overlap="off"),
        EngineFacts(
            engine_id="e",
            windows=Windows([(PAGE, 0)]),
            ranks=1,
            produces=True,
            consumes=False,
        ),
    )
    side.set_peers((Peer(Source("127.0.0.1", 7000, "e"), Shard(0, 4, 0, 1)),))
    side.on_new_request(request)
    side.request_finished(request, ([1, 2, 3],))
    return side._commands[-1]


def test_the_last_offer_has_the_first_token_under_the_room_of_the_other_engine() -> None:
    offer = last_command(finished())
    assert isinstance(offer, Offer)
    assert offer.final
    assert offer.transfer == ROOM
    assert offer.final_token == FinalToken(ROOM, offer.identity, 417)
    assert offer.final_token.problem(offer.transfer, offer.identity) is None


def test_of_several_tokens_it_is_the_first() -> None:
    assert last_command(finished(output_token_ids=[5, 6, 7])).final_token.first_token == 5


def test_a_prefill_that_has_no_token_tells_none() -> None:
    assert last_command(finished(output_token_ids=[])).final_token is None


def test_a_prefill_that_was_aborted_offers_nothing() -> None:
    assert isinstance(
        last_command(finished(status=RequestStatus.FINISHED_ABORTED, output_token_ids=[])), Withdraw
    )
