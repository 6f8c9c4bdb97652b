# SPDX-License-Identifier: Apache-2.0
"""`GET /server_info` tells a prefill engine's address, as a router reads it; and never ends an engine."""

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("sglang.srt")

from pd_connector.control.seal import sealed
from pd_connector.kv.geometry import Shard
from pd_connector.kv.model import ModelFacts
from pd_connector.protocol.wire import about
from pd_connector.protocol.wire.params import ProducerAddress, parse_address
from pd_connector.protocol.wire.peers import Peer, Source
from pd_connector.sglang import hooks
from pd_connector.sglang.manager import Manager

KEY = "a key of forty characters for all engines"
FACTS = ModelFacts(b"config", b"weights", source="/models/a", fields=(("dtype", "bfloat16"),))
RANKS = tuple(Peer(Source("10.0.0.1", 7000 + n, "e"), Shard(0, 4, n, 2)) for n in range(2))


def told(manager: Any) -> dict[str, Any]:
    """What an engine with this manager answers."""
    backend = SimpleNamespace(value=hooks.BACKEND)
    queue = SimpleNamespace(transfer_backend=backend, kv_manager=manager)
    scheduler = SimpleNamespace(
        disagg_prefill_bootstrap_queue=queue, disagg_decode_prealloc_queue=None
    )
    answer = SimpleNamespace(internal_state={"max_running_requests": 8})
    found: dict[str, Any] = hooks._state(lambda *_: answer, scheduler, None).internal_state
    return found


def manager(*, produces: bool, keeps_states: bool = False) -> Manager:
    made = object.__new__(Manager)
    made._produces = produces
    made._address = sealed(ProducerAddress("e", RANKS, keeps_states=keeps_states), KEY)
    made.weights = cast(Any, SimpleNamespace(facts=FACTS))
    return made


def test_a_prefill_engine_tells_all_ranks_and_its_seal() -> None:
    found = parse_address(told(manager(produces=True))[hooks.BACKEND])
    assert found == sealed(ProducerAddress("e", RANKS), KEY)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_prefill_engine_tells_whether_its_model_keeps_states(keeps: bool) -> None:
    found = parse_address(told(manager(produces=True, keeps_states=keeps))[hooks.BACKEND])
    assert found is not None
    assert found.keeps_states is keeps


def test_a_decode_engine_tells_no_address() -> None:
    found = told(manager(produces=False))[hooks.BACKEND]
    assert found["side"] == "decode"
    assert parse_address(found) is None


@pytest.mark.parametrize("produces", [True, False])
def test_both_sides_tell_their_version_schema_and_model(produces: bool) -> None:
    found = json.loads(json.dumps(told(manager(produces=produces))[hooks.BACKEND]))
    assert about.read(found) == about.own(FACTS)


def test_an_engine_whose_address_cannot_be_told_still_answers() -> None:
    assert told(object.__new__(Manager)) == {"max_running_requests": 8}
