# SPDX-License-Identifier: Apache-2.0
"""An engine that is asked what it is (`describe`) says it, on either side."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from pd_connector.config import Config
from pd_connector.kv.geometry import Shard
from pd_connector.kv.model import ModelFacts
from pd_connector.protocol.wire import about
from pd_connector.protocol.wire.params import describe_params, parse_address
from pd_connector.vllm.connector import PDConnector
from pd_connector.vllm.engine_facts import EngineFacts
from pd_connector.vllm.messages import RankAddress
from pd_connector.vllm.pages.state_tables import NO_STATES, StateTables
from pd_connector.vllm.pages.windows import Windows
from pd_connector.vllm.scheduler_side import SchedulerSide

FACTS = ModelFacts(b"config", b"weights", source="/models/a", fields=(("dtype", "bfloat16"),))


def answer(*, produces: bool, consumes: bool, states: StateTables = NO_STATES) -> dict[str, Any]:
    """What a proxy gets from an engine whose two workers have said where they are."""
    side = SchedulerSide(
        Config(),
        EngineFacts(
            engine_id="e",
            windows=Windows([(16, 0)] * (2 if states else 1)),
            states=states,
            ranks=2,
            produces=produces,
            consumes=consumes,
        ),
    )
    connector = object.__new__(PDConnector)
    connector._scheduler, connector._engine_id = side, "e"
    port = 7000 if produces else 0
    second = RankAddress("127.0.0.1", port, Shard(0, 4, 1, 2), model=ModelFacts(b"of rank 1"))
    first = RankAddress("127.0.0.1", port, Shard(0, 4, 0, 2), model=FACTS)
    connector.set_xfer_handshake_metadata_pp_aware({(0, 1): second, (0, 0): first})
    request: Any = SimpleNamespace(
        request_id="r",
        kv_transfer_params=describe_params(),
        prompt_token_ids=[1],
        prompt_embeds=None,
        lora_request=None,
        mm_features=[],
        num_prompt_tokens=1,
        num_computed_tokens=1,
        status=None,
    )
    side.on_new_request(request)
    keeps, told = side.request_finished(request, ([1],))
    assert not keeps
    return dict(json.loads(json.dumps(told)))


@pytest.mark.parametrize(("produces", "consumes"), [(True, True), (True, False), (False, True)])
def test_it_tells_its_version_schemas_and_the_model_of_its_first_rank(
    produces: bool, consumes: bool
) -> None:
    told = answer(produces=produces, consumes=consumes)
    assert about.read(told) == about.own(FACTS)
    assert (parse_address(told) is not None) == produces
    assert ("describe" in told) == produces, "a proxy must not take a decode engine for a place"


@pytest.mark.parametrize("produces", [True, False])
def test_it_tells_how_long_a_prompt_must_be_to_compare_its_states(produces: bool) -> None:
    told = answer(produces=produces, consumes=not produces, states=StateTables([0, 16]))
    assert about.read(told).audit_tokens == 17, "a page, and a token"
    assert about.read(answer(produces=produces, consumes=True)).audit_tokens == 0
