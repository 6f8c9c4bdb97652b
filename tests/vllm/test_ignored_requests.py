# SPDX-License-Identifier: Apache-2.0
"""Requests whose KV is not told by their tokens are computed where they are."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from support.vllm_steps import FETCH

from pd_connector.config import Config
from pd_connector.vllm.engine_facts import EngineFacts
from pd_connector.vllm.pages.windows import Windows
from pd_connector.vllm.scheduler_side import SchedulerSide

OFFERS = {"do_remote_decode": True, "transfer_id": "t"}
FETCHES = {**FETCH, "remote_request_id": "t"}


def commands(**changes: Any) -> list[Any]:
    """What an engine does about a request with these properties."""
    known = {
        "request_id": "r",
        "kv_transfer_params": OFFERS,
        "prompt_token_ids": [1, 2, 3],
        "prompt_embeds": None,
        "cache_salt": None,
        "lora_request": None,
        "mm_features": [],
        "num_prompt_tokens": 3,
        "resumable": False,
    }
    side = SchedulerSide(
        Config(overlap="off"),
        EngineFacts(
            engine_id="e",
            windows=Windows([(16, 0)]),
            ranks=1,
            produces=True,
            consumes=True,
        ),
    )
    side.on_new_request(SimpleNamespace(**known | changes))
    return side._commands


@pytest.mark.parametrize("params", [OFFERS, FETCHES])
@pytest.mark.parametrize(
    "changes", [{"resumable": True}, {"prompt_embeds": object()}, {"prompt_token_ids": None}]
)
def test_prompts_that_may_grow_or_have_embeddings(
    params: dict[str, Any], changes: dict[str, Any]
) -> None:
    assert commands(kv_transfer_params=params)
    assert commands(kv_transfer_params=params, **changes) == []
